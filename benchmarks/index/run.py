"""The run: every part, with both sides in turn, round after round."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from math import inf
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

from benchmarks.index import in_process, measure
from benchmarks.index.publisher import Publisher, publisher_of
from benchmarks.index.report import Table
from benchmarks.index.sides import RunningIndexer, Side, Timed, running
from benchmarks.index.workload import (
    Workload,
    ingest_workload,
    probe_workload,
    query_workload,
)
from benchmarks.machine import CORES, INDEXER_CORE, LOAD_CORE, pin
from indexer.native import CORE_VARIABLE
from indexer.native import CORES as IMPLEMENTATIONS
from kvevents import WireForm

T = TypeVar("T")

_PROBES_A_TURN = 25  # probes before the next side's turn
_STEADY_RATE = 200_000  # blocks a second, below the limit of either side
_LENGTHS = {"1k": 1024, "8k": 8192, "131k": 131_072}
_RATES = {"at full rate": inf, f"at {_STEADY_RATE:,} blocks/s": _STEADY_RATE}


class Part(StrEnum):
    """A part that can be run alone."""

    INGEST = "ingest"
    MEMORY = "memory"
    VISIBILITY = "visibility"
    QUERIES = "queries"
    CONCURRENT = "concurrent"
    IN_PROCESS = "in-process"
    LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run.

    - `seconds`: the duration of each kind of query.
    - `probes`: events that are measured one by one.
    - `indexer_cores`: the cores of the indexers.
    """

    blocks: int
    rounds: int
    seconds: float
    probes: int
    form: WireForm = WireForm.VLLM_MAPS
    indexer_cores: Sequence[int] = (INDEXER_CORE,)


FULL = Scale(blocks=1 << 20, rounds=3, seconds=1.5, probes=300)
QUICK = Scale(blocks=1 << 17, rounds=1, seconds=0.3, probes=50)


class Run:
    """One run of the chosen parts. Its `tables` are filled during the run."""

    def __init__(self, sides: Sequence[Side], scale: Scale) -> None:
        self._sides = sides
        self._scale = scale
        self._rate = Table(f"Ingest of {scale.blocks:,} blocks, 1000 blocks/s")
        self._cpu = Table("Ingest, µs of CPU a block")
        self._memory = Table(
            "Resident bytes a block, steady", f"After {scale.blocks:,} blocks at {_STEADY_RATE:,} a second, one round."
        )
        self._burst = Table(
            "Resident bytes a block, after a burst",
            f"A second after {scale.blocks:,} blocks at full rate, many of which waited in receive queues.",
        )
        self._visibility = Table(
            "Event to queryable, ms",
            f"All indexers run at once and are measured in turns of {_PROBES_A_TURN} events. The time is that of a few "
            "switches of\nthreads, whose speed varies.",
        )
        self._queries = Table("`/query` on one connection")
        self._concurrent = Table(
            "`/query` of 8k cached tokens during ingest, ms", "Here the indexers may use all cores, beside the load."
        )
        self._in_process = Table(
            "Our index in process, interpreted, µs",
            "The other columns are C calls alone, as the core in Python makes them. `apply` decodes, packs and "
            "hashes; a match is given\npacked tokens.",
        )
        self._where = Table(
            "Ingest, CPU of a block by part, µs",
            "8 workers. *Without the lock*: receiving, decoding, hashing and applying, by a clock around the native "
            "core's calls that\nrelease it. *With it*: all else of the reader's thread.",
        )
        self.load = 0.0

    @property
    def tables(self) -> list[Table]:
        return [
            self._rate,
            self._cpu,
            self._memory,
            self._burst,
            self._visibility,
            self._queries,
            self._concurrent,
            self._in_process,
            self._where,
        ]

    def do(self, parts: Sequence[Part]) -> None:
        """Run these parts. Raises WrongAnswerError if a side answers wrongly."""
        pin(LOAD_CORE)
        if Part.INGEST in parts or Part.MEMORY in parts:
            for workers in (1, 8, 64):
                for event_blocks in (64, 1):
                    self._ingest(parts, workers, event_blocks)
        if {Part.VISIBILITY, Part.QUERIES, Part.CONCURRENT} & set(parts):
            with publisher_of(query_workload(self._scale.blocks, 8, self._scale.form)) as warm:
                if Part.VISIBILITY in parts:
                    self._see(warm)
                if Part.QUERIES in parts:
                    self._ask(warm)
                if Part.CONCURRENT in parts:
                    for event_blocks in (64, 1):
                        self._ask_while_ingesting(warm, event_blocks)
        if Part.IN_PROCESS in parts:
            pin(INDEXER_CORE)
            for _ in range(self._scale.rounds):
                self._call()

        if Part.LOCK in parts:
            for event_blocks in (64, 1):
                self._share(event_blocks)

    def _turns(self) -> Iterator[Side]:
        """Yield each side once in each round."""
        for number in range(self._scale.rounds):
            yield from _in_turn(self._sides, number)

    def _ingest(self, parts: Sequence[Part], workers: int, event_blocks: int) -> None:
        scale = self._scale
        row = f"{_counted(workers, 'worker')}, {event_blocks}-block events"
        with publisher_of(ingest_workload(scale.blocks, workers, event_blocks, scale.form)) as publisher:
            if Part.INGEST in parts:
                for side in self._turns():
                    with running(side, scale.indexer_cores) as indexer:
                        done = measure.ingest(indexer, publisher)
                    self._rate.add(row, side.name, done.blocks_per_second / 1000)
                    self._cpu.add(row, side.name, done.cpu_us_per_block)
                    self._burst.add(row, side.name, done.resident_bytes_per_block)
                    self.load = max(self.load, done.publisher_load)
            if Part.MEMORY in parts:
                for side in self._sides:
                    with running(side, scale.indexer_cores) as indexer:
                        done = measure.ingest(indexer, publisher, _STEADY_RATE)
                    self._memory.add(row, side.name, done.resident_bytes_per_block)

    def _share(self, event_blocks: int) -> None:
        """Measure the part of an ingest during which other Python threads have to wait."""
        scale, row = self._scale, f"{event_blocks}-block events"
        workload = ingest_workload(scale.blocks, 8, event_blocks, scale.form)
        with publisher_of(workload) as publisher, NamedTemporaryFile() as file:
            for _ in range(scale.rounds):
                with running(Timed(Path(file.name)), scale.indexer_cores) as indexer:
                    done = measure.ingest(indexer, publisher)
                locked = done.reader_us_per_block - done.unlocked_us_per_block
                whole = done.zmq_us_per_block + done.reader_us_per_block
                self._where.add(row, "in all", whole)
                self._where.add(row, "ZeroMQ's thread", done.zmq_us_per_block)
                self._where.add(row, "without the lock", done.unlocked_us_per_block)
                self._where.add(row, "with it", locked)
                self._where.add(row, "with it, %", locked / whole * 100)

    def _see(self, warm: Publisher) -> None:
        """Measure single events, of all sides in turn."""
        scale = self._scale
        for number in range(scale.rounds):
            with ExitStack() as running_ones:
                sides = []
                for side in _in_turn(self._sides, number):
                    indexer = running_ones.enter_context(running(side, scale.indexer_cores))
                    measure.ingest(indexer, warm)
                    probe = probe_workload(scale.probes, scale.form, 99)
                    times: list[float] = []
                    sides.append((side.name, running_ones.enter_context(measure.watching(indexer, probe)), times))
                for turn in range(scale.probes // _PROBES_A_TURN):
                    for _, watched, times in _in_turn(sides, turn):
                        times += islice(watched, _PROBES_A_TURN)
            for name, _, times in sides:
                latency = measure.latency(times)
                self._visibility.add("median", name, latency.p50 * 1e3)
                self._visibility.add("p99", name, latency.p99 * 1e3)

    def _ask(self, warm: Publisher) -> None:
        """Measure queries of a warm index."""
        for side in self._turns():
            with running(side, self._scale.indexer_cores) as indexer:
                measure.ingest(indexer, warm)
                self._query(indexer, warm.workload)

    def _ask_while_ingesting(self, warm: Publisher, event_blocks: int) -> None:
        """Measure queries of a warm index during an ingest."""
        scale = self._scale
        with publisher_of(ingest_workload(scale.blocks, 8, event_blocks, scale.form, first_worker=100)) as publisher:
            for name, rate in _RATES.items():
                row = f"{event_blocks}-block events {name}"
                for side in self._turns():
                    with running(side, CORES) as indexer:
                        measure.ingest(indexer, warm)
                        found = measure.latency_during_ingest(indexer, warm.workload, _LENGTHS["8k"], publisher, rate)
                    self._concurrent.add(f"{row}, p50", side.name, found.p50 * 1e3)
                    self._concurrent.add(f"{row}, p99", side.name, found.p99 * 1e3)

    def _query(self, indexer: RunningIndexer, held: Workload) -> None:
        for name, tokens in _LENGTHS.items():
            for cached in (True, False):
                row = f"{name} tokens, {'cached' if cached else 'miss'}"
                found = measure.query_latency(indexer, held, tokens, cached, self._scale.seconds)
                self._queries.add(f"{row}, p50 ms", indexer.side.name, found.p50 * 1e3)
                self._queries.add(f"{row}, p99 ms", indexer.side.name, found.p99 * 1e3)
                self._queries.add(f"{row}, queries/s", indexer.side.name, found.rate)

    def _call(self) -> None:
        """Measure our index without streams and HTTP."""
        form = self._scale.form
        costs = {}
        held = query_workload(1 << 17, 8, form)
        for core in reversed(IMPLEMENTATIONS):
            os.environ[CORE_VARIABLE] = core
            for size in (64, 1):
                ingested = ingest_workload(1 << 17, 1, size, form)
                costs[f"{core}: apply, {size}-block events, a block"] = in_process.apply_cost(ingested)
            for name, tokens in _LENGTHS.items():
                costs[f"{core}: match, {name} tokens cached"] = in_process.match_cost(held, tokens, repeats=50)
        del os.environ[CORE_VARIABLE]
        for row, cost in costs.items():
            self._in_process.add(row, "index call", cost.index * 1e6)
            self._in_process.add(row, "msgspec decode", cost.decode * 1e6)
            self._in_process.add(row, "token packing", cost.pack * 1e6)
            self._in_process.add(row, "xxh3 chain", cost.chain * 1e6)


def _in_turn(sides: Sequence[T], turn: int) -> Sequence[T]:
    """Return the sides in the order of a turn: the first of one turn is the last of the next."""
    return sides[:: -1 if turn % 2 else 1]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
