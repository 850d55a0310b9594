"""Event streams as of engines: one PUB socket for each worker, with all payloads encoded before the first is sent.

The sockets are XPUB, which report subscribers, without a high-water mark, so that nothing is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import zmq

from benchmarks.index.workload import Workload
from benchmarks.machine import LOAD_CORE, pin
from kvevents.frames import live_frames

_JOIN_TIMEOUT_MS = 20_000

_Batch: TypeAlias = tuple[int, int, bytes]  # worker, sequence number, payload


class Streams:
    """The streams of a workload's workers, for one subscriber each. `endpoints` are by worker."""

    def __init__(self, workload: Workload, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.endpoints: dict[int, str] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        for worker in workload.worker_ids:
            socket = context.socket(zmq.XPUB)
            socket.set_hwm(0)
            socket.bind("tcp://127.0.0.1:*")
            self._sockets[worker] = socket
            self.endpoints[worker] = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def await_subscribers(self) -> None:
        """Wait until every stream has a subscriber. Raises TimeoutError."""
        for worker, socket in self._sockets.items():
            if not socket.poll(_JOIN_TIMEOUT_MS):
                raise TimeoutError(f"no subscriber on the stream of worker {worker}")
            socket.recv()

    def send(self, worker: int, seq: int, payload: bytes) -> None:
        self._sockets[worker].send_multipart(live_frames(b"", seq, payload))

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(0)


class Publisher:
    """A process that publishes a workload repeatedly, to one indexer at a time.

    Each `open` closes the previous streams.
    """

    def __init__(self, workload: Workload, pipe: Connection[Any, Any], pid: int) -> None:
        self.workload = workload
        self.pid = pid
        self._pipe = pipe

    def open(self) -> dict[int, str]:
        """Bind a stream for every worker, from sequence number 0 on. Return their endpoints by worker."""
        endpoints: dict[int, str] = self._ask("open")
        return endpoints

    def start(self, rate: float = inf) -> float:
        """Send everything once all streams have a subscriber, at most `rate` blocks a second.

        Return the `time.monotonic()` of the first batch, which is the same clock in all processes.
        """
        started: float = self._ask(("send", rate))
        return started

    def _ask(self, command: Any) -> Any:
        self._pipe.send(command)
        return self._answer()

    def _answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def publisher_of(workload: Workload) -> Iterator[Publisher]:
    """Run a publisher, and yield it when everything is encoded."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_publish, args=(workload, theirs), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        ours.recv()
        yield Publisher(workload, ours, process.pid)
    finally:
        ours.close()
        process.join(5)
        process.kill()


def _publish(workload: Workload, pipe: Connection[Any, Any]) -> None:
    pin(LOAD_CORE)
    batches = _encoded(workload)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    streams = Streams(workload, context)
    pipe.send("encoded")
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            streams.close()
            context.term()
            return
        try:
            match command:
                case "open":
                    streams.close()
                    streams = Streams(workload, context)
                    pipe.send(streams.endpoints)
                case "send", rate:
                    streams.await_subscribers()
                    pipe.send(time.monotonic())
                    _send(streams, batches, rate * len(batches) / workload.blocks)
        except (TimeoutError, zmq.ZMQError) as error:
            pipe.send(error)


def _send(streams: Streams, batches: list[_Batch], rate: float) -> None:
    """Send batches in order, at most `rate` a second."""
    started = time.monotonic()
    for count, batch in enumerate(batches):
        ahead = count / rate - (time.monotonic() - started)
        if ahead > 0.001:
            time.sleep(ahead)
        streams.send(*batch)


def _encoded(workload: Workload) -> list[_Batch]:
    """Return every batch; the workers take turns."""
    streams = [
        [(worker, seq, payload) for seq, payload in enumerate(workload.batches(worker))]
        for worker in workload.worker_ids
    ]
    return [batch for turn in zip_longest(*streams) for batch in turn if batch is not None]
