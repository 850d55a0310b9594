"""The sending side of rooms: their chunks, the decode ranks that receive them, and the writes to each rank.

Writes to a decode rank have their own queue and thread, so that a slow rank delays no other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.kv_transfer.channel import Timer
from worker.kv_transfer.frames import RoomRequest
from worker.kv_transfer.layout import Layout, Pages
from worker.kv_transfer.rooms import Room
from worker.kv_transfer.transfer import (
    IDLE_SECONDS,
    GrantKey,
    RefusedError,
    Session,
    TransferEngine,
    TransferError,
    Writes,
)

logger = logging.getLogger(__name__)

MAX_QUEUED = 16384
CONNECT_TIMEOUT_S = 5.0
REUSE_SECONDS = IDLE_SECONDS / 2  # the peer closes a session that is idle for longer


@dataclass(frozen=True, slots=True)
class WriteTask:
    """One write. `begin` returns whether to write at all. `finished` always receives the reason of a failure, or ""."""

    key: GrantKey
    deadline: float
    begin: Callable[[], bool]
    plan: Callable[[], Writes]
    finished: Callable[[str], None]


class PeerWriter:
    """A queue of writes to the peer with the transfer engine at `address`, to which the first one connects."""

    def __init__(self, engine: TransferEngine, endpoint: str, layout: Layout, address: bytes) -> None:
        self.endpoint = endpoint
        self.layout = layout
        self._engine = engine
        self._address = address
        self._session: Session | None = None
        self._used_at = 0.0
        self._tasks: deque[WriteTask] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kv-writer {endpoint}", daemon=True)

    def submit(self, task: WriteTask) -> bool:
        """Queue a write. Return False if MAX_QUEUED writes wait."""
        with self._changed:
            if len(self._tasks) >= MAX_QUEUED:
                return False
            if not self._tasks and self._thread.ident is None:
                self._thread.start()
            self._tasks.append(task)
            self._changed.notify()
            return True

    def stop(self) -> None:
        """Interrupt the current write and fail the queued ones, without waiting for their end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            session = self._session
        if session is not None:
            session.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    break
                task = self._tasks.popleft()
            task.finished(self._write(task))
        self._drop_session()

    def _write(self, task: WriteTask) -> str:
        if not task.begin():
            return "the room had failed before"
        try:
            writes = task.plan()
            self._connected(task.deadline).write(task.key, writes, task.deadline)
        except RefusedError as error:
            return f"the transfer was refused: {error}"
        except TransferError as error:
            self._drop_session()
            return f"the transfer failed: {error}"
        except Exception as error:
            logger.exception("a transfer to %s failed", self.endpoint)
            self._drop_session()
            return f"the transfer failed: {type(error).__name__}: {error}"
        return ""

    def _connected(self, deadline: float) -> Session:
        if time.monotonic() - self._used_at > REUSE_SECONDS:
            self._drop_session()
        self._used_at = time.monotonic()
        if self._session is None:
            session = self._engine.connect(self._address, min(deadline, time.monotonic() + CONNECT_TIMEOUT_S))
            with self._changed:
                self._session = session
        with self._changed:
            if self._closing:
                raise TransferError("this rank dropped the peer")
            return self._session

    def _drop_session(self) -> None:
        with self._changed:
            session, self._session = self._session, None
        if session is not None:
            session.close()


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
