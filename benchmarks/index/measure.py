"""What is measured of a running indexer. No figure is returned before the answers were found to be right."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf
from statistics import mean, median, quantiles

import zmq

from benchmarks.index.publisher import Publisher, Streams
from benchmarks.index.sides import RunningIndexer
from benchmarks.index.workload import BLOCK_SIZE, Workload, random_tokens
from benchmarks.machine import cpu_seconds

_POLL_SECONDS = 0.02  # between looks whether all is applied: rare enough to cost nothing
_INGEST_DEADLINE = 300.0
_SETTLE_SECONDS = 1.0  # after an ingest, until memory counts


class WrongAnswerError(Exception):
    """An indexer's answer is not what the events say."""


@dataclass(frozen=True, slots=True)
class Ingest:
    """One ingest of a workload. `publisher_load` is the share of its core that the publisher used meanwhile,
    `zmq_us_per_block` what of the CPU time ZeroMQ's own threads took, of an indexer that has such,
    `reader_us_per_block` what its reader took, if it tells, and `unlocked_us_per_block` what of that without Python's
    lock."""

    blocks_per_second: float
    cpu_us_per_block: float
    zmq_us_per_block: float
    reader_us_per_block: float
    unlocked_us_per_block: float
    resident_bytes_per_block: float
    publisher_load: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, and how many a second on one connection."""

    p50: float
    p99: float
    rate: float


def latency(times: list[float]) -> Latency:
    """What these seconds come to."""
    return Latency(median(times), quantiles(times, n=100)[98] if len(times) > 1 else times[0], 1 / mean(times))


def ingest(indexer: RunningIndexer, publisher: Publisher, rate: float = inf) -> Ingest:
    """Stream a workload into an indexer that does not have it: at full rate, or at so many blocks a second."""
    workload = publisher.workload
    indexer.register(publisher.open())
    markers = _markers(indexer, workload)
    time.sleep(0.5)  # the streams' connections are made
    resident, publisher_cpu = indexer.resident_bytes(), cpu_seconds(publisher.pid)
    cpu, zmq = indexer.cpu_seconds(), _zmq_seconds(indexer)
    reader, unlocked = indexer.side.reader_seconds()
    started = publisher.start(rate)
    _await_markers(indexer, markers)
    seconds = time.monotonic() - started
    cpu, zmq = indexer.cpu_seconds() - cpu, _zmq_seconds(indexer) - zmq
    publisher_cpu = cpu_seconds(publisher.pid) - publisher_cpu
    time.sleep(_SETTLE_SECONDS)
    reader_now, unlocked_now = indexer.side.reader_seconds()  # told when a reading ends
    resident = indexer.resident_bytes() - resident
    verify(indexer, workload)
    blocks = workload.blocks
    a_block = 1e6 / blocks
    return Ingest(
        blocks / seconds,
        cpu * a_block,
        zmq * a_block,
        (reader_now - reader) * a_block,
        (unlocked_now - unlocked) * a_block,
        resident / blocks,
        publisher_cpu / seconds,
    )


def _zmq_seconds(indexer: RunningIndexer) -> float:
    return sum(seconds for name, seconds in indexer.thread_seconds().items() if name.startswith("ZMQbg"))


def verify(indexer: RunningIndexer, workload: Workload, prompts: int = 256) -> None:
    """Check an indexer's answers about prompts spread over all workers: whole, cut short, and continued differently.

    Raises WrongAnswerError.
    """
    for worker, number in _spread(workload, prompts):
        tokens = workload.prompt(worker, number)
        half = workload.prompt_blocks // 2 * BLOCK_SIZE
        other = random_tokens(f"other {number}", half)
        asked = [
            (tokens, len(tokens)),
            (tokens[: half + BLOCK_SIZE - 1], half),
            (tokens[:half] + other, half),
            (other + tokens[half:], 0),
        ]
        for query, expected in asked:
            _check(indexer, indexer.query_request(query), {worker: expected} if expected else {})


def query_latency(indexer: RunningIndexer, workload: Workload, tokens: int, cached: bool, seconds: float) -> Latency:
    """Ask for prompts of a length, over and over: prefixes of what workers hold, or nobody's."""
    requests = []
    for worker, number in _spread(workload, 16):
        prompt = workload.prompt(worker, number)[:tokens] if cached else random_tokens(f"miss {number}", tokens)
        request = indexer.query_request(prompt)
        _check(indexer, request, {worker: tokens} if cached else {})
        requests.append(request)
    return latency(_timed(indexer, cycle(requests), time.monotonic() + seconds))


@contextmanager
def watching(indexer: RunningIndexer, probe: Workload) -> Iterator[Iterator[float]]:
    """Publish one event after another into a warm index, as often as is asked for the next one: the seconds from there
    to the first answer that knows it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    streams = Streams(probe, context)
    try:
        indexer.register(streams.endpoints)
        streams.await_subscribers()
        yield _watched(indexer, probe, streams)
    finally:
        streams.close()
        context.term()


def _watched(indexer: RunningIndexer, probe: Workload, streams: Streams) -> Iterator[float]:
    (worker,) = probe.worker_ids
    for seq, payload in enumerate(islice(probe.batches(worker), probe.prompts)):  # without the marker
        request = indexer.query_request(probe.prompt(worker, seq))
        _check(indexer, request, {})
        time.sleep(0.002)
        started = time.perf_counter()
        streams.send(worker, seq, payload)
        while not indexer.ask(request):
            pass
        yield time.perf_counter() - started


def latency_during_ingest(
    indexer: RunningIndexer, workload: Workload, tokens: int, publisher: Publisher, rate: float = inf
) -> Latency:
    """Ask for cached prompts of a length while another workload streams in, at most `rate` blocks a second."""
    indexer.register(publisher.open())
    prompts = [workload.prompt(worker, number)[:tokens] for worker, number in _spread(workload, 16)]
    asked = cycle([indexer.query_request(prompt) for prompt in prompts])
    markers = _markers(indexer, publisher.workload)
    time.sleep(0.5)
    publisher.start(rate)
    times: list[float] = []
    while markers:
        times += _timed(indexer, islice(asked, 16))
        markers = _unseen(indexer, markers)
    verify(indexer, publisher.workload, 16)
    return latency(times)


def _timed(indexer: RunningIndexer, requests: Iterable[bytes], end: float = inf) -> list[float]:
    times = []
    exchange = indexer.client.exchange
    for request in requests:
        started = time.perf_counter()
        exchange(request)
        times.append(time.perf_counter() - started)
        if time.monotonic() > end:
            break
    return times


def _check(indexer: RunningIndexer, request: bytes, expected: dict[int, int]) -> None:
    matched = indexer.ask(request)
    if matched != expected:
        raise WrongAnswerError(f"{indexer.side.name}: matched tokens by worker should be {expected}, not {matched}")


def _spread(workload: Workload, prompts: int) -> Iterator[tuple[int, int]]:
    """Worker and number of prompts, evenly spread over a workload."""
    total = workload.workers * workload.prompts
    for place in range(0, total, max(1, total // prompts)):
        worker, number = divmod(place, workload.prompts)
        yield workload.worker_ids[worker], number


def _markers(indexer: RunningIndexer, workload: Workload) -> list[bytes]:
    return [indexer.query_request(workload.prompt(worker, -1)) for worker in workload.worker_ids]


def _unseen(indexer: RunningIndexer, markers: list[bytes]) -> list[bytes]:
    """The markers from the first on that is not found yet."""
    for place, marker in enumerate(markers):
        if not indexer.ask(marker):
            return markers[place:]
    return []


def _await_markers(indexer: RunningIndexer, markers: list[bytes]) -> None:
    deadline = time.monotonic() + _INGEST_DEADLINE
    while markers := _unseen(indexer, markers):
        if time.monotonic() > deadline:
            raise WrongAnswerError(f"{indexer.side.name}: {len(markers)} streams have not been applied to their end")
        time.sleep(_POLL_SECONDS)
