"""The state of a rank that both sides of a transfer share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from worker.kv_transfer.channel import Channel
from worker.kv_transfer.layout import Layout
from worker.kv_transfer.ranks import Rank, Topology
from worker.kv_transfer.rooms import Room
from worker.kv_transfer.transfer import TransferEngine

MAX_ROOMS = 65536


@dataclass(slots=True)
class LocalRank:
    """A rank and its resources. `instance` is a random name for each start."""

    instance: str
    topology: Topology
    rank: Rank
    layout: Layout
    engine: TransferEngine
    channel: Channel
    room_timeout_s: float
    rooms: LiveRooms


@dataclass(slots=True)
class LiveRooms:
    """The room numbers in use on a rank, each by one room only. All methods may be called from any thread."""

    _rooms: dict[int, Room] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def add(self, room: Room) -> None:
        """Add a room. Raises ValueError if its number is in use, and RuntimeError above MAX_ROOMS and after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the manager was closed and accepts no more rooms")
            other = self._rooms.get(room.number)
            if other is not None and not other.terminal:
                raise ValueError(f"bootstrap_room {room.number} is in use on this rank: use a new room for a retry")
            if len(self._rooms) >= MAX_ROOMS:
                raise RuntimeError(f"{MAX_ROOMS} rooms are in use on this rank: finish or abort some first")
            self._rooms[room.number] = room

    def remove(self, room: Room) -> None:
        with self._lock:
            if self._rooms.get(room.number) is room:
                del self._rooms[room.number]

    def close(self) -> None:
        """Reject further rooms."""
        with self._lock:
            self._closed = True

    def __len__(self) -> int:
        return len(self._rooms)
