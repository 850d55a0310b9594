"""The command `python -m benchmarks.reporter`, which `make bench-reporter` runs.

A reporter with a real publisher without subscribers stores 65 new blocks of 16 tokens, removes 64 old ones, and steps.
The limit beside it is the cost of encoding the same hashes and tokens, without bookkeeping.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer

from worker import Reporter

BLOCKS, BLOCK_SIZE = 64, 16
HELD_STEPS = 500  # number of steps whose blocks are held; the oldest are removed


def main(
    steps: Annotated[int, typer.Option(min=100, help="Steps of 64 new blocks that are measured.")] = 3000,
) -> None:
    """Time each call on its caller's thread: medians and the 99th percentile, in microseconds."""
    source = random.Random(0)
    reporter = Reporter.create('{"publisher": "zmq", "endpoint": "tcp://*:0"}')
    encode = msgspec.msgpack.Encoder().encode
    held: deque[list[int]] = deque()
    calls = ("encode", "stored, 64 blocks", "stored, 1 block", "removed, 64 blocks", "step")
    seconds: dict[str, list[float]] = {name: [] for name in calls}

    def timed(name: str, call: Callable[..., object], *arguments: object) -> None:
        begin = time.perf_counter()
        call(*arguments)
        seconds[name].append(time.perf_counter() - begin)

    for _ in range(steps + HELD_STEPS):
        names = [source.getrandbits(63) for _ in range(BLOCKS)]
        tokens = [source.randrange(150_000) for _ in range(BLOCKS * BLOCK_SIZE)]
        timed("encode", encode, [names, tokens])
        timed("stored, 64 blocks", reporter.stored, names, None, tokens, BLOCK_SIZE)
        one = [source.getrandbits(63)]
        timed("stored, 1 block", reporter.stored, one, names[-1], tokens[:BLOCK_SIZE], BLOCK_SIZE)
        held.append(names)
        if len(held) > HELD_STEPS:
            timed("removed, 64 blocks", reporter.removed, held.popleft())
        timed("step", reporter.step)
    reporter.shutdown()
    limit = statistics.median(seconds["encode"])
    typer.echo(f"{'':22} {'median':>9} {'p99':>9} {'x encode':>9}")
    for name, times in seconds.items():
        median, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        typer.echo(f"{name:22} {median * 1e6:7.1f} us {p99 * 1e6:7.1f} us {median / limit:9.1f}")
    typer.echo(f"{reporter.dropped} batches dropped")


typer.run(main)
