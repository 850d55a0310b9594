"""Ranks in a process of their own, for tests: arenas whose bytes follow from (prompt, layer, position, head).

The test calls `RankProcess.call("method", ...)`, which runs `Ranks.method` there.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import math
import multiprocessing
import os
import signal
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.kv_transfer import (
    DisaggregationMode,
    DisaggregationSettings,
    KVArgs,
    KVManager,
    KVReceiver,
    KVSender,
    KVTransferError,
    Rank,
    Topology,
)
from worker.kv_transfer.ranks import head_range, page_share
from worker.kv_transfer.transfer import GrantKey, Quiescence, Ranges, TransferEngine, open_engine

SENTINEL = 0xA5
AUX_ITEMS = (64, 16)
CALL_TIMEOUT_S = 90.0
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Model:
    """The configuration that all ranks of both sides share, and the size of each rank's pool."""

    layers: int = 2
    heads: int = 4
    head_bytes: int = 16
    page_size: int = 4
    pages: int = 64
    layout: str = "NHD"
    dtype: str = "float16"

    @property
    def parts(self) -> int:
        return 1 if self.layout == "MLA" else 2

    def content(self, prompt: int, layer: int, part: int, pages: int) -> Bytes:
        """The bytes of a prompt in one buffer of the whole model: [page, token, head, byte]."""
        rng = np.random.default_rng((prompt, layer, part))
        heads = 1 if self.layout == "MLA" else self.heads
        return rng.integers(0, 256, (pages, self.page_size, heads, self.head_bytes), dtype=np.uint8)

    def aux(self, prompt: int, buffer: int) -> Bytes:
        return np.random.default_rng((prompt, 1000 + buffer)).integers(0, 256, AUX_ITEMS[buffer], dtype=np.uint8)


@dataclass
class _Rank:
    manager: KVManager
    engine: Any
    model: Model
    heads: range
    layers: range
    kv: dict[tuple[int, int], Bytes]  # (layer, part) -> [page, byte]
    aux: list[Bytes]
    grants: set[GrantKey]
    rooms: dict[int, KVSender | KVReceiver] = field(default_factory=dict)

    def share(self, pages: int) -> slice:
        """The positions of a prompt that this rank holds: with CP only those that it has to send."""
        share = page_share(pages, self.manager.local.topology.cp, self.manager.local.rank.cp)
        return slice(share.start, share.stop)

    def wanted(self, prompt: int, layer: int, part: int, pages: int) -> Bytes:
        """Return this rank's share of a prompt, with a row for each page."""
        content = self.model.content(prompt, layer, part, pages)[:, :, self.heads.start : self.heads.stop]
        if self.model.layout == "HND":
            content = content.transpose(0, 2, 1, 3)
        return np.ascontiguousarray(content).reshape(pages, math.prod(content.shape[1:]))


class Ranks:
    """The objects of a process. Ranks are identified by the test's numbers."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def open(
        self,
        name: int,
        mode: str,
        engine_name: str,
        model: Model,
        topology: Topology | None = None,
        rank: Rank | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        topology, rank = topology or Topology(), rank or Rank()
        engine = open_engine(engine_name)
        grants = _watch_grants(engine)
        mla = model.layout == "MLA"
        heads = range(1) if mla else head_range(model.heads, topology.tp, rank.tp)
        each = model.layers // topology.pp
        layers = range(rank.pp * each, (rank.pp + 1) * each)
        item = model.page_size * len(heads) * model.head_bytes
        kv = {}
        for part in range(model.parts):
            for layer in layers:
                kv[layer, part] = engine.allocate(model.pages * item).reshape(model.pages, item)
                kv[layer, part][:] = SENTINEL
        aux = [engine.allocate(8 * size).reshape(8, size) for size in AUX_ITEMS]
        for buffer in aux:
            buffer[:] = SENTINEL
        args = KVArgs(
            kv_data_ptrs=[buffer.ctypes.data for buffer in kv.values()],
            kv_data_lens=[buffer.nbytes for buffer in kv.values()],
            kv_item_lens=[item] * len(kv),
            page_size=model.page_size,
            kv_cache_dtype=model.dtype,
            total_kv_head_num=model.heads,
            kv_layout=model.layout,  # type: ignore[arg-type]
            aux_data_ptrs=[buffer.ctypes.data for buffer in aux],
            aux_data_lens=[buffer.nbytes for buffer in aux],
            aux_item_lens=list(AUX_ITEMS),
            prefill_start_layer=layers.start,
        )
        manager = KVManager(
            args, DisaggregationMode(mode), engine, DisaggregationSettings(**settings or {}), topology, rank
        )
        self._ranks[name] = _Rank(manager, engine, model, heads, layers, kv, aux, grants)

    def wait_registered(self, name: int) -> bool:
        return self._ranks[name].manager.wait_registered(10)

    def endpoint(self, name: int) -> str:
        return self._ranks[name].manager.endpoint

    def instance(self, name: int) -> str:
        return self._ranks[name].manager.instance

    def close(self, name: int, missing_ok: bool = False) -> None:
        if missing_ok and name not in self._ranks:
            return
        rank = self._ranks.pop(name)
        rank.manager.close()
        rank.engine.close()

    # Rooms

    def send(
        self,
        name: int,
        bootstrap_addr: str,
        room: int,
        pages: list[int],
        chunks: list[int] | None = None,
        aux: int | None = 0,
        timeout_s: float = 60.0,
        fill: bool = True,
    ) -> None:
        """Write the prompt (its number is the room's) into `pages` and send it in chunks of these lengths."""
        rank = self._ranks[name]
        if fill:
            for (layer, part), buffer in rank.kv.items():
                share = rank.share(len(pages))
                buffer[pages[share]] = rank.wanted(room, layer, part, len(pages))[share]
            if aux is not None:
                self.fill_aux(name, room, aux)
        sender = KVSender(rank.manager, bootstrap_addr, room, timeout_s=timeout_s)
        rank.rooms[room] = sender
        sender.init(len(pages), aux)
        start = 0
        for count in chunks if chunks is not None else [len(pages)]:
            last = start + count == len(pages) and (count == 0 or 0 not in (chunks or []))
            sender.send(np.array(pages[start : start + count], np.int64), slice(start, start + count), last)
            start += count

    def fill_aux(self, name: int, room: int, aux: int) -> None:
        """Set the results of the computed prompt, for example its first token."""
        rank = self._ranks[name]
        for number, buffer in enumerate(rank.aux):
            buffer[aux] = rank.model.aux(room, number)

    def open_sender(self, name: int, bootstrap_addr: str, room: int, timeout_s: float = 60.0) -> None:
        self._ranks[name].rooms[room] = KVSender(self._ranks[name].manager, bootstrap_addr, room, timeout_s=timeout_s)

    def receive(
        self,
        name: int,
        bootstrap_addr: str,
        room: int,
        pages: list[int] | None,
        aux: int | None = 0,
        timeout_s: float = 60.0,
        prefix: int = 0,
        prefill_dp_rank: int | None = None,
    ) -> None:
        """Ask for a prompt; `pages` None opens the room and asks for nothing."""
        manager = self._ranks[name].manager
        receiver = KVReceiver(manager, bootstrap_addr, room, prefill_dp_rank=prefill_dp_rank, timeout_s=timeout_s)
        self._ranks[name].rooms[room] = receiver
        if pages is not None:
            receiver.init(np.array(pages, np.int64), aux, prefix)

    def wait(self, name: int, room: int, timeout: float = 60.0) -> tuple[str, str, bool]:
        """The room's state, why it failed, and whether its pages may be reused."""
        handle = self._ranks[name].rooms[room]
        handle.wait(timeout)
        reusable = handle.wait_reusable(timeout)
        reason = ""
        try:
            handle.failure_exception()
        except KVTransferError as error:
            reason = error.failure_reason
        return handle.poll().name, reason, reusable

    def state(self, name: int, room: int) -> tuple[str, bool]:
        handle = self._ranks[name].rooms[room]
        return handle.poll().name, handle.pages_reusable()

    def wait_state(self, name: int, room: int, state: str, timeout: float = 60.0) -> bool:
        handle = self._ranks[name].rooms[room]
        return _until(lambda: handle.poll().name == state, timeout)

    def abort(self, name: int, room: int) -> None:
        self._ranks[name].rooms[room].abort()

    # Bytes

    def check(self, name: int, room: int, pages: list[int], aux: int | None = 0, skipped: int = 0) -> list[str]:
        """Return the pages that differ from the prompt (from position `skipped` on), or from sentinels elsewhere."""
        rank = self._ranks[name]
        wrong = []
        others = np.setdiff1d(np.arange(rank.model.pages), pages)
        for (layer, part), buffer in rank.kv.items():
            wanted = rank.wanted(room, layer, part, len(pages) + skipped)[skipped:]
            if not np.array_equal(buffer[pages], wanted):
                wrong.append(f"layer {layer} part {part}")
            if not (buffer[others] == SENTINEL).all():
                wrong.append(f"sentinels of layer {layer} part {part}")
        for number, buffer in enumerate(rank.aux):
            if aux is not None and not np.array_equal(buffer[aux], rank.model.aux(room, number)):
                wrong.append(f"aux {number}")
            if not (np.delete(buffer, aux if aux is not None else [], 0) == SENTINEL).all():
                wrong.append(f"sentinels of aux {number}")
        return wrong

    def matches(self, name: int, room: int, pages: list[int]) -> bool:
        """Return whether `pages` hold the prompt, regardless of other pages."""
        rank = self._ranks[name]
        return all(
            np.array_equal(buffer[pages], rank.wanted(room, layer, part, len(pages)))
            for (layer, part), buffer in rank.kv.items()
        )

    def wipe(self, name: int, value: int = SENTINEL, pages: list[int] | None = None) -> None:
        rank = self._ranks[name]
        for buffer in rank.kv.values():
            buffer[pages if pages is not None else slice(None)] = value
        for buffer in rank.aux if pages is None else []:
            buffer[:] = value

    def stale_bytes(self, name: int, value: int, pages: list[int]) -> int:
        """Bytes of these pages that are not `value`."""
        return sum(int((buffer[pages] != value).sum()) for buffer in self._ranks[name].kv.values())

    def landed(self, name: int, page: int) -> bool:
        """Return whether the first bytes of this page's first layer arrived."""
        first = next(iter(self._ranks[name].kv.values()))[page]
        return _until(lambda: bool(first[0] != SENTINEL), 60)

    def wait_unread(self) -> bool:
        """Return whether the sockets of this process are full of bytes that their peers do not read."""

        def full() -> bool:
            held = sum(map(_unread, os.listdir("/proc/self/fd")))
            time.sleep(0.2)
            return 0 < held == sum(map(_unread, os.listdir("/proc/self/fd")))

        return _until(full, 60)

    # What is left

    def left(self, name: int) -> list[str]:
        """Everything that a rank still holds for rooms that ended."""
        rank = self._ranks[name]

        def held() -> list[str]:
            stats = rank.manager.stats()
            counts = {
                "rooms": stats.rooms,
                "waiting requests": stats.waiting_requests,
                "quarantined rooms": stats.quarantined_rooms,
                "quarantined pages": stats.quarantined_pages,
                "errors": stats.errors,
            }
            counts["grants"] = len(rank.grants)
            return [f"{count} {what}" for what, count in counts.items() if count]

        _until(lambda: not held(), 60)
        return held()

    def rejected(self, name: int) -> dict[str, int]:
        return self._ranks[name].manager.stats().rejected_frames

    def wait_requests(self, name: int) -> bool:
        """Return whether a request arrived for a room without a sender."""
        return _until(lambda: self._ranks[name].manager.stats().waiting_requests > 0, 60)

    def wait_peers(self, name: int, count: int) -> bool:
        """Return whether this rank connected to `count` peers in time."""
        return _until(lambda: self._ranks[name].manager.stats().peers == count, 60)

    def threads(self) -> list[str]:
        _until(lambda: threading.active_count() == 1, 60)
        return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def attempt(self, name: int, room: int, call: str, *arguments: Any) -> str:
        """Call a room's sender or receiver; the ValueError, if it is refused."""
        try:
            getattr(self._ranks[name].rooms[room], call)(*arguments)
        except ValueError as error:
            return str(error)
        return ""

    def revoke(self, name: int) -> None:
        """Take away every grant, behind the manager's back."""
        rank = self._ranks[name]
        for key in list(rank.grants):
            rank.engine.revoke(key, time.monotonic() + 60)

    def close_all(self) -> None:
        for name in list(self._ranks):
            self.close(name)


class RankProcess:
    """A process with ranks. `kill`, `stop` and `resume` act at once, whatever it does."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin, also again after `kill`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["worker.kv_transfer"])  # imported once for all
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=[there], daemon=True)
        self._process.start()
        there.close()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self._connection.send((method, arguments, options))
        if not self._connection.poll(CALL_TIMEOUT_S):
            self.kill()
            raise TimeoutError(f"{method} gave no answer")
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def restart_if_stuck(self) -> None:
        """A test that failed may have left it killed or stopped."""
        if not self._process.is_alive() or self._state() == "T":
            self.kill()
            self.start()

    def _state(self) -> str:
        with open(f"/proc/{self._process.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def stop(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGSTOP)
        assert _until(lambda: self._state() == "T", 60)

    def resume(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def close(self) -> None:
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join(60)
            self.kill()


@contextlib.contextmanager
def processes(count: int = 2) -> Iterator[list[RankProcess]]:
    """Start processes in parallel."""
    started = [RankProcess() for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.close()


def _unread(descriptor: str) -> int:
    answer = array.array("i", [0])
    with contextlib.suppress(OSError):  # no socket
        fcntl.ioctl(int(descriptor), termios.TIOCOUTQ, answer)
    return int(answer[0])


def _watch_grants(engine: TransferEngine) -> set[GrantKey]:
    """The keys that are granted, or revoked and not quiescent yet."""
    held: set[GrantKey] = set()
    grant, revoke = engine.grant, engine.revoke

    def watched_grant(key: GrantKey, ranges: Ranges) -> None:
        grant(key, ranges)
        held.add(key)

    def watched_revoke(key: GrantKey, deadline: float) -> Quiescence:
        answer = revoke(key, deadline)
        if answer is Quiescence.QUIESCENT:
            held.discard(key)
        return answer

    engine.grant, engine.revoke = watched_grant, watched_revoke  # type: ignore[method-assign]
    return held


def _serve(connection: Connection) -> None:
    ranks = Ranks()
    while True:
        try:
            request = connection.recv()
        except EOFError:  # the test has ended
            return
        if request is None:
            return
        method, arguments, options = request
        try:
            connection.send(getattr(ranks, method)(*arguments, **options))
        except Exception as error:
            connection.send(RuntimeError(f"{method}: {type(error).__name__}: {error}"))


def _until(condition: Any, timeout: float) -> bool:
    """Return whether a condition became true within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
