"""The threads of hooks, apart from the router's event loop, so that a function that blocks delays only its own request.

Coroutine functions run in an event loop in a thread of its own. Plain functions run in at most `THREADS` threads. The
threads are daemons, because a function that never returns cannot be ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from inspect import iscoroutinefunction
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeAlias

from router.http.event_loop import read_error

THREADS: Final = 16
# Calls that run or wait, also those whose deadline has passed. More are refused at once.
MOST_CALLS: Final = 1024

_Function: TypeAlias = Callable[[Any], Any]


class BusyError(RuntimeError):
    """An error for a call beyond `MOST_CALLS`."""


class HookThreads:
    """The threads. They start with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._plain: SimpleQueue[tuple[Future[Any], _Function, Any] | None] = SimpleQueue()
        self._threads = 0
        self._running: set[Future[Any]] = set()

    def submit(self, function: _Function, argument: Any, seconds: float) -> Future[Any]:
        """Call a function. A coroutine is cancelled after `seconds`. Raises BusyError."""
        if len(self._running) >= MOST_CALLS:
            raise BusyError(f"{MOST_CALLS} calls have not ended")
        future: Future[Any] = Future()
        self._running.add(future)
        if iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__):
            loop = self._running_loop()
            loop.call_soon_threadsafe(self._start_task, future, function, argument, seconds)
        else:
            self._plain.put((future, function, argument))
            if len(self._running) > self._threads and self._threads < THREADS:
                self._threads += 1
                Thread(target=self._run_plain, name=f"hooks-{self._threads}", daemon=True).start()
        return future

    async def call(self, function: _Function, argument: Any, seconds: float) -> Any:
        """Return the result of a function. Raises TimeoutError after `seconds`, BusyError, and the function's errors.

        A plain function continues after that time, and its result is dropped.
        """
        result = _awaitable(self.submit(function, argument, seconds))
        async with asyncio.timeout(seconds):
            return await result

    async def close(self, seconds: float) -> None:
        """End the threads after the running calls, or after `seconds`.

        Functions that never return keep their threads.
        """
        running = [_awaitable(each) for each in list(self._running) if not each.done()]
        if running:
            await asyncio.wait(running, timeout=seconds)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
        for _ in range(self._threads):
            self._plain.put(None)
        self._threads = 0

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=_run_loop, args=(self._loop,), name="hooks", daemon=True).start()
        return self._loop

    def _start_task(self, future: Future[Any], function: _Function, argument: Any, seconds: float) -> None:
        """Start a coroutine function in its event loop."""
        if not future.set_running_or_notify_cancel():  # its caller no longer waits
            self._running.discard(future)
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(_awaited(function, argument))
        limit = loop.call_later(seconds, task.cancel)
        task.add_done_callback(partial(self._task_ended, future, limit))

    def _task_ended(self, future: Future[Any], limit: asyncio.TimerHandle, task: asyncio.Task[Any]) -> None:
        limit.cancel()
        self._running.discard(future)
        if task.cancelled():
            future.set_exception(TimeoutError())
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def _run_plain(self) -> None:
        """Call plain functions, in one of the threads."""
        while (call := self._plain.get()) is not None:
            future, function, argument = call
            if future.set_running_or_notify_cancel():
                try:
                    result = function(argument)
                except BaseException as error:  # also SystemExit, which must not end the thread
                    future.set_exception(error)
                else:
                    future.set_result(result)
            self._running.discard(future)


def _awaitable(future: Future[Any]) -> asyncio.Future[Any]:
    """Return a future of this event loop for another's. Its error is no warning if no caller waits any longer."""
    result = asyncio.wrap_future(future)
    result.add_done_callback(read_error)
    return result


async def _awaited(function: _Function, argument: Any) -> Any:
    return await function(argument)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=1.0) if tasks else asyncio.sleep(0))
    finally:
        loop.close()
