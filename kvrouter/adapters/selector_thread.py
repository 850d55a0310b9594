"""A selector in an event loop of its own thread, for callers without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from kvrouter.selection import Selector

T = TypeVar("T")

_SECONDS: Final = 30.0


class SelectorThread:
    """Runs a selector until `close`. Any thread may use it."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Start a selector with these settings. Raises ValueError for wrong ones."""
        self.selector = Selector(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvrouter selector", daemon=True)
        self._thread.start()
        self.run(self.selector.__aenter__())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the selector, and return its result. Raises TimeoutError after 30 seconds."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(_SECONDS)
        except TimeoutError:
            future.cancel()
            raise

    def call(self, action: Callable[[], T]) -> T:
        """Call a function of the selector in its event loop, and return its result."""

        async def called() -> T:
            return action()

        return self.run(called())

    def close(self) -> None:
        """End the selector and its thread."""
        if self._loop.is_running():
            self.run(self.selector.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SECONDS)
        if not self._loop.is_running() and not self._loop.is_closed():
            self._loop.close()
