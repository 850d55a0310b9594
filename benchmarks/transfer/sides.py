"""The transfer engines that are compared, and the pages that they move."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker.kv_transfer.transfer import GrantKey, Ranges, Region, Writes, open_engine

ARENA = 1 << 28  # bytes on each side, more than a processor's cache
SIZES = {"4 KiB": 1 << 12, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
_BATCH = 1 << 27  # bytes of a batch, up to _BLOCKS blocks
_BLOCKS = 8192


class Blocks(NamedTuple):
    """Blocks of `size` bytes each, from and to these offsets in the arenas."""

    size: int
    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]

    @property
    def total(self) -> int:
        """The total number of bytes."""
        return self.size * len(self.sources)


@cache
def batch(size: int, blocks: int | None = None) -> Blocks:
    """Return the batch of a block size, or its first `blocks` blocks."""
    if blocks is not None:
        whole = batch(size)
        return Blocks(size, whole.sources[:blocks], whole.destinations[:blocks])
    count = min(_BATCH // size, _BLOCKS)
    random = np.random.default_rng(size)
    places = [(random.permutation(ARENA // size)[:count] * size).astype(np.uint64) for _ in range(2)]
    return Blocks(size, *places)


MEMCPY, RAW_SOCKET = "memcpy", "raw socket"
_KEY = GrantKey(1, 1)
_SECONDS = 60.0
_REQUEST = struct.Struct("<QQ")  # size and number of blocks

Arena = NDArray[np.uint8]


class Receiver(Protocol):
    """An owner of the arena that receives blocks."""

    arena: Arena

    def where(self) -> dict[str, Any]:
        """Return the address for the sender, as JSON."""
        ...


class Sender(Protocol):
    """A sender from an arena of random bytes."""

    arena: Arena

    def send(self, blocks: Blocks) -> None:
        """Send blocks, and return when all have landed."""
        ...


class Memcpy:
    """Both sides in one process: a copy of each block, which is the limit."""

    def __init__(self) -> None:
        self.arena = _random_bytes(np.empty(ARENA, np.uint8))
        self.destination = np.zeros(ARENA, np.uint8)

    def send(self, blocks: Blocks) -> None:
        size, sources, destinations = blocks.size, self.arena, self.destination
        for source, destination in zip(blocks.sources.tolist(), blocks.destinations.tolist(), strict=True):
            destinations[destination : destination + size] = sources[source : source + size]


class RawReceiver:
    """A blocking socket on loopback, read block by block, with a byte as acknowledgement of each batch."""

    def __init__(self) -> None:
        self.arena: Arena = np.zeros(ARENA, np.uint8)
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def where(self) -> dict[str, Any]:
        return {"port": self._listening.getsockname()[1]}

    def _serve(self) -> None:
        connection, _ = self._listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        view = self.arena.data
        while len(request := connection.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
            blocks = batch(*_REQUEST.unpack(request))
            size = blocks.size
            for start in blocks.destinations.tolist():
                block = view[start : start + size]
                while block:
                    block = block[connection.recv_into(block) :]
            connection.sendall(b"\1")


class RawSender:
    """A blocking socket on loopback, written block by block."""

    def __init__(self, where: dict[str, Any]) -> None:
        self.arena = _random_bytes(np.empty(ARENA, np.uint8))
        self._socket = socket.create_connection(("127.0.0.1", where["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, blocks: Blocks) -> None:
        view, size = self.arena.data, blocks.size
        self._socket.sendall(_REQUEST.pack(size, len(blocks.sources)))
        for start in blocks.sources.tolist():
            self._socket.sendall(view[start : start + size])
        assert self._socket.recv(1)


class EngineReceiver:
    """An engine that grants its whole arena."""

    def __init__(self, name: str) -> None:
        self._engine = open_engine(name)
        self.arena = self._engine.allocate(ARENA)
        self.arena[:] = 0
        self._engine.register([Region.of(self.arena)])
        self._engine.grant(_KEY, Ranges(_one(self.arena.ctypes.data), _one(ARENA)))

    def where(self) -> dict[str, Any]:
        return {"address": self._engine.address().decode(), "pointer": self.arena.ctypes.data}


class EngineSender:
    """A session of an engine; each batch is one write."""

    def __init__(self, name: str, where: dict[str, Any]) -> None:
        self._engine = open_engine(name)
        self.arena = _random_bytes(self._engine.allocate(ARENA))
        self._engine.register([Region.of(self.arena)])
        self._pointer = where["pointer"]
        self._session = self._engine.connect(where["address"].encode(), time.monotonic() + _SECONDS)

    def send(self, blocks: Blocks) -> None:
        lengths = np.full(len(blocks.sources), blocks.size, np.uint64)
        sources = blocks.sources + np.uint64(self.arena.ctypes.data)
        writes = Writes(sources, blocks.destinations + np.uint64(self._pointer), lengths)
        self._session.write(_KEY, writes, time.monotonic() + _SECONDS)


def checksum(arena: Arena, offsets: NDArray[np.uint64], size: int) -> str:
    """Return the checksum of the blocks at these offsets, in this order."""
    digest = hashlib.blake2b()
    for start in offsets.tolist():
        digest.update(arena.data[start : start + size])
    return digest.hexdigest()


def _one(number: int) -> NDArray[np.uint64]:
    return np.array([number], np.uint64)


def _random_bytes(arena: Arena) -> Arena:
    arena[:] = np.frombuffer(np.random.default_rng(1).bytes(arena.size), np.uint8)
    return arena
