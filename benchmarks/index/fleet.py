"""The command `python -m benchmarks.index.fleet`: one index of a large fleet, in its own process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from statistics import median, quantiles
from threading import Thread
from typing import Annotated

import typer

from benchmarks.index.report import write_section
from benchmarks.index.workload import BLOCK_SIZE, random_tokens
from benchmarks.machine import CORES, INDEXER_CORE, LOAD_CORE, description, pin, resident_bytes
from indexer import Target, TargetRows, make_index
from indexer.dump import DumpedStream, TargetDump, write_dump
from indexer.hashing import Namespace, PackedPrompt, namespace_hash, pack_tokens
from indexer.index import Index, RowMatches
from indexer.snapshot import load_snapshot, save_snapshot
from kvevents import BlockRemoved, BlockStored, EngineHash, EventBatch, encode_batch

_MODEL = "model"
_NAMESPACE = Namespace(_MODEL, "default", None, None, BLOCK_SIZE)
_EVENT = 64  # blocks
_SHARED, _PROMPT = 64, 512  # blocks of the common start of all prompts, and of a whole prompt
_RATE = 200_000  # stored or removed blocks a second
_MATCHES = 2000
_HOW = """\
`make bench-fleet` fills one index, in process, with the blocks of {ranks:,} ranks: {blocks:,} blocks each, {whole:,} in
all, of {size} tokens. Prompts have {prompt} blocks, of which the first {shared} are equal everywhere. Events have
{event} blocks. Then new prompts are stored and as many blocks removed, in random ranks. Meanwhile the index answers the
router's query: the part of a prompt of {tokens:,} tokens that each rank holds. One thread applies events, another
queries. Another process loads the snapshot.

Machine: {machine}; load average {before:.1f} before, {after:.1f} after."""


class _Fleet:
    """The contents of the fleet's caches, and their event payloads."""

    def __init__(self, ranks: int, blocks: int) -> None:
        workers = [f"http://10.0.{number // 256}.{number % 256}" for number in range(ranks // 8 + 1)]
        self.targets = [Target(workers[rank // 8], rank % 8, _MODEL) for rank in range(ranks)]
        self.prompts = max((blocks - _SHARED) // (_PROMPT - _SHARED), 1)
        self.blocks = _SHARED + self.prompts * (_PROMPT - _SHARED)
        self._shared = random_tokens("shared", _SHARED * BLOCK_SIZE)

    def tokens(self, rank: int, number: int) -> list[int]:
        """Return the tokens of a rank's prompt."""
        return self._shared + random_tokens(f"{rank} {number}", (_PROMPT - _SHARED) * BLOCK_SIZE)

    def first(self, rank: int) -> bytes:
        """Return the payload that stores the common start of all prompts."""
        hashes = _hashes(rank, -1, _SHARED)
        return _payload(BlockStored(hashes, None, self._shared, BLOCK_SIZE, medium="GPU"))

    def stored(self, rank: int, number: int) -> Iterator[bytes]:
        """Yield the payloads that store the rest of a prompt."""
        tokens, hashes = self.tokens(rank, number), _hashes(rank, number, _PROMPT - _SHARED)
        parent = _hashes(rank, -1, _SHARED)[-1]
        for start in range(0, len(hashes), _EVENT):
            mine = hashes[start : start + _EVENT]
            begin = (_SHARED + start) * BLOCK_SIZE
            ids = tokens[begin : begin + len(mine) * BLOCK_SIZE]
            yield _payload(BlockStored(mine, parent, ids, BLOCK_SIZE, medium="GPU"))
            parent = mine[-1]

    def removed(self, rank: int, number: int) -> Iterator[bytes]:
        """Yield the payloads that remove a prompt, its end first."""
        hashes = _hashes(rank, number, _PROMPT - _SHARED)
        for end in range(len(hashes), 0, -_EVENT):
            yield _payload(BlockRemoved(hashes[max(end - _EVENT, 0) : end], "GPU"))


def _hashes(rank: int, number: int, blocks: int) -> list[EngineHash]:
    return [*array("Q", Random(f"hashes {rank} {number}").randbytes(8 * blocks))]


def _payload(event: BlockStored | BlockRemoved) -> bytes:
    return encode_batch(EventBatch(0.0, [event], 0))


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1024,
    blocks: Annotated[int, typer.Option(min=600, help="Blocks of each rank.")] = 40_000,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of events beside matches.")] = 5.0,
    load: Annotated[Path | None, typer.Option(hidden=True, help="Load this snapshot only.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write section Fleet of this file.")] = None,
) -> None:
    """Measure the index of a large fleet."""
    if load is not None:
        _load(load)
        return
    before = os.getloadavg()[0]
    pin(INDEXER_CORE)
    fleet, index, empty = _Fleet(ranks, blocks), make_index(), resident_bytes(os.getpid())
    rows: list[tuple[str, str]] = []
    spent = _fill(fleet, index)
    whole = fleet.blocks * ranks
    held = resident_bytes(os.getpid()) - empty
    rows.append(("memory", f"{held / 1e9:.2f} GB, {held / whole:.0f} bytes a block"))
    rows.append(("filling it, one thread", f"{whole / spent:,.0f} blocks/s, {spent / whole * 1e6:.2f} µs a block"))
    rows.append(("a match, nothing beside", percentiles(_matches(fleet, index, Random(1), _MATCHES))))
    _churn(fleet, index, seconds, rows)
    grown = resident_bytes(os.getpid()) - empty
    rows.append(("memory afterwards", f"{grown / 1e9:.2f} GB, {grown / whole:.0f} bytes a block"))
    _snapshot(fleet, index, rows)
    how = _HOW.format(
        ranks=ranks,
        blocks=fleet.blocks,
        whole=whole,
        size=BLOCK_SIZE,
        prompt=_PROMPT,
        shared=_SHARED,
        event=_EVENT,
        tokens=_PROMPT * BLOCK_SIZE,
        machine=description(),
        before=before,
        after=os.getloadavg()[0],
    )
    table = "\n".join(f"| {name} | {figure} |" for name, figure in [(f"{ranks:,} ranks", ""), ("---", "---"), *rows])
    text = f"{how}\n\n{table}"
    print(text)
    if markdown is not None:
        write_section(markdown, "Fleet", text)


def _fill(fleet: _Fleet, index: Index) -> float:
    """Fill the index, and return the processor seconds without the creation of payloads."""
    spent = 0
    for rank, target in enumerate(fleet.targets):
        if not rank % 64:
            print(f"filled {rank} ranks", file=sys.stderr, flush=True)
        index.add(target)
        payloads = [fleet.first(rank), *(each for n in range(fleet.prompts) for each in fleet.stored(rank, n))]
        begun = time.thread_time_ns()
        for payload in payloads:
            index.apply_payload(target, payload)
        spent += time.thread_time_ns() - begun
        status = index.status(target)
        assert status is not None
        assert sum(status.blocks.values()) == fleet.blocks
    return spent / 1e9


def _churn(fleet: _Fleet, index: Index, seconds: float, rows: list[tuple[str, str]]) -> None:
    """Apply half of the payloads at full speed, and the other half at a rate with concurrent matches."""
    random, new = Random(2), count(fleet.prompts)
    events: list[tuple[Target, bytes]] = []
    each = (_PROMPT - _SHARED) * 2  # blocks of a stored and a removed prompt
    old = {rank: count(0) for rank in range(len(fleet.targets))}
    for _ in range(int(seconds * _RATE / each)):
        rank = random.randrange(len(fleet.targets))
        target, kept = fleet.targets[rank], next(old[rank])
        removals = fleet.removed(rank, kept) if kept < fleet.prompts else ()
        events += [(target, payload) for payload in [*fleet.stored(rank, next(new)), *removals]]
    begun = time.thread_time_ns()
    half = len(events) // 2
    for target, payload in events[:half]:
        index.apply_payload(target, payload)
    spent = (time.thread_time_ns() - begun) / 1e9
    rows.append(("events when it is full, one thread", f"{half * _EVENT / spent:,.0f} blocks/s"))
    applying = Thread(target=_apply_at_rate, args=(index, events[half:]))
    applying.start()
    times: list[float] = []
    prompts = Random(3)
    while applying.is_alive():
        times += _matches(fleet, index, prompts, 20)
    applying.join()
    rows.append((f"a match beside {_RATE:,} blocks/s", percentiles(times)))


def _apply_at_rate(index: Index, events: list[tuple[Target, bytes]]) -> None:
    os.sched_setaffinity(0, {INDEXER_CORE} if len(CORES) == 1 else {LOAD_CORE})
    begun = time.monotonic()
    for number, (target, payload) in enumerate(events):
        ahead = number * _EVENT / _RATE - (time.monotonic() - begun)
        if ahead > 0.001:
            time.sleep(ahead)
        index.apply_payload(target, payload)


def _matches(fleet: _Fleet, index: Index, random: Random, number: int) -> list[float]:
    """Return the seconds of matches of prompts that a rank holds, or held."""
    rows = TargetRows(len(fleet.targets), {target: row for row, target in enumerate(fleet.targets)})
    root = namespace_hash(_NAMESPACE, "")
    times = []
    for _ in range(number):
        rank = random.randrange(len(fleet.targets))
        packed = PackedPrompt(pack_tokens(fleet.tokens(rank, random.randrange(fleet.prompts))))
        found = RowMatches(rows)
        begun = time.perf_counter()
        index.match_rows(root, BLOCK_SIZE, packed, _PROMPT, rows, found)
        times.append(time.perf_counter() - begun)
        assert found.tokens[rank] >= _SHARED * BLOCK_SIZE
    return times


def percentiles(seconds: list[float]) -> str:
    return f"p50 {median(seconds) * 1e6:,.0f} µs, p99 {quantiles(seconds, n=100)[98] * 1e6:,.0f} µs"


def _snapshot(fleet: _Fleet, index: Index, rows: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as folder:
        path, begun = Path(folder) / "snapshot", time.monotonic()
        size = save_snapshot(path, write_dump((_dumped(index, target) for target in fleet.targets), ""))
        rows.append(("a snapshot", f"{size / 1e9:.2f} GB, written in {time.monotonic() - begun:.0f} s"))
        command = [sys.executable, "-m", "benchmarks.index.fleet", "--load", str(path)]
        loaded = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        rows.append(("a warm start from it", loaded.strip()))


def _dumped(index: Index, target: Target) -> TargetDump:
    runs, holders = index.dump(target)
    stream = DumpedStream(0, 0.0)
    source = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "")
    name = (target.worker, target.dp_rank, target.model, target.tenant, "vLLM")
    return TargetDump(*name, *source, BLOCK_SIZE, None, None, [BLOCK_SIZE], stream, runs, holders)


def _load(path: Path) -> None:
    """Load a snapshot into an empty index."""
    pin(INDEXER_CORE)
    begun, index, ranks = time.monotonic(), make_index(), 0
    for saved in load_snapshot(path, ""):
        dump = saved.whole()
        target = Target(dump.worker, dump.dp_rank, dump.model, dump.tenant)
        index.add(target)
        index.restore(target, dump)
        ranks += 1
    seconds = time.monotonic() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{seconds:.0f} s for {ranks:,} ranks, at most {most / 1e9:.1f} GB resident")


if __name__ == "__main__":
    typer.run(main)
