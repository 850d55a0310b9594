"""Our indexer with a report of its reader's time: `python -m benchmarks.index.timed FILE …` is `kvrouter …`.

The file has two doubles: processor seconds of the reader, and its part without Python's lock. The latter is measured
around the calls that release the lock, minus the cost of a call without work.
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


class _TimedReader:
    """The native core of an inbox. The clock runs while it reads and applies."""

    def __init__(self, core: Any, shown: mmap) -> None:
        self._core = core
        self._shown = shown
        self._seconds = 0.0
        self._nothing = median(self._reading_nothing() for _ in range(1000))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def read(self, seconds: float) -> int:
        begun = thread_time()
        left: int = self._core.read(seconds)
        self._released(begun)
        return left

    def apply(self) -> Any:
        begun = thread_time()
        applied = self._core.apply()
        self._released(begun)
        return applied

    def _released(self, begun: float) -> None:
        now = thread_time()  # the reader's thread
        self._seconds += max(now - begun - self._nothing, 0.0)
        _SECONDS.pack_into(self._shown, 0, now, self._seconds)

    def _reading_nothing(self) -> float:
        begun = thread_time()
        self._core.read(0.0)
        return thread_time() - begun


def seconds(file: Path) -> tuple[float, float]:
    """Return the reported seconds of an indexer."""
    reader, unlocked = _SECONDS.unpack(file.read_bytes())
    return reader, unlocked


def _main() -> None:
    from indexer.native import inbox  # missing where the native core is not built
    from kvrouter.__main__ import main

    shared = Path(sys.argv.pop(1))
    shared.write_bytes(_SECONDS.pack(0.0, 0.0))
    with shared.open("r+b") as opened:
        shown = mmap(opened.fileno(), _SECONDS.size)
    reader = vars(inbox)["LiveReader"]
    vars(inbox)["LiveReader"] = lambda *arguments: _TimedReader(reader(*arguments), shown)
    main()


if __name__ == "__main__":
    _main()
