"""Every engine between two processes: what lands, what is refused, and what the death or sleep of a side does.

The arena of this process is filled with one byte. After each test all of it that was not granted is still that byte.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from transfer_peer import PeerProcess, wait_until

from worker.kv_transfer.transfer import (
    DeadlineError,
    GrantKey,
    PeerLostError,
    Quiescence,
    Ranges,
    RefusedError,
    Region,
    TransferEngine,
    TransferError,
    Writes,
    group_runs,
    join_ranges,
    open_engine,
    page_ranges,
    page_writes,
)

SIZE = 1 << 24
PAGE = 1 << 14
PAGES = SIZE // PAGE
SENTINEL, REUSED = 0xEE, 0x77
ONE_SIDED = {"mooncake": "mooncake.engine", "nixl": "nixl"}
_rooms = count(1)


class Receiver:
    """A process of the test: its engine, its arena, and its granted ranges."""

    def __init__(self, name: str) -> None:
        self.engine: TransferEngine = open_engine(name)
        self.arena = self.engine.allocate(SIZE)
        self.pointer = self.arena.ctypes.data
        self.engine.register([Region.of(self.arena)])
        self.granted = np.zeros(PAGES, bool)
        self.reset()

    def reset(self) -> None:
        self.arena[:] = SENTINEL
        self.granted[:] = False

    def grant(self, pages: Any) -> GrantKey:
        key = GrantKey(next(_rooms), 3)
        self.engine.grant(key, page_ranges(pages, [self.pointer], [PAGE]))
        self.granted[pages] = True
        return key

    def revoke(self, key: GrantKey, seconds: float = 5.0) -> Quiescence:
        return self.engine.revoke(key, time.monotonic() + seconds)

    def page(self, page: int) -> Any:
        return self.arena[page * PAGE : (page + 1) * PAGE]

    def untouched(self) -> bool:
        """Return whether only granted pages changed."""
        return bool((self.arena.reshape(PAGES, PAGE)[~self.granted] == SENTINEL).all())


def _available(name: str) -> None:
    if name in ONE_SIDED:
        try:
            importlib.import_module(ONE_SIDED[name])
        except ImportError as error:
            pytest.skip(f"{name} can't be imported: {error}")


@pytest.fixture(
    scope="module",
    params=["tcp", "shm", *(pytest.param(name, marks=pytest.mark.transfer) for name in ONE_SIDED)],
)
def engine(request: pytest.FixtureRequest) -> str:
    _available(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def shared_receiver(engine: str) -> Iterator[Receiver]:
    receiver = Receiver(engine)
    yield receiver
    receiver.engine.close()


@pytest.fixture
def receiver(shared_receiver: Receiver) -> Iterator[Receiver]:
    shared_receiver.reset()
    yield shared_receiver
    assert shared_receiver.untouched()


@pytest.fixture(scope="module")
def shared_sender(engine: str, shared_receiver: Receiver) -> Iterator[tuple[PeerProcess, int]]:
    """A process that all tests but the cruel ones use, and its session to us."""
    peer = PeerProcess(engine, SIZE, seed=5)
    yield peer, peer("connect", shared_receiver.engine.address().decode())
    peer.end()


@pytest.fixture(scope="module")
def target(engine: str) -> Iterator[PeerProcess]:
    """A process that receives, for all tests that let it live."""
    peer = PeerProcess(engine, SIZE)
    yield peer
    peer.end()


def _rows(receiver: Receiver, sources: Any, destinations: Any) -> list[list[int]]:
    """Pages as what the peer's `write` takes."""
    writes = page_writes(group_runs(sources, destinations), [0], [receiver.pointer], [PAGE])
    return [column.tolist() for column in writes]


def _everything(receiver: Receiver, peer: PeerProcess) -> Writes:
    """All of our arena into all of the peer's."""
    runs = group_runs(np.arange(PAGES), np.arange(PAGES))
    return page_writes(runs, [receiver.pointer], [peer.where["pointer"]], [PAGE])


def _sent(page: int) -> bytes:
    return _source()[page * PAGE : (page + 1) * PAGE].tobytes()


def _source(cache: list[Any] = []) -> Any:  # noqa: B006  (made once)
    if not cache:
        cache.append(np.random.default_rng(5).integers(0, 256, SIZE, np.uint8))
    return cache[0]


_random = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        pytest.param(np.arange(100, 400), np.arange(600, 900), id="one run"),
        pytest.param(_random.permutation(PAGES)[:700], _random.permutation(PAGES)[:700], id="random pages"),
        pytest.param([PAGES - 1], [0], id="one page"),
        pytest.param([3, 4, 5, 9, 8], [7, 8, 9, 10, 11], id="some runs"),
    ],
)
def test_pages_land_at_their_destinations(
    receiver: Receiver, shared_sender: tuple[PeerProcess, int], sources: Any, destinations: Any
) -> None:
    peer, session = shared_sender
    key = receiver.grant(destinations)
    assert peer("write", session, key, _rows(receiver, sources, destinations)) == ""
    for source, destination in zip(sources, destinations, strict=True):
        assert receiver.page(destination).tobytes() == _sent(source)
    assert receiver.revoke(key) is Quiescence.QUIESCENT


def test_layers_and_chunks_of_odd_sizes_have_equal_checksums(
    receiver: Receiver, shared_sender: tuple[PeerProcess, int]
) -> None:
    """3 layers of different page sizes, in 4 chunks, one of them empty, and an auxiliary buffer of 37 bytes."""
    peer, session = shared_sender
    layers, items = [0, 1 << 21, (1 << 21) + (1 << 20)], [4096, 2048, 1000]
    pages = np.random.default_rng(2).permutation(300)
    source_pages = np.random.default_rng(3).permutation(300)
    pointers = [receiver.pointer + layer for layer in layers]
    ranges = page_ranges(pages, pointers, items)
    key = GrantKey(next(_rooms), 0)
    aux = SIZE - 37
    auxiliary = Ranges(np.array([receiver.pointer + aux], "u8"), np.array([37], "u8"))
    receiver.engine.grant(key, join_ranges(ranges, auxiliary))
    receiver.granted[:] = True  # more than that: the sentinels are checked below
    for chunk in (slice(0, 120), slice(120, 121), slice(121, 300)):
        writes = page_writes(group_runs(source_pages[chunk], pages[chunk]), layers, pointers, items)
        assert peer("write", session, key, [column.tolist() for column in writes]) == ""
    assert peer("write", session, key, [[], [], []]) == ""
    assert peer("write", session, key, [[aux], [receiver.pointer + aux], [37]]) == ""
    expected = np.full(SIZE, SENTINEL, np.uint8)
    for layer, item in zip(layers, items, strict=True):
        source = _source()[layer : layer + 300 * item].reshape(300, item)
        expected[layer : layer + 300 * item].reshape(300, item)[pages] = source[source_pages]
    expected[aux:] = _source()[aux:]
    assert hashlib.blake2b(receiver.arena).digest() == hashlib.blake2b(expected).digest()
    assert receiver.revoke(key) is Quiescence.QUIESCENT


def test_ungranted_write_is_refused_and_session_continues(
    receiver: Receiver, shared_sender: tuple[PeerProcess, int]
) -> None:
    peer, session = shared_sender
    pages = [10, 11, 12, 20]
    key = receiver.grant(pages)
    start, end = receiver.pointer + 10 * PAGE, receiver.pointer + 13 * PAGE

    def write(key: GrantKey, destination: int, length: int) -> str:
        # Behind a run that is allowed, which must not land either.
        return str(peer("write", session, key, [[0, 0], [start, destination], [16, length]]))

    outside = [
        (start - 1, 2), (end - 1, 2), (end, 1), (start, 4 * PAGE), (0, 1), (8, 64), ((1 << 64) - 1, 1),
        (start - SIZE, SIZE), (receiver.pointer + SIZE, 1),
    ]  # fmt: skip
    for destination, length in outside:
        assert write(key, destination, length).startswith("RefusedError: room"), (destination, length)
    for other in (GrantKey(key.room, 2), GrantKey(key.room + 1000, 3)):
        assert "has no grant" in write(other, start, 16)
    assert (receiver.arena == SENTINEL).all()
    assert write(key, start + 16, 3 * PAGE - 16) == ""
    assert (receiver.page(20) == SENTINEL).all()
    assert receiver.revoke(key) is Quiescence.QUIESCENT


def test_write_after_revocation_is_refused(receiver: Receiver, shared_sender: tuple[PeerProcess, int]) -> None:
    peer, session = shared_sender
    key = receiver.grant([1, 2])
    rows = _rows(receiver, [5, 6], [1, 2])
    assert peer("write", session, key, rows) == ""
    assert receiver.revoke(key) is Quiescence.QUIESCENT
    receiver.arena[:] = SENTINEL
    assert peer("write", session, key, rows).startswith("RefusedError")
    assert (receiver.arena == SENTINEL).all()


def test_concurrent_rooms_are_transferred(receiver: Receiver, shared_sender: tuple[PeerProcess, int]) -> None:
    """Two sessions of one process, and a room of our own to it."""
    peer, session = shared_sender
    second = peer("connect", receiver.engine.address().decode())
    ours, theirs = receiver.grant(np.arange(0, 100)), receiver.grant(np.arange(200, 300))
    peer("start_stream", second, ours, _rows(receiver, np.arange(500, 600), np.arange(0, 100)))
    for _ in range(20):
        rows = _rows(receiver, np.arange(700, 800), np.arange(200, 300))
        assert peer("write", session, theirs, rows) == ""
    wait_until(lambda: receiver.page(99).tobytes() == _sent(599))
    assert receiver.revoke(ours) is Quiescence.QUIESCENT
    assert peer("end_of_stream").startswith("RefusedError")
    assert peer("write", session, theirs, rows) == ""
    assert receiver.page(299).tobytes() == _sent(799)
    assert receiver.revoke(theirs) is Quiescence.QUIESCENT


def _streaming(receiver: Receiver, start_peer: Callable[..., PeerProcess], name: str) -> tuple[PeerProcess, GrantKey]:
    """A new process in the middle of writing pages 100 to 899 again and again."""
    peer = start_peer(name, SIZE, seed=5)
    session = peer("connect", receiver.engine.address().decode())
    key = receiver.grant(np.arange(100, 900))
    peer("start_stream", session, key, _rows(receiver, np.arange(0, 800), np.arange(100, 900)))
    wait_until(lambda: receiver.page(100)[0] != SENTINEL or receiver.page(899)[-1] != SENTINEL)
    return peer, key


def test_suspended_sender_cannot_write_reused_pages(
    engine: str, receiver: Receiver, start_peer: Callable[..., PeerProcess]
) -> None:
    peer, key = _streaming(receiver, start_peer, engine)
    peer.stop()
    quiescence = receiver.revoke(key, 1.0)
    if engine in ONE_SIDED:  # its write may land after it continues, and it alone can report that
        peer.resume()
        wait_until(lambda: receiver.revoke(key, 0.05) is Quiescence.QUIESCENT)
    else:
        assert quiescence is Quiescence.QUIESCENT
    receiver.arena[100 * PAGE : 900 * PAGE] = REUSED
    peer.resume()
    assert peer("end_of_stream").startswith("RefusedError")
    assert (receiver.arena[100 * PAGE : 900 * PAGE] == REUSED).all()


def test_sender_killed_during_write_leaves_grant_consistent(
    engine: str, receiver: Receiver, start_peer: Callable[..., PeerProcess]
) -> None:
    peer, key = _streaming(receiver, start_peer, engine)
    peer.kill()
    quiescence = receiver.revoke(key, 1.0)
    if engine not in ONE_SIDED:
        assert quiescence is Quiescence.QUIESCENT
        receiver.arena[100 * PAGE : 900 * PAGE] = REUSED
        other = start_peer(engine, SIZE, seed=5)
        session = other("connect", receiver.engine.address().decode())
        again = receiver.grant([5])
        assert other("write", session, again, _rows(receiver, [6], [5])) == ""
        assert (receiver.arena[100 * PAGE : 900 * PAGE] == REUSED).all()
        assert receiver.revoke(again) is Quiescence.QUIESCENT


def _grant_all(peer: PeerProcess) -> GrantKey:
    """All of the peer's arena."""
    key = GrantKey(next(_rooms), 1)
    peer("grant", *key, [peer.where["pointer"]], [SIZE])
    return key


def _writing(
    receiver: Receiver, peer: PeerProcess, key: GrantKey, failures: list[TransferError], seconds: float
) -> threading.Thread:
    """A thread of ours that writes to the peer again and again, until that fails."""
    session = receiver.engine.connect(peer.where["address"].encode(), time.monotonic() + 60)
    writes = _everything(receiver, peer)
    session.write(key, writes, time.monotonic() + 60)

    def write() -> None:
        try:
            while True:
                session.write(key, writes, time.monotonic() + seconds)
        except TransferError as error:
            failures.append(error)
        finally:
            session.close()

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_receiver_killed_during_write_fails_session(
    engine: str, receiver: Receiver, start_peer: Callable[..., PeerProcess]
) -> None:
    peer = start_peer(engine, SIZE)
    failures: list[TransferError] = []
    thread = _writing(receiver, peer, _grant_all(peer), failures, 5.0)
    peer.kill()
    thread.join(60)
    assert not thread.is_alive()
    (failure,) = failures
    assert isinstance(failure, PeerLostError if engine not in ONE_SIDED else TransferError)


def test_suspended_receiver_costs_at_most_deadline(engine: str, receiver: Receiver, target: PeerProcess) -> None:
    key = _grant_all(target)
    failures: list[TransferError] = []
    thread = _writing(receiver, target, key, failures, 0.3)
    target.stop()
    thread.join(60)
    target.resume()
    assert not thread.is_alive()
    assert isinstance(failures[0], DeadlineError)
    if engine in ONE_SIDED:  # an abandoned write finishes and is reported
        wait_until(lambda: target("revoke", *key) == "quiescent")
    else:
        assert target("revoke", *key) == "quiescent"


def test_closed_sessions_leave_nothing(engine: str, target: PeerProcess) -> None:
    key = _grant_all(target)
    peers_threads = target("threads")

    def cycle() -> None:
        ours = open_engine(engine)
        arena = ours.allocate(PAGE)
        ours.register([Region.of(arena)])
        session = ours.connect(target.where["address"].encode(), time.monotonic() + 60)
        pointers = np.array([arena.ctypes.data], np.uint64), np.array([target.where["pointer"]], np.uint64)
        session.write(key, Writes(*pointers, np.array([PAGE], np.uint64)), time.monotonic() + 60)
        session.close()
        session.close()
        with pytest.raises(PeerLostError):
            session.write(key, Writes(*pointers, np.array([PAGE], np.uint64)), time.monotonic() + 60)
        ours.close()
        ours.close()

    cycle()  # what libraries open once
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        cycle()
    wait_until(lambda: threading.active_count() <= threads)
    wait_until(lambda: target("threads") <= peers_threads)
    if engine not in ONE_SIDED:  # what their libraries keep open is theirs
        assert len(os.listdir("/proc/self/fd")) <= files


def test_session_can_be_closed_during_write(receiver: Receiver, target: PeerProcess) -> None:
    key = _grant_all(target)
    session = receiver.engine.connect(target.where["address"].encode(), time.monotonic() + 60)
    writes = _everything(receiver, target)
    failures: list[TransferError] = []

    def write() -> None:
        try:
            while True:
                session.write(key, writes, time.monotonic() + 60)
        except TransferError as error:
            failures.append(error)

    target.stop()
    thread = threading.Thread(target=write)
    thread.start()
    session.close()
    thread.join(60)
    target.resume()
    assert isinstance(failures[0], PeerLostError)


def test_source_must_be_registered(receiver: Receiver, target: PeerProcess) -> None:
    key = _grant_all(target)
    session = receiver.engine.connect(target.where["address"].encode(), time.monotonic() + 60)

    def write(source: int) -> None:
        columns = ([receiver.pointer, source], [target.where["pointer"], target.where["pointer"]], [PAGE, PAGE])
        session.write(key, Writes(*(np.array(column, "u8") for column in columns)), time.monotonic() + 60)

    elsewhere = np.zeros(PAGE, np.uint8)
    with pytest.raises(ValueError, match="are outside"):
        write(elsewhere.ctypes.data)
    write(receiver.pointer + PAGE)
    session.close()


def test_invalid_addresses_are_rejected(engine: str, receiver: Receiver) -> None:
    with pytest.raises(PeerLostError, match="invalid address of a transfer engine"):
        receiver.engine.connect(b"127.0.0.1:80", time.monotonic() + 60)
    with pytest.raises(RefusedError, match="the peer uses carrier pigeon"):
        receiver.engine.connect(b'{"engine": "carrier pigeon", "host": "roof"}', time.monotonic() + 60)
    gone = open_engine(engine)
    address = gone.address()
    gone.close()
    with pytest.raises(PeerLostError, match="can't connect"):
        receiver.engine.connect(address, time.monotonic() + 60)
    with pytest.raises(DeadlineError):
        receiver.engine.connect(address, time.monotonic())


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), ("a", None), (None, "b")])
def test_session_needs_equal_secrets(engine: str, ours: str | None, theirs: str | None) -> None:
    receiver = open_engine(engine, secret=ours.encode() if ours else None)
    sender = open_engine(engine, secret=theirs.encode() if theirs else None)
    try:
        with pytest.raises(RefusedError, match="secret"):
            sender.connect(receiver.address(), time.monotonic() + 60)
    finally:
        sender.close()
        receiver.close()


def test_signed_session_writes(engine: str, start_peer: Callable[..., PeerProcess]) -> None:
    sender = start_peer(engine, SIZE, seed=5, secret="shared")
    receiver = open_engine(engine, secret=b"shared")
    arena = receiver.allocate(PAGE)
    receiver.register([Region.of(arena)])
    receiver.grant(GrantKey(1, 1), Ranges(np.array([arena.ctypes.data], "u8"), np.array([PAGE], "u8")))
    session = sender("connect", receiver.address().decode())
    for page in range(3):
        assert sender("write", session, [1, 1], [[page * PAGE], [arena.ctypes.data], [PAGE]]) == ""
        assert arena.tobytes() == _sent(page)
    assert "has no grant" in sender("write", session, [2, 1], [[0], [arena.ctypes.data], [PAGE]])
    receiver.close()


def test_engines_are_opened_by_name() -> None:
    with pytest.raises(ValueError, match="'smoke' is unknown; known: tcp, shm, mooncake, nixl"):
        open_engine("smoke")
    with pytest.raises(ValueError, match="the secret is empty"):
        open_engine("tcp", secret=b"")
    with pytest.raises(ValueError, match="not an address that peers can connect to"):
        open_engine("tcp", "0.0.0.0")
