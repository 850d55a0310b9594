"""Our indexer, which tells how much of its time needs nothing of Python: `python -m benchmarks.index.timed FILE …` is
`kvrouter …`, with the processor seconds that the native inbox spent without Python's lock, a double, in that file.

They are those of the very calls that release it, less what such a call takes that has nothing to do.
"""

from __future__ import annotations

import sys
from mmap import mmap
from pathlib import Path
from statistics import median
from struct import Struct
from time import thread_time
from typing import Any

_SECONDS = Struct("d")


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
        self._add(thread_time() - begun)

    def apply(self, index: Any) -> Any:
        begun = thread_time()
        told = self._core.apply(index)
        self._add(thread_time() - begun)
        return told

    def _add(self, seconds: float) -> None:
        self._seconds += max(seconds - self._nothing, 0.0)
        _SECONDS.pack_into(self._shown, 0, self._seconds)

    def _receiving_nothing(self) -> float:
        begun = thread_time()
        self._core.receive([])
        return thread_time() - begun


def seconds(file: Path) -> float:
    """What such an indexer has told so far."""
    return float(_SECONDS.unpack(file.read_bytes())[0])


def _main() -> None:
    from indexer import native_inbox  # where the native core is not built, there is none
    from kvrouter.__main__ import main

    shared = Path(sys.argv.pop(1))
    shared.write_bytes(_SECONDS.pack(0.0))
    with shared.open("r+b") as opened:
        shown = mmap(opened.fileno(), _SECONDS.size)
    core = vars(native_inbox)["NativeCore"]
    vars(native_inbox)["NativeCore"] = lambda functions: _TimedInbox(core(functions), shown)
    main()


if __name__ == "__main__":
    _main()
