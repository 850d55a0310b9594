"""The follower of a pool's master, in front of a scripted master that behaves, or does not."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread

import msgspec
import pytest
import zmq
from waiting import eventually

from indexer.pools.mooncake import MooncakeMaster
from indexer.pools.pool import PoolConfig, SharedPool
from router.app.pool_follower import MooncakeFollower

_INTERVAL = 0.05
_DEADLINE = 60.0


def key(name: int) -> str:
    return f"tiny@tp_rank:0@group:0@{'ab' * 24}{name:016x}"


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)


class Master:
    """A master whose answers are bytes. `answer` makes them; a list is sent one byte at a time."""

    def __init__(self) -> None:
        self.keys = [key(1)]
        self.answer: Callable[[str], bytes | list[int]] = self.behaves
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.asked = self.polls = 0
        self.listed_at = 0  # the polls before the first sound listing since this was set to 0
        Thread(target=self._serve, daemon=True).start()

    def behaves(self, path: str) -> bytes:
        if path == "/metrics":
            return _answer(b"master_key_count %d\nmaster_evicted_key_count 0\n" % len(self.keys))
        self.listed_at = self.listed_at or self.polls
        return _answer("\n".join(self.keys).encode())

    def close(self) -> None:
        self._listening.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            path = connection.recv(65_536).split(b" ")[1].decode()
            self.asked += 1
            self.polls += path == "/metrics"
            answer = self.answer(path)
            if isinstance(answer, bytes):
                connection.sendall(answer)
                return
            for byte in answer:
                connection.sendall(bytes((byte,)))
                time.sleep(0.2)


@pytest.fixture
def master() -> Iterator[Master]:
    found = Master()
    yield found
    found.close()


@pytest.fixture
def pool(master: Master) -> Iterator[SharedPool]:
    """A pool that is followed."""
    found = SharedPool(PoolConfig("pool"))
    at = MooncakeMaster(master.url, "tcp://127.0.0.1:9", most_keys=100, interval=_INTERVAL, timeout=0.5)
    follower = MooncakeFollower(found, at)
    follower.start()
    yield found
    began = time.monotonic()
    follower.stop()
    assert time.monotonic() - began < 10  # "a byte at a time" takes longer


def blocks(pool: SharedPool) -> int:
    return pool.blocks.sizes().blocks if pool.known else -1


_ODD: dict[str, Callable[[str], bytes | list[int]]] = {
    "no HTTP": lambda _: b"\x00\xff nonsense\r\n\r\n",
    "nothing": lambda _: b"",
    "a broken chunk": lambda _: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nx",
    "a number beyond a double": lambda _: _answer(b"master_key_count 1e999\n"),
    "no number": lambda _: _answer(b"master_key_count 1.2.3\n"),
    "a redirect": lambda _: b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n",
    "an error": lambda _: b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n",
    "invalid UTF-8": lambda path: _answer(b"master_key_count 1\n" if path == "/metrics" else b"\xff\xfe\n"),
    "too many keys": lambda path: _answer(b"master_key_count 1\n" if path == "/metrics" else b"a\n" * 200),
    "too long a listing": lambda path: _answer(b"master_key_count 1\n" if path == "/metrics" else b"a" * 100_000),
    "a byte at a time": lambda _: list(_answer(b"master_key_count 1\n")),
}


@pytest.mark.parametrize("odd", _ODD)
def test_content_is_right_again_after_a_master_misbehaves(master: Master, pool: SharedPool, odd: str) -> None:
    eventually(lambda: blocks(pool) == 1)
    master.keys = [key(2), key(3), key(4)]
    pool.lose("a test")
    asked, master.answer = master.asked, _ODD[odd]
    eventually(lambda: master.asked > asked + 2)
    assert not pool.known
    assert pool.unknown_because
    polls, master.listed_at = master.polls, 0
    master.answer = master.behaves
    eventually(lambda: blocks(pool) == 3)
    assert pool.answers
    assert master.listed_at - polls <= 8  # six intervals, one that had begun, and one that began before it was seen


def test_redirect_is_not_followed(master: Master, pool: SharedPool) -> None:
    paths: list[str] = []

    def answer(path: str) -> bytes:
        paths.append(path)
        return b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"

    master.answer = answer
    eventually(lambda: len(paths) > 3)
    assert not pool.known
    assert "/elsewhere" not in paths


def test_dripping_master_does_not_delay_the_end(master: Master, pool: SharedPool) -> None:
    """The fixture measures the end."""
    master.answer = _ODD["a byte at a time"]
    asked = master.asked
    eventually(lambda: master.asked > asked)
    assert pool.unknown_because


def test_follower_reads_a_masters_stream_and_its_http_api(master: Master) -> None:
    events = [{"event_type": "stored", "object_key": key(2), "medium": "cpu"}]
    pool = SharedPool(PoolConfig("pool"))
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        at = MooncakeMaster(master.url, f"tcp://127.0.0.1:{port}", interval=_INTERVAL)
        follower = MooncakeFollower(pool, at)
        follower.start()
        assert publisher.poll(5000), "the follower subscribes"
        eventually(lambda: blocks(pool) == 1)
        master.keys.append(key(2))
        publisher.send_multipart([b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1000, events, 0])])
        eventually(lambda: blocks(pool) == 2)
        follower.stop()


def test_key_that_is_too_long_is_not_recorded(pool: SharedPool) -> None:
    pool.store([("x" * 600 + key(7), False, True)])
    assert pool.keys.forms == [] or all(len(form.before) < 512 for form in pool.keys.forms)
