"""SIGINT and SIGTERM: what they do to a server in this process, and how a supervisor waits for them."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from router.server.http_server import HttpServer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopped_by_signals(server: HttpServer, app: FastAPI, drain_seconds: float) -> Iterator[Callable[[], None]]:
    """Stop a server by signals. Yields the handler of SIGTERM.

    - SIGINT stops it.
    - SIGTERM stops it after it has drained.
    - A second signal of either kind stops it at once, without waiting for requests.
    """
    loop = asyncio.get_running_loop()
    signalled = False

    def stop() -> None:
        server.should_exit = True

    def is_first() -> bool:
        """Return whether this is the first signal. A later one stops the server at once."""
        nonlocal signalled
        first, signalled = not signalled, True
        if not first:
            server.force_exit = True
            stop()
        return first

    def interrupt() -> None:
        if is_first():
            stop()

    def drain() -> None:
        if not is_first():
            return
        readiness = getattr(app.state, "readiness", None)
        if readiness is None or not drain_seconds:
            stop()
            return
        readiness.stopping = True
        server.drain()
        loop.call_later(drain_seconds, stop)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, drain)
    try:
        yield drain
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


class SignalWaiter:
    """Receives signals without an event loop. `readable`: a socket to wait for; `last`: the last signal."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.readable, self._writable = socket.socketpair()

    def __enter__(self) -> SignalWaiter:
        for each in (self.readable, self._writable):
            each.setblocking(False)
        self._handlers_before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self.readable.close()
        self._writable.close()

    def forget(self) -> None:
        """Forget the last signal."""
        self.last = None
        while True:
            try:
                self.readable.recv(64)
            except BlockingIOError:
                return

    def _note(self, number: int, _: object) -> None:
        self.last = number
        self._writable.send(b"!")
