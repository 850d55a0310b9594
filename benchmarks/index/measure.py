"""The measurements of a running indexer. Its answers are verified before a figure is returned."""

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

_POLL_SECONDS = 0.02  # seconds between checks whether all is applied, long enough to cost nothing
_INGEST_DEADLINE = 300.0
_SETTLE_SECONDS = 1.0  # seconds after an ingest until memory is read


class WrongAnswerError(Exception):
    """An indexer's answer that contradicts the events."""


@dataclass(frozen=True, slots=True)
class Ingest:
    """One ingest of a workload.

    - `publisher_load`: the publisher's share of its core.
    - `zmq_us_per_block`: CPU time of ZeroMQ's threads, if the indexer has some.
    - `reader_us_per_block`: CPU time of the reader, if reported.
    - `unlocked_us_per_block`: its part without Python's lock.
    """

    blocks_per_second: float
    cpu_us_per_block: float
    zmq_us_per_block: float
    reader_us_per_block: float
    unlocked_us_per_block: float
    resident_bytes_per_block: float
    publisher_load: float


@dataclass(frozen=True, slots=True)
class Latency:
    """The seconds of queries, and their number a second on one connection."""

    p50: float
    p99: float
    rate: float


def latency(times: list[float]) -> Latency:
    """Return the latency of these seconds."""
    return Latency(median(times), quantiles(times, n=100)[98] if len(times) > 1 else times[0], 1 / mean(times))


def ingest(indexer: RunningIndexer, publisher: Publisher, rate: float = inf) -> Ingest:
    """Stream a workload into an indexer without it, at full rate or at `rate` blocks a second."""
    workload = publisher.workload
    indexer.register(publisher.open())
    markers = _markers(indexer, workload)
    time.sleep(0.5)  # time to connect the streams
    resident, publisher_cpu = indexer.resident_bytes(), cpu_seconds(publisher.pid)
    cpu, zmq = indexer.cpu_seconds(), _zmq_seconds(indexer)
    reader, unlocked = indexer.side.reader_seconds()
    started = publisher.start(rate)
    _await_markers(indexer, markers)
    seconds = time.monotonic() - started
    cpu, zmq = indexer.cpu_seconds() - cpu, _zmq_seconds(indexer) - zmq
    publisher_cpu = cpu_seconds(publisher.pid) - publisher_cpu
    time.sleep(_SETTLE_SECONDS)
    reader_now, unlocked_now = indexer.side.reader_seconds()  # reported at the end of a reading
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
    """Check an indexer's answers about prompts of all workers: whole, cut short, and continued differently.

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
    """Query prompts of a length repeatedly: prefixes that workers hold, or unknown ones."""
    requests = []
    for worker, number in _spread(workload, 16):
        prompt = workload.prompt(worker, number)[:tokens] if cached else random_tokens(f"miss {number}", tokens)
        request = indexer.query_request(prompt)
        _check(indexer, request, {worker: tokens} if cached else {})
        requests.append(request)
    return latency(_timed(indexer, cycle(requests), time.monotonic() + seconds))


@contextmanager
def watching(indexer: RunningIndexer, probe: Workload) -> Iterator[Iterator[float]]:
    """Publish one event into a warm index for each request of the iterator.

    Yield the seconds to the first answer that includes the event.
    """
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
    """Query cached prompts of a length while another workload is ingested, at most `rate` blocks a second."""
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
    """Yield worker and number of prompts, evenly spread over a workload."""
    total = workload.workers * workload.prompts
    for place in range(0, total, max(1, total // prompts)):
        worker, number = divmod(place, workload.prompts)
        yield workload.worker_ids[worker], number


def _markers(indexer: RunningIndexer, workload: Workload) -> list[bytes]:
    return [indexer.query_request(workload.prompt(worker, -1)) for worker in workload.worker_ids]


def _unseen(indexer: RunningIndexer, markers: list[bytes]) -> list[bytes]:
    """Return the markers from the first one on that is not found yet."""
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
