"""The run: every measurement of every router, with the routers in turn, round after round."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.proxy.first_event import LONG, SHORT, first_event
from benchmarks.proxy.load import LoadError, loaded
from benchmarks.proxy.processes import StartError, cpu_of, memory_of
from benchmarks.proxy.report import Table
from benchmarks.proxy.sides import CACHE_AWARE, ROUND_ROBIN, Nothing, Relay, RunningRouter, Side
from benchmarks.proxy.streams import streamed
from benchmarks.proxy.workers import stream_workers, whole_workers

SIZES = {"1 KB": 1024, "64 KB": 64 * 1024}
CONNECTIONS = (1, 16, 64)
# Seconds without a request after which no router here keeps connections to workers that close idle ones after 5 s.
_COLD_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run.

    It has the seconds of each load, the number and repetitions of concurrent streams, the number of sequential
    requests, and the blocks of our index.
    """

    rounds: int = 3
    seconds: float = 3.0
    streams: int = 200
    bursts: int = 5
    requests: int = 150
    blocks: int = 1_000_000


FULL = Scale()
QUICK = Scale(rounds=1, seconds=1.0, streams=100, bursts=2, requests=30, blocks=100_000)


class Run:
    """A run whose tables are filled during the measurement."""

    def __init__(self, sides: Sequence[Side], scale: Scale, folder: Path, rows: Sequence[str] = ()) -> None:
        """Create a run. `rows`: parts of the names of the rows to measure; all rows if it is empty."""
        self._sides = sides
        self._scale = scale
        self._folder = folder
        self._rows = rows
        self._modes = list(dict.fromkeys(side.mode for side in sides))
        self.failures: list[str] = []
        self._base: dict[str, tuple[float, float]] = {}
        self._tables: dict[tuple[str, str], Table] = {}

    @property
    def tables(self) -> list[Table]:
        return list(self._tables.values())

    def do(self) -> None:
        """Run every round."""
        nothing, relay = Nothing(), Relay()
        for number in range(self._scale.rounds):
            turn = number % len(self._sides)
            sides = [*self._sides[turn:], *self._sides[:turn]]
            if any(self._wants(row) for row, *_ in self._whole_rows()):
                with whole_workers(self._folder) as workers:
                    self._whole(number, [nothing, relay, *sides], workers)
            if any(self._wants(row) for row in (self._burst_row(False), self._burst_row(True), SHORT, LONG)):
                with stream_workers(self._folder) as workers:
                    for mode in self._modes:
                        self._streams(number, mode, [nothing, relay, *(s for s in sides if s.mode == mode)], workers)

    def _wants(self, row: str) -> bool:
        return not self._rows or any(part in row for part in self._rows)

    def _whole_rows(self) -> Iterator[tuple[str, int, int, bool]]:
        """Yield the name, size, connections and novelty of each row of whole answers."""
        for name, connections in product(SIZES, CONNECTIONS):
            row = f"{name}, {connections} connection{'s' if connections > 1 else ''}"
            yield row, SIZES[name], connections, False
            if connections == CONNECTIONS[-1] and CACHE_AWARE in self._modes:
                yield f"{row}, a new last message", SIZES[name], connections, True

    def _burst_row(self, cold: bool) -> str:
        return f"{self._scale.streams} streams at once, {'no connection to workers open' if cold else 'warm'}"

    @contextmanager
    def _failing(self, side: Side) -> Iterator[None]:
        """Drop the figures of a side that fails, and keep those of others."""
        try:
            yield
        except (StartError, LoadError) as error:
            self.failures.append(f"{side.name} {side.mode}")
            print(f"FAILED {side.name} {side.mode}: {error}", file=sys.stderr, flush=True)

    @contextmanager
    def _running(self, sides: Sequence[Side], workers: Sequence[str]) -> Iterator[dict[Side, RunningRouter]]:
        """Run all sides at once, except those that do not start. They take turns, because a machine's speed changes."""
        with ExitStack() as stack:
            running: dict[Side, RunningRouter] = {}
            for side in sides:
                with self._failing(side):
                    running[side] = stack.enter_context(side.running(workers, self._folder))
            yield running

    def _whole(self, number: int, sides: Sequence[Side], workers: Sequence[str]) -> None:
        with self._running(sides, workers) as running:
            for side, router in running.items():
                self._say(number, side, "connections, caches")
                with self._failing(side):
                    loaded(router.url, SIZES["1 KB"], 16, min(self._scale.seconds, 2.0), self._folder)
            aware = {side: router for side, router in running.items() if side.mode != ROUND_ROBIN}
            for row, size, connections, new in self._whole_rows():
                if self._wants(row):
                    self._row(number, aware if new else running, row, size, connections, new)
            for side, router in running.items():
                if router.pid:
                    self._add(
                        side, "resident memory afterwards, MB", "after whole answers", memory_of(router.pid) / 2**20
                    )

    def _row(
        self,
        number: int,
        running: Mapping[Side, RunningRouter],
        row: str,
        size: int,
        connections: int,
        new: bool = False,
    ) -> None:
        for side, router in running.items():
            self._say(number, side, row)
            with self._failing(side):
                self._load(side, router, row, size, connections, new)

    def _load(self, side: Side, running: RunningRouter, row: str, size: int, connections: int, new: bool) -> None:
        mode = CACHE_AWARE if new else side.mode
        before = cpu_of(running.pid) if running.pid else 0.0
        load = loaded(running.url, size, connections, self._scale.seconds, self._folder, new)
        self._add(side, "requests a second", row, load.rate, mode, more=True)
        if running.pid is None:
            self._base[row] = (load.p50, load.p99)
            return
        base50, base99 = self._base[row]
        self._add(side, "added p50, µs", row, (load.p50 - base50) * 1e6, mode)
        self._add(side, "added p99, µs", row, (load.p99 - base99) * 1e6, mode)
        spent = (cpu_of(running.pid) - before) / load.requests
        self._add(side, "processor time of a request, µs", row, spent * 1e6, mode)

    def _streams(self, number: int, mode: str, sides: Sequence[Side], workers: Sequence[str]) -> None:
        bursts = [False] * self._scale.bursts if self._wants(self._burst_row(False)) else []
        if self._wants(self._burst_row(True)):
            bursts += [True] * min(2, self._scale.bursts)
        with self._running(sides, workers) as running:
            for cold in bursts:
                if cold:
                    time.sleep(_COLD_SECONDS)
                for side, router in running.items():
                    self._say(number, side, f"{'cold' if cold else 'warm'} streams, {mode}")
                    with self._failing(side):
                        self._burst(side, router, mode, cold)
            for side, router in running.items():
                self._say(number, side, f"first events, {mode}")
                with self._failing(side):
                    self._first_events(side, router, mode)

    def _burst(self, side: Side, running: RunningRouter, mode: str, cold: bool) -> None:
        if not cold:
            streamed(running.url, self._scale.streams)  # opens connections to workers
        before = cpu_of(running.pid) if running.pid else 0.0
        result = streamed(running.url, self._scale.streams)
        row = self._burst_row(cold)
        if running.pid is None:
            self._base[row] = (result.p50, result.p99)
            return
        spent = (cpu_of(running.pid) - before) / self._scale.streams
        base50, base99 = self._base[row]
        self._add(side, "first event added, p50, ms", row, (result.p50 - base50) * 1e3, mode)
        self._add(side, "first event added, p99, ms", row, (result.p99 - base99) * 1e3, mode)
        self._add(side, "processor time of a stream, µs", row, spent * 1e6, mode)

    def _first_events(self, side: Side, running: RunningRouter, mode: str) -> None:
        for row in filter(self._wants, (SHORT, LONG)):
            seconds = first_event(running.url, row, self._scale.requests)
            if running.pid is None:
                self._base[row] = (seconds, seconds)
            else:
                figure = "first event added, one request at a time, p50, ms"
                self._add(side, figure, row, (seconds - self._base[row][0]) * 1e3, mode)

    def _add(self, side: Side, figure: str, row: str, value: float, mode: str = "", more: bool = False) -> None:
        """Add a value to the table of `mode`, by default the side's. Sides without a mode are in all tables."""
        mode = mode or side.mode
        for each in [mode] if mode else self._modes:
            table = self._tables.setdefault((each, figure), Table(f"{each}: {figure}", more))
            table.add(row, side.name, value)

    def _say(self, number: int, side: Side, what: str) -> None:
        print(f"round {number + 1}: {side.name} {side.mode} {what}", file=sys.stderr, flush=True)
