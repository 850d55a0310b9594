"""The run: all sides in turn, in changing order. A side is stopped during another side's turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.index.report import Table
from benchmarks.transfer.process import SidesProcess
from benchmarks.transfer.sides import MEMCPY, RAW_SOCKET, SIZES, batch
from worker.kv_transfer.transfer import ENGINES, group_runs

SIDES = (MEMCPY, RAW_SOCKET, *ENGINES)
_RATIOS = {f"tcp / {RAW_SOCKET}": ("tcp", RAW_SOCKET), f"shm / {MEMCPY}": ("shm", MEMCPY)}
_LATENCY_SIZE = 1 << 12
_PAGES = 8192


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of rounds, and in each the number of batches of a size and of single blocks."""

    rounds: int
    batches: int
    singles: int


FULL = Scale(rounds=9, batches=3, singles=200)
QUICK = Scale(rounds=2, batches=2, singles=50)


class Run:
    """One run. `tables` are filled during the run; `missing` names sides that could not take part."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self.missing: dict[str, str] = {}
        self._rates = Table("Block size, GB/s")
        self._latency = Table("One block, µs")
        self._grouping = Table("Grouping, ms")

    @property
    def tables(self) -> list[Table]:
        return [self._rates, self._latency, self._grouping]

    def do(self) -> None:
        """Run everything. Raises RuntimeError if bytes do not land as they were sent."""
        sides: list[SidesProcess] = []
        try:
            for name in SIDES:
                try:
                    sides.append(SidesProcess(name))
                except ImportError as error:
                    self.missing[name] = str(error)
            for size in SIZES.values():
                for side in sides:
                    side.verify(size)
            for number in range(self._scale.rounds):
                self._round(sides[number % len(sides) :] + sides[: number % len(sides)])
        finally:
            for side in sides:
                side.end()
        self._group()

    def _round(self, sides: Sequence[SidesProcess]) -> None:
        for label, size in SIZES.items():
            rates = {side.name: _rate(side, size, self._scale.batches) for side in sides}
            _note(self._rates, label, rates)
        latencies = {side.name: median(side.times(_LATENCY_SIZE, 1, self._scale.singles)) * 1e6 for side in sides}
        _note(self._latency, "4 KiB, acknowledged", latencies)

    def _group(self) -> None:
        random = np.random.default_rng(0)
        sources, destinations = (random.permutation(1 << 20)[:_PAGES] for _ in range(2))
        for _ in range(50):
            start = time.perf_counter()
            runs = group_runs(sources, destinations)
            self._grouping.add(f"{_PAGES} random pages", "group_runs", (time.perf_counter() - start) * 1e3)
        assert len(runs.counts) > _PAGES // 2


def _rate(side: SidesProcess, size: int, batches: int) -> float:
    """Return GB/s, after an uncounted batch at the start of the turn."""
    times = side.times(size, None, batches + 1)[1:]
    return batch(size).total / median(times) / 1e9


def _note(table: Table, row: str, values: dict[str, float]) -> None:
    for name in SIDES:
        if name in values:
            table.add(row, name, values[name])
    for ratio, (ours, limit) in _RATIOS.items():
        table.add(row, ratio, values[ours] / values[limit])
