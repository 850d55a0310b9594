"""Transfers between processes of one host: the receiver copies from memory that the sender shares.

The source of writes must be allocated by `allocate`. It is a sealed memory file, which a sender passes when it
connects, and which the receiver maps read-only. The receiver copies, not the sender, because a suspended sender could
continue after the pages are reused. The receiver copies inside of the grant, so a revoked grant is quiescent at once.
Later changes in the sender's memory can only reach granted pages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

import numpy as np

from worker.kv_transfer.transfer.channel import Channel, Kind
from worker.kv_transfer.transfer.endpoint import Address, Endpoint
from worker.kv_transfer.transfer.engine import GrantKey, PeerLostError, RefusedError, Region
from worker.kv_transfer.transfer.grants import Grant
from worker.kv_transfer.transfer.memory import Bytes, Memory, copy_runs
from worker.kv_transfer.transfer.runs import Writes, split_writes
from worker.kv_transfer.transfer.sessions import expect
from worker.kv_transfer.transfer.writing import FrameWriter, decode_runs, encode_runs, next_write

_MOST_SHARED = 1 << 14  # arrays of one sender
_STEP_RUNS, _STEP_BYTES = 1024, 1 << 22  # runs and bytes that are copied between two checks of the grant
_MEMORY_SECONDS = 5.0
_REGION = struct.Struct("<QQQ")  # address in the sender, offset in the file, length
_CREDENTIALS = struct.Struct("3i")


class ShmEngine(Endpoint):
    """A TransferEngine over shared memory. Linux only; both processes need one network namespace and one user."""

    name = "shm"

    def __init__(self, secret: bytes | None = None) -> None:
        """Listen on a local socket. Raises ValueError for an empty secret."""
        self._allocated: dict[int, tuple[int, Bytes]] = {}  # by address: the offset in the file, and the bytes
        self._shared: set[int] = set()  # arrays with a registered region
        self._sources = Memory()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._host = f"kvrouter-transfer-{secrets.token_hex(16)}"
        listening.bind("\0" + self._host)  # not in the file system, so that no file remains
        listening.listen(128)
        self._file = os.memfd_create("kvrouter-transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._allocating = threading.Lock()
        super().__init__(listening, secret)

    def allocate(self, length: int) -> Bytes:
        """Allocate as TransferEngine.allocate does. The engine keeps the memory until it is closed."""
        if length <= 0:
            raise ValueError(f"{length} bytes can't be allocated")
        with self._allocating:
            start = -os.fstat(self._file).st_size // mmap.ALLOCATIONGRANULARITY * -mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self._file, start + length)
            array: Bytes = np.frombuffer(mmap.mmap(self._file, length, offset=start), np.uint8)
            self._allocated[array.ctypes.data] = start, array
        return array

    def register(self, regions: Sequence[Region]) -> None:
        """Register as TransferEngine.register does. Regions of other origin can only be destinations."""
        super().register(regions)
        for pointer, length in ((region.pointer, region.length) for region in regions):
            for first, (_, array) in self._allocated.items():
                if first <= pointer and pointer + length <= first + array.size:
                    self._sources.add([(pointer, array[pointer - first : pointer - first + length])])
                    self._shared.add(first)

    def close(self) -> None:
        super().close()
        self._sources = Memory()
        self._allocated.clear()
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _address(self) -> Address:
        return Address(self.name, self._host)

    def _writer(self, channel: Channel, deadline: float) -> FrameWriter:
        shared = [(pointer, *self._allocated[pointer]) for pointer in self._shared]
        regions = [_REGION.pack(pointer, start, array.size) for pointer, start, array in shared]
        if len(regions) > _MOST_SHARED:
            raise ValueError(
                f"{len(regions)} arrays are too many to share; allocate larger ones, at most {_MOST_SHARED}"
            )
        channel.send(Kind.MEMORY, b"".join(regions), deadline)
        socket.send_fds(channel.socket, [b"\0"], [self._file])
        expect(channel, Kind.MEMORY, deadline)  # an empty frame confirms the mapping

        def send(key: GrantKey, frame: Writes, deadline: float) -> None:
            channel.send(Kind.WRITE, encode_runs(key, *frame), deadline)

        return FrameWriter(channel, self._sources, send)

    def _serve(self, channel: Channel) -> None:
        try:
            _check_user(channel)
            peer = _receive_memory(channel)
        except PeerLostError as error:
            channel.send(Kind.REFUSED, str(error).encode())
            raise
        channel.send(Kind.MEMORY)
        while True:
            key, columns = decode_runs(next_write(channel, Kind.WRITE), 3)
            writes = Writes(*columns)
            try:
                grant = self.grants.find(key, writes.destinations, writes.lengths)
                self._copy(grant, peer, writes)
            except RefusedError as error:
                channel.answer(Kind.REFUSED, str(error).encode())
            else:
                channel.answer(Kind.LANDED)

    def _copy(self, grant: Grant, peer: Memory, writes: Writes) -> None:
        for step in split_writes(writes, _STEP_RUNS, _STEP_BYTES):
            with grant:
                try:
                    copy_runs(step, peer, self.memory)
                except ValueError as error:
                    raise RefusedError(f"the sender does not share its source: {error} of its memory") from None


def _check_user(channel: Channel) -> None:
    credentials = channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise PeerLostError(f"the sender runs as user {user}, the receiver as user {os.geteuid()}")


def _receive_memory(channel: Channel) -> Memory:
    """Return the sender's memory, mapped read-only. Raises PeerLostError."""
    deadline = time.monotonic() + _MEMORY_SECONDS
    body = expect(channel, Kind.MEMORY, deadline)
    if len(body) % _REGION.size or len(body) > _MOST_SHARED * _REGION.size:
        raise PeerLostError(f"the sender names its memory in {len(body)} bytes")
    regions = list(_REGION.iter_unpack(body))
    channel.wait_readable(deadline)
    memory, files = Memory(), list[int]()
    try:
        _, files, _, _ = socket.recv_fds(channel.socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if len(files) != 1:
            raise PeerLostError("the sender does not share its memory")
        if regions:
            whole = _map(files[0], max(start + length for _, start, length in regions))
            memory.add((pointer, whole[start : start + length]) for pointer, start, length in regions)
    except (OSError, ValueError) as error:
        raise PeerLostError(f"the sender's memory can't be mapped: {error}") from None
    finally:
        for file in files:
            os.close(file)
    return memory


def _map(file: int, length: int) -> Bytes:
    """Map a file whose size cannot shrink, so that its bytes stay readable. Raises OSError and ValueError."""
    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the file is not sealed against shrinking")
    if not 0 < length <= os.fstat(file).st_size:
        raise ValueError(f"the file has no {length} bytes")
    array: Bytes = np.frombuffer(mmap.mmap(file, length, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    return array
