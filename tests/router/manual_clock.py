"""Time as a test wants it: a manual clock, and waiting for a condition."""

from __future__ import annotations


class Clock:
    """Stands where `time.monotonic` does; `now` is what it says."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
