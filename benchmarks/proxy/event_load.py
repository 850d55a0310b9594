"""Engines at full speed, in their own process: streams that store prompts and remove older ones forever.

    python -m benchmarks.proxy.event_load STREAMS

It prints the streams' endpoints as JSON, and then reads lines with a rate: stored or removed blocks a second of all
streams.
"""

from __future__ import annotations

import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, cycle
from random import Random
from typing import Final

import msgspec
import zmq

from benchmarks.index.workload import BLOCK_SIZE, random_tokens
from benchmarks.machine import LOAD_CORE, pin
from kvevents import BlockRemoved, BlockStored, EngineHash, EventBatch, encode_batch
from kvevents.frames import live_frames

EVENT_BLOCKS: Final = 64
_PROMPT_BLOCKS: Final = 512
# distinct prompts of a stream, and the number that it holds
_PROMPTS, _HELD = 32, 16


class EventLoad:
    """A running publisher process. `endpoints` are those of its streams."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self.endpoints: list[str] = msgspec.json.decode(process.stdout.readline())

    def set_rate(self, rate: float) -> None:
        """Set the rate in blocks a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%f\n" % rate)
        self._process.stdin.flush()


@contextmanager
def event_load(streams: int) -> Iterator[EventLoad]:
    """Run a process, which publishes nothing before it has a rate."""
    command = [sys.executable, "-m", "benchmarks.proxy.event_load", str(streams)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield EventLoad(process)
    finally:
        process.kill()
        process.wait()


def _payloads(stream: int) -> list[bytes]:
    """Return one cycle of a stream."""
    made: list[BlockStored | BlockRemoved] = []
    for number in range(_PROMPTS):
        tokens, hashes = random_tokens(f"{stream} {number}", _PROMPT_BLOCKS * BLOCK_SIZE), _hashes(stream, number)
        for start in range(0, _PROMPT_BLOCKS, EVENT_BLOCKS):
            parent = hashes[start - 1] if start else None
            ids = tokens[start * BLOCK_SIZE : (start + EVENT_BLOCKS) * BLOCK_SIZE]
            made.append(BlockStored(hashes[start : start + EVENT_BLOCKS], parent, ids, BLOCK_SIZE, medium="GPU"))
        old = _hashes(stream, (number - _HELD) % _PROMPTS)
        made += [BlockRemoved(old[end - EVENT_BLOCKS : end], "GPU") for end in range(_PROMPT_BLOCKS, 0, -EVENT_BLOCKS)]
    return [encode_batch(EventBatch(0.0, [event], stream)) for event in made]


def _hashes(stream: int, number: int) -> list[EngineHash]:
    return [*array("Q", Random(f"hashes {stream} {number}").randbytes(8 * _PROMPT_BLOCKS))]


def _publish(streams: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets, endpoints = [], []
    for _ in range(streams):
        socket = context.socket(zmq.PUB)
        socket.set_hwm(0)
        socket.bind("tcp://127.0.0.1:*")
        sockets.append(socket)
        endpoints.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    # The streams take turns evenly, event by event, as ranks are not in step.
    turns = cycle([*chain.from_iterable(map(enumerate, zip(*map(_payloads, range(streams)), strict=True)))])
    seqs = [0] * streams
    print(msgspec.json.encode(endpoints).decode(), flush=True)
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    rate, sent, begun = 0.0, 0, time.monotonic()
    while True:
        ahead = sent * EVENT_BLOCKS / rate - (time.monotonic() - begun) if rate else 1.0
        if poller.poll(int(max(ahead, 0.0) * 1000)):
            line = sys.stdin.readline()
            if not line:
                return
            rate, sent, begun = float(line), 0, time.monotonic()
        elif rate:
            stream, payload = next(turns)
            sockets[stream].send_multipart(live_frames(b"", seqs[stream], payload))
            sent, seqs[stream] = sent + 1, seqs[stream] + 1


if __name__ == "__main__":
    pin(LOAD_CORE)
    _publish(int(sys.argv[1]))
