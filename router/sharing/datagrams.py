"""Load shared between the processes of one machine: datagrams between Unix sockets in one folder.

The kernel keeps each whole and in order; a process that does not read for a while loses some, and dies alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Changes are gathered so long: a datagram costs some 10 µs on each side.
INTERVAL = 0.002
_MAX_BYTES = 256 * 1024
# Read in one go, so that requests are served in between.
_AT_ONCE = 64


class DatagramChannel:
    """Process `number` of `processes` that have sockets in `folder`."""

    def __init__(self, folder: Path, number: int, processes: int) -> None:
        self.name = "unix datagrams"
        self.interval = INTERVAL
        self.problem: str | None = "not bound yet"
        self._path = _path(folder, number)
        self._others = [str(_path(folder, other)) for other in range(processes) if other != number]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def send(self, message: bytes) -> None:
        """Send to all others at once."""
        for other in self._others:
            with suppress(OSError):  # it is not there, or does not read
                self._socket.sendto(message, other)

    async def flush(self) -> None:
        """Nothing waits."""

    async def run(self, receive: Callable[[bytes], None], connected: Callable[[], None]) -> None:
        """Bring messages until cancelled. Raises OSError when the socket cannot be bound."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            for _ in range(_AT_ONCE):
                try:
                    data = self._socket.recv(_MAX_BYTES)
                except OSError:
                    return
                receive(data)

        with self._socket:
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
            loop.add_reader(self._socket, read)
            self.problem = None
            connected()
            try:
                await asyncio.Event().wait()
            finally:
                loop.remove_reader(self._socket)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number}.load"
