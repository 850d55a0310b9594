"""Ending a command of one's own accord: Ctrl-C and SIGTERM as an event to wait for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signal() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets, in the running loop; a second one acts as it usually does."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def leave() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def stop() -> None:
        stopped.set()
        leave()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        leave()
