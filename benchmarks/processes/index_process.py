"""One index for several processes, queried over a Unix socket: the least possible cost, without HTTP."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread

import msgspec

from benchmarks.index.workload import BLOCK_SIZE, Workload
from indexer import Index, Target, make_index
from indexer.hashing import Namespace, PackedPrompt, pack_tokens
from kvevents import decode_batch

MODEL = "model"
NAMESPACE = Namespace(MODEL, "default", None, None, BLOCK_SIZE)
HELD = Workload(workers=16, prompts=16, prompt_blocks=2048, event_blocks=16)
# stored blocks while prompts are matched
EVENTS_A_SECOND = 500

_spawn = get_context("spawn")


@dataclass(frozen=True, slots=True)
class Asked:
    """The seconds of a match: median and p99, and CPU of this process and of the index's."""

    p50: float
    p99: float
    cpu: float
    cpu_there: float = 0.0


def filled_index() -> Index:
    """Return an index of half a million blocks."""
    index = make_index()
    for worker in HELD.worker_ids:
        target = Target(str(worker), 0, MODEL)
        index.add(target)
        for payload in HELD.batches(worker):
            index.apply(target, decode_batch(payload))
    return index


def keep_storing(index: Index) -> None:
    """Apply events at an even rate, forever."""
    target = Target("busy", 0, MODEL)
    index.add(target)
    while True:
        for payload in Workload(1, 64, 512, 16, first_worker=1000).batches(1000):
            index.apply(target, decode_batch(payload))
            time.sleep(1 / EVENTS_A_SECOND)
        index.clear(target)


def asked_here(index: Index, tokens: int, repeats: int) -> Asked:
    """Match in this process."""
    prompt = HELD.prompt(HELD.first_worker, 0)[:tokens]

    def match() -> None:
        assert index.match(NAMESPACE, PackedPrompt(pack_tokens(prompt)))

    return _measured(match, repeats)


def asked_there(path: Path, tokens: int, repeats: int) -> Asked:
    """Match in the process of the index: packed tokens are sent, and matches are returned."""
    prompt = HELD.prompt(HELD.first_worker, 0)[:tokens]
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))

        def match() -> None:
            packed = pack_tokens(prompt)
            _send(asking, packed)
            assert msgspec.msgpack.decode(_receive(asking) or b"")

        def cpu() -> float:
            _send(asking, b"")
            used: float = msgspec.msgpack.decode(_receive(asking) or b"")
            return used

        before = cpu()
        measured = _measured(match, repeats)
        return Asked(measured.p50, measured.p99, measured.cpu, (cpu() - before) / repeats)


@contextmanager
def index_process(busy: bool) -> Iterator[Path]:
    """Run the process of the index, and yield its socket."""
    with tempfile.TemporaryDirectory() as folder:
        path, ready = Path(folder) / "index", _spawn.Event()
        process = _spawn.Process(target=_serve, args=(path, ready, busy), daemon=True)
        process.start()
        try:
            if not ready.wait(120):
                raise TimeoutError("the process of the index did not start")
            yield path
        finally:
            process.kill()
            process.join()


def _serve(path: Path, ready: Event, busy: bool) -> None:
    index = filled_index()
    if busy:
        Thread(target=keep_storing, args=(index,), daemon=True).start()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        ready.set()
        while True:
            Thread(target=_answer, args=(index, listening.accept()[0]), daemon=True).start()


def _answer(index: Index, asking: socket.socket) -> None:
    with asking:
        while True:
            packed = _receive(asking)
            if packed is None:
                return
            if not packed:
                _send(asking, msgspec.msgpack.encode(time.thread_time()))
                continue
            matches = index.match(NAMESPACE, PackedPrompt(packed))
            found = [(match.target.worker, match.target.dp_rank, match.matched_tokens) for match in matches]
            _send(asking, msgspec.msgpack.encode(found))


def _send(to: socket.socket, data: bytes) -> None:
    to.sendall(array("I", [len(data)]).tobytes() + data)


def _receive(source: socket.socket) -> bytes | None:
    head = source.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    size = array("I", head)[0]
    return source.recv(size, socket.MSG_WAITALL) if size else b""


def _measured(match: object, repeats: int) -> Asked:
    assert callable(match)
    seconds: list[float] = []
    before = time.thread_time()
    for _ in range(repeats):
        began = time.perf_counter()
        match()
        seconds.append(time.perf_counter() - began)
        os.sched_yield()
    cpu = (time.thread_time() - before) / repeats
    seconds.sort()
    return Asked(seconds[repeats // 2], seconds[int(repeats * 0.99)], cpu)
