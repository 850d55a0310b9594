"""Transfer between processes of one host: the receiver copies, out of memory the sender shares with it.

What is written from must come from `allocate`: sealed memory files, which a sender hands over as it connects and the
receiver maps to read only. A sender that wrote into the receiver's pages itself could be stopped in the middle and go
on when they are reused; so it asks, and the receiver copies, inside of the grant: a revoked grant is quiescent at once,
whatever the sender does. What a sender puts into its memory meanwhile reaches granted pages at most.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import numpy as np

from worker.disaggregation.transfer.channel import Channel, Kind
from worker.disaggregation.transfer.copying import copy_runs
from worker.disaggregation.transfer.endpoint import Address, Endpoint
from worker.disaggregation.transfer.engine import GrantKey, PeerLostError, RefusedError, Region
from worker.disaggregation.transfer.grants import Grant
from worker.disaggregation.transfer.handshake import expect
from worker.disaggregation.transfer.memory import Bytes, Memory
from worker.disaggregation.transfer.runs import Writes, split_writes
from worker.disaggregation.transfer.writing import FrameWriter, decode_runs, encode_runs

_MOST_SHARED = 128  # arrays of a sender; they go in one message, which Linux lets hold 253 files
_STEP_RUNS, _STEP_BYTES = 1024, 1 << 22  # copied between two looks at the grant
_MEMORY_SECONDS = 5.0
_REGION = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("3i")


class ShmEngine(Endpoint):
    """See TransferEngine. Linux only; both processes in one network namespace, of one user."""

    name = "shm"

    def __init__(self, secret: bytes | None = None) -> None:
        """Raises ValueError for an empty secret."""
        self._files: dict[int, tuple[int, Bytes]] = {}  # what was allocated, by address: file descriptor, bytes
        self._shared: set[int] = set()  # those with something registered
        self._sources = Memory()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._host = f"kvrouter-transfer-{secrets.token_hex(16)}"
        listening.bind("\0" + self._host)  # not in the file system: nothing is left behind
        listening.listen(128)
        super().__init__(listening, secret)

    def allocate(self, length: int) -> Bytes:
        """See TransferEngine. The engine keeps the memory too, until it is closed."""
        file = os.memfd_create("kvrouter-transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, length)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            array: Bytes = np.frombuffer(mmap.mmap(file, length), np.uint8)
        except BaseException:
            os.close(file)
            raise
        self._files[array.ctypes.data] = file, array
        return array

    def register(self, regions: Sequence[Region]) -> None:
        """See TransferEngine. Regions that were not allocated here can be destinations only."""
        super().register(regions)
        for pointer, length in ((region.pointer, region.length) for region in regions):
            for start, (_, array) in self._files.items():
                if start <= pointer and pointer + length <= start + array.size:
                    self._sources.add([(pointer, array[pointer - start : pointer - start + length])])
                    self._shared.add(start)

    def close(self) -> None:
        """See TransferEngine."""
        super().close()
        self._sources = Memory()
        while self._files:
            os.close(self._files.popitem()[1][0])

    def _address(self) -> Address:
        return Address(self.name, self._host)

    def _writer(self, channel: Channel, deadline: float) -> FrameWriter:
        shared = [(start, *self._files[start]) for start in self._shared]
        if len(shared) > _MOST_SHARED:
            raise ValueError(
                f"{len(shared)} arrays are to be shared, at most {_MOST_SHARED} can be: allocate larger ones"
            )
        channel.send(Kind.MEMORY, b"".join(_REGION.pack(start, array.size) for start, _, array in shared), deadline)
        if shared:
            socket.send_fds(channel.socket, [b"\0"], [file for _, file, _ in shared])
        expect(channel, Kind.MEMORY, deadline)  # empty: it is mapped

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
            key, columns = decode_runs(expect(channel, Kind.WRITE), 3)
            writes = Writes(*columns)
            try:
                grant = self.grants.find(key, writes.destinations, writes.lengths)
                self._copy(grant, peer, writes)
            except RefusedError as error:
                channel.send(Kind.REFUSED, str(error).encode())
            else:
                channel.send(Kind.LANDED)

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
        raise PeerLostError(f"the sender runs as user {user}, we as user {os.geteuid()}")


def _receive_memory(channel: Channel) -> Memory:
    """The sender's memory, mapped to read only. Raises PeerLostError."""
    deadline = time.monotonic() + _MEMORY_SECONDS
    body = expect(channel, Kind.MEMORY, deadline)
    if len(body) % _REGION.size or len(body) > _MOST_SHARED * _REGION.size:
        raise PeerLostError(f"the sender names its memory in {len(body)} bytes")
    regions = list(_REGION.iter_unpack(body))
    memory = Memory()
    if not regions:
        return memory
    channel.wait_readable(deadline)
    files: list[int] = []
    try:
        _, files, _, _ = socket.recv_fds(channel.socket, 1, _MOST_SHARED, socket.MSG_CMSG_CLOEXEC)
        if len(files) != len(regions):
            raise PeerLostError(f"the sender shares {len(files)} files for {len(regions)} arrays")
        memory.add((start, _map(file, length)) for file, (start, length) in zip(files, regions, strict=True))
    except (OSError, ValueError) as error:
        raise PeerLostError(f"the sender's memory can't be mapped: {error}") from None
    finally:
        for file in files:
            os.close(file)
    return memory


def _map(file: int, length: int) -> Bytes:
    """Bytes that stay readable, whatever the sender does: its file can't shrink. Raises OSError, ValueError."""
    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the file is not sealed against shrinking")
    if not 0 < length <= os.fstat(file).st_size:
        raise ValueError(f"the file has no {length} bytes")
    array: Bytes = np.frombuffer(mmap.mmap(file, length, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    return array
