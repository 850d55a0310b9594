"""Our indexer, which tells what its reader's time is: `python -m benchmarks.index.timed FILE …` is `kvrouter …`.

In that file are two doubles: processor seconds of the reader, and of those the ones without Python's lock. These are of
the very calls that release it, less what such a call takes that has nothing to do.
"""

from __future__ import annotations

import sys
from mmap import mmap
from pathlib import Path
from statistics import median
from struct import Struct
from time import thread_time
from typing import Any

_SECONDS = Struct("2d")


class _TimedInbox:
    """The native core of an inbox; the clock runs while it receives and applies."""

    def __init__(self, core: Any, shown: mmap) -> None:
        self._core = core
        self._shown = shown
        self._seconds = 0.0
        self._nothing = median(self._receiving_nothing() for _ in range(1000))
        self.received, self.messages, self.address = self._core.received, self._core.messages, self._core.address

    def receive(self, sockets: list[int]) -> None:
        begun = thread_time()
        self._core.receive(sockets)
        self._released(begun)

    def apply(self, index: Any) -> Any:
        begun = thread_time()
        told = self._core.apply(index)
        self._released(begun)
        return told

    def _released(self, begun: float) -> None:
        now = thread_time()  # the reader's
        self._seconds += max(now - begun - self._nothing, 0.0)
        _SECONDS.pack_into(self._shown, 0, now, self._seconds)

    def _receiving_nothing(self) -> float:
        begun = thread_time()
        self._core.receive([])
        return thread_time() - begun


def seconds(file: Path) -> tuple[float, float]:
    """What such an indexer has told so far."""
    reader, unlocked = _SECONDS.unpack(file.read_bytes())
    return reader, unlocked


def _main() -> None:
    from indexer import native_inbox  # where the native core is not built, there is none
    from kvrouter.__main__ import main

    shared = Path(sys.argv.pop(1))
    shared.write_bytes(_SECONDS.pack(0.0, 0.0))
    with shared.open("r+b") as opened:
        shown = mmap(opened.fileno(), _SECONDS.size)
    core = vars(native_inbox)["NativeCore"]
    vars(native_inbox)["NativeCore"] = lambda functions: _TimedInbox(core(functions), shown)
    main()


if __name__ == "__main__":
    _main()
