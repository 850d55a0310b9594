"""An event loop in a thread of its own, and a selector in it, for callers without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from kvrouter.selection import Selector

T = TypeVar("T")

_SECONDS: Final = 30.0


class LoopThread:
    """Runs an event loop until `close`. Any thread may use it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvrouter selector", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine, and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
        """Run a coroutine, and return its result. Raises TimeoutError after 30 seconds.

        `undo`: called with a result that arrives later; None: the coroutine is cancelled instead.
        """
        future = self.submit(coroutine)
        try:
            return future.result(_SECONDS)
        except TimeoutError:
            if undo is None:
                future.cancel()
            else:  # a cancellation could lose a result that exists already
                future.add_done_callback(lambda late: None if late.exception() else undo(late.result()))
            raise

    def call(self, action: Callable[[], T]) -> T:
        """Call a function in the event loop, and return its result."""

        async def called() -> T:
            return action()

        return self.run(called())

    def close(self) -> None:
        """End the event loop and its thread."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SECONDS)
        if not self._loop.is_running() and not self._loop.is_closed():
            self._loop.close()


class SelectorThread(LoopThread):
    """Runs a selector until `close`. Any thread may use it."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Start a selector with these settings. Raises ValueError for wrong ones."""
        self.selector = Selector(settings)
        super().__init__()
        self.run(self.selector.__aenter__())

    def close(self) -> None:
        """End the selector, the event loop and its thread."""
        if self._loop.is_running():
            self.run(self.selector.close())
        super().close()
