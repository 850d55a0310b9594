"""A room of a prefill rank's sender: its chunks, and the decode ranks that receive them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from worker.disaggregation.channel import Timer
from worker.disaggregation.frames import RoomRequest
from worker.disaggregation.layout import Pages
from worker.disaggregation.peer_writer import PeerWriter
from worker.disaggregation.rooms import Room


@dataclass(frozen=True, slots=True)
class Chunk:
    """Source pages for the prompt's pages from position `start` on."""

    pages: Pages
    start: int
    is_last: bool


class Destination:
    """The part of a room that one decode rank receives."""

    def __init__(self, room: Room, request: RoomRequest, writer: PeerWriter) -> None:
        self.request = request
        self.writer = writer
        self.pages = request.page_array()
        self.queued = 0
        self.has_last = False
        self.done = False
        self._room = room
        self._writing = False
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Return whether a write may begin. After the room failed and `writing` was read, none may."""
        with self._lock:
            self._writing = not self._room.terminal
            return self._writing

    def end(self) -> None:
        with self._lock:
            self._writing = False

    @property
    def writing(self) -> bool:
        with self._lock:
            return self._writing


@dataclass(slots=True)
class SendingRoom:
    """A room of this rank's sender. `KVSender.init` sets `pages` and `aux_index`."""

    room: Room
    pages: int | None = None
    aux_index: int | None = None
    required: int | None = None
    destinations: dict[str, Destination] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)  # wait until all destinations are known
    timer: Timer | None = None
    settled: bool = False

    @property
    def complete(self) -> bool:
        return self.required is not None and len(self.destinations) == self.required
