"""The memory that a sender can share."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kv_transfer.transfer import GrantKey, PeerLostError, Ranges, RefusedError, Region, Writes, open_engine
from worker.kv_transfer.transfer.channel import Channel, Kind
from worker.kv_transfer.transfer.endpoint import Address, dial
from worker.kv_transfer.transfer.memory import Bytes, Memory, copy_runs, new_array
from worker.kv_transfer.transfer.sessions import expect, greet
from worker.kv_transfer.transfer.shm import ShmEngine
from worker.kv_transfer.transfer.writing import encode_runs

KEY = GrantKey(1, 1)
SIZE = 8192


@pytest.fixture(scope="module")
def arena() -> Bytes:
    return new_array(SIZE)


@pytest.fixture(scope="module")
def receiver(arena: Bytes) -> Iterator[ShmEngine]:
    engine = ShmEngine()
    engine.register([Region.of(arena)])
    engine.grant(KEY, Ranges(_u8(arena.ctypes.data), _u8(SIZE)))
    yield engine
    assert not arena.any()
    engine.close()


def _u8(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(numbers, np.uint64)


def _session(receiver: ShmEngine) -> Channel:
    address = msgspec.json.decode(receiver.address(), type=Address)
    channel = Channel(dial(address, time.monotonic() + 60))
    greet(channel, "shm", None, time.monotonic() + 60)
    return channel


def _reason(channel: Channel) -> str:
    """Return why the receiver ends the session."""
    with pytest.raises(RefusedError) as caught:
        expect(channel, Kind.MEMORY, time.monotonic() + 60)
    with pytest.raises(PeerLostError):
        channel.receive(time.monotonic() + 60)
    return str(caught.value)


def test_shrinkable_memory_is_not_mapped(receiver: ShmEngine) -> None:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, SIZE)
    with closing(_session(receiver)) as channel:
        channel.send(Kind.MEMORY, struct.pack("<QQQ", 4096, 0, SIZE))
        socket.send_fds(channel.socket, [b"\0"], [file])
        os.close(file)
        assert "not sealed against shrinking" in _reason(channel)


def test_missing_memory_file_ends_session(receiver: ShmEngine) -> None:
    for files, reason in (([0], "can't be mapped"), ([], "does not share its memory")):
        with closing(_session(receiver)) as channel:
            channel.send(Kind.MEMORY, struct.pack("<QQQ", 4096, 0, SIZE))
            socket.send_fds(channel.socket, [b"\0"], files)
            assert reason in _reason(channel)


def _sealed(length: int) -> int:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, length)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


def test_length_beyond_file_ends_session(receiver: ShmEngine) -> None:
    with closing(_session(receiver)) as channel:
        channel.send(Kind.MEMORY, struct.pack("<QQQ", 4096, 0, SIZE + 1))
        file = _sealed(SIZE)
        socket.send_fds(channel.socket, [b"\0"], [file])
        os.close(file)
        assert f"has no {SIZE + 1} bytes" in _reason(channel)


def test_source_outside_shared_memory_is_refused(receiver: ShmEngine, arena: Bytes) -> None:
    destination = _u8(arena.ctypes.data)
    with closing(_session(receiver)) as channel:
        channel.send(Kind.MEMORY, struct.pack("<QQQ", 4096, 0, SIZE))
        file = _sealed(SIZE)
        socket.send_fds(channel.socket, [b"\0"], [file])
        os.close(file)
        expect(channel, Kind.MEMORY, time.monotonic() + 60)
        for source in (4095, 4096 + SIZE, 0, (1 << 64) - 1):
            channel.send(Kind.WRITE, encode_runs(KEY, _u8(source), destination, _u8(1)))
            with pytest.raises(RefusedError, match="does not share its source"):
                expect(channel, Kind.LANDED, time.monotonic() + 60)
        channel.send(Kind.WRITE, encode_runs(KEY, _u8(4096 + SIZE - 1), destination, _u8(1)))
        expect(channel, Kind.LANDED, time.monotonic() + 60)


def test_one_array_for_each_layer_is_shared(receiver: ShmEngine, arena: Bytes) -> None:
    sender = ShmEngine()
    layers = [sender.allocate(100 + layer) for layer in range(300)]
    for layer, array in enumerate(layers):
        array[:] = layer % 251
    sender.register([Region.of(array) for array in layers])
    session = sender.connect(receiver.address(), time.monotonic() + 60)
    sources = _u8(*(array.ctypes.data for array in layers))
    destinations = _u8(*(arena.ctypes.data + 8 * layer for layer in range(300)))
    session.write(KEY, Writes(sources, destinations, np.full(300, 8, np.uint64)), time.monotonic() + 60)
    assert arena[: 8 * 300 : 8].tolist() == [layer % 251 for layer in range(300)]
    sender.close()
    arena[:] = 0


def test_source_must_be_allocated(receiver: ShmEngine) -> None:
    sender = open_engine("shm")
    ordinary = np.ones(SIZE, np.uint8)
    sender.register([Region.of(ordinary)])
    session = sender.connect(receiver.address(), time.monotonic() + 60)
    with pytest.raises(ValueError, match="no range is registered"):
        session.write(KEY, Writes(_u8(ordinary.ctypes.data), _u8(0), _u8(1)), time.monotonic() + 60)
    sender.close()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 19), st.integers(0, 19), st.sampled_from([1, 37, 4096, 1 << 14, 20_000, 1 << 17])),
        min_size=1,
        max_size=20,
        unique_by=lambda copy: copy[1],
    )
)
def test_runs_of_all_lengths_are_copied(copies: list[tuple[int, int, int]]) -> None:
    """From memory that its owner knows by other addresses, in two regions, into two of ours."""
    place, half = 1 << 17, 10 << 17
    source = np.frombuffer(np.random.default_rng(1).bytes(2 * half), np.uint8)
    destination, expected = new_array(2 * half), np.zeros(2 * half, np.uint8)
    sources, destinations = Memory(), Memory()
    sources.add([(1000, source[:half]), (1000 + half, source[half:])])
    here = destination.ctypes.data
    destinations.add([(here, destination[:half]), (here + half, destination[half:])])
    for start, end, length in copies:
        expected[end * place : end * place + length] = source[start * place : start * place + length]
    columns = np.array(copies, np.uint64).T
    starts, ends = columns[0] * np.uint64(place), columns[1] * np.uint64(place)
    copy_runs(Writes(starts + np.uint64(1000), ends + np.uint64(here), columns[2]), sources, destinations)
    assert (destination == expected).all()
