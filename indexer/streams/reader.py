"""The thread that reads every worker's event stream and applies it to the index.

The thread never waits for one stream. It asks for missing batches, and meanwhile reads the other streams.

One file, because all of it is run by this thread, or sends commands to it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from math import inf
from operator import attrgetter
from threading import Event, Thread
from typing import TypeVar

import zmq
from sortedcontainers import SortedKeyList
from zmq.auth.thread import ThreadAuthenticator

from indexer.inbox import AppliedBatches, Inbox, Received
from indexer.index import Applied, Index
from indexer.native import CORES
from indexer.reference.inbox import PythonInbox
from indexer.sockets import SocketPoller
from indexer.streams.bound import BindSettings, BoundSocket, Publisher, authenticator
from indexer.streams.commands import CommandQueue
from indexer.streams.sequence import SequenceSettings, StreamSequence, StreamState
from indexer.streams.session import StreamSession, StreamStatus, open_sockets
from indexer.targets import Registration, Target, WorkerNames
from kvevents import EventSource
from kvevents.curve import KeyPair, checked_key, temporary_key_pair
from kvevents.frames import StreamFrame

T = TypeVar("T")

_TICK_SECONDS = 0.1  # between checks of the deadlines
# Free memory is returned to the system when this many bytes were received and no message waits.
_RECEIVED_BYTES = 16 << 20


class StreamReader:
    """Reader of all targets' event streams, in a thread of its own. All public methods are for any thread."""

    def __init__(
        self,
        index: Index,
        settings: SequenceSettings | None = None,
        keys: KeyPair | None = None,
        names: WorkerNames | None = None,
        bindings: BindSettings | None = None,
        find: Callable[[Publisher], Registration | str] | None = None,
    ) -> None:
        """Create the reader. `find` returns the registration of a publisher that connects, or why it has none."""
        self._index = index
        self._settings = settings
        self._keys = keys
        self._names = names or WorkerNames()
        self._bindings = bindings or BindSettings()
        self._find = find or (lambda _: "publishers have no targets here")
        self._bound: dict[str, BoundSocket] = {}
        self._authenticator: ThreadAuthenticator | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # The default limit is 1023 sockets; a stream has four.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self.sessions: dict[Target, StreamSession] = {}
        self._followed: dict[Target, StreamSession] = {}  # the sessions that the thread has started to read
        self._by_fd: dict[int, StreamSession] = {}  # by the live socket's file descriptor
        self._poller = SocketPoller()  # of all sockets except live ones
        self._inbox = make_inbox(index, self._poller.fileno())
        self._commands = CommandQueue(self._context)
        self._schedule: SortedKeyList[StreamSession, float] = SortedKeyList(key=attrgetter("check_at"))
        self._received_bytes = 0  # since free memory was last returned to the system
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="kv-event-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and close every socket."""
        self._stopping.set()
        if self._thread.is_alive():
            self._commands.send(lambda: None)
            self._thread.join()
        self._commands.run_all()  # they may have opened sessions, whose sockets have to be closed
        for bound in self._bound.values():
            bound.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        for session in self._followed.values():
            session.close()
        self._poller.close()
        self._commands.close()
        self._context.term()

    def bind(self, endpoint: str) -> None:
        """Bind a socket that publishers connect to, unless it is bound. Raises ValueError, field first."""
        if endpoint in self._bound:
            return
        self._bindings.check(endpoint)
        if self._bindings.keys is not None and self._authenticator is None:
            self._authenticator = authenticator(self._context, self._bindings.publisher_keys)
        bound = self._bound[endpoint] = BoundSocket(self._context, endpoint, self._bindings.keys)
        self._commands.send(lambda: self._poller.add(bound.socket, lambda: self._distribute(bound)))

    def unbind(self, endpoint: str) -> None:
        """Close a bound socket."""
        if (bound := self._bound.pop(endpoint, None)) is None:
            return

        def close() -> None:
            self._poller.remove(bound.socket)
            bound.close()

        self._commands.send(close)

    def binds(self, endpoint: str) -> bool:
        """Return whether publishers connect to a bound socket at this endpoint."""
        return endpoint in self._bound

    def publishers(self) -> list[Publisher]:
        """Return the publishers that connected to bound sockets."""
        return [each for bound in list(self._bound.values()) for each in list(bound.publishers.values())]

    def open(self, target: Target, source: EventSource, fed: bool = False) -> StreamSession:
        """Connect to a target's stream, for `follow`. `fed`: its publisher connects to a bound socket.

        Raises ValueError, which begins with the wrong field, for a bad endpoint or key, or if no more sockets can be
        opened.
        """
        if source.curve_server_key is not None:
            checked_key(source.curve_server_key, "curve_server_key")
            self._keys = self._keys or temporary_key_pair()
        live, monitor, replay, feed = open_sockets(self._context, source, self._keys, fed)
        sequence = StreamSequence(replay is not None, self._settings)
        index, names, recheck = self._index, self._names, self._poller.recheck
        return StreamSession(target, source, sequence, live, monitor, replay, index, names, recheck, feed)

    def follow(self, session: StreamSession) -> None:
        """Read a session that `open` returned, in place of its target's current one."""
        self._remove(session.target)
        self.sessions[session.target] = session
        self._commands.send(lambda: self._follow(session))

    def remove(self, target: Target) -> None:
        """Stop reading a target's stream."""
        session = self._remove(target)

        def leave() -> None:
            if session is not None and self._followed.get(target) is session:
                self._leave(target)

        self._commands.send(leave)

    def suspend(self, targets: Iterable[Target], suspended: bool) -> None:
        """Show the streams of some targets as stale, because their worker does not answer, or stop doing so."""
        affected = list(targets)

        def suspend() -> None:
            for target in affected:
                if (session := self._followed.get(target)) is not None:
                    session.suspend(suspended)

        self._commands.send(suspend)

    def resync(self, target: Target) -> bool:
        """Clear a target, and read its stream again from the start. Returns False if the stream has no replay."""
        known = self.sessions.get(target)
        if known is None or known.replay is None:
            return False

        def resync() -> None:
            session = self._followed.get(target)
            if session is not None:
                session.resync(time.monotonic())
                self._update(session)

        self._commands.send(resync)
        return True

    def agree(self, target: Target) -> None:
        """Record that a target holds what its events say: a missing batch 0 does not exist."""

        def agree() -> None:
            session = self._followed.get(target)
            if session is not None:
                session.sequence.on_agreement()
                self._update(session)

        self._commands.send(agree)

    def status(self, target: Target) -> StreamStatus | None:
        """Return the state of a target's stream; None if it has none."""
        session = self.sessions.get(target)
        return None if session is None else session.status()

    def between_batches(self, ask: Callable[[Target, StreamSequence | None], T], target: Target) -> T:
        """Call `ask` with a target and its sequence between two batches. Raises TimeoutError after 30 seconds."""

        def question() -> T:
            session = self._followed.get(target)
            return ask(target, session.sequence if session and not session.removed else None)

        return self._commands.ask(question)

    def _remove(self, target: Target) -> StreamSession | None:
        session = self.sessions.pop(target, None)
        if session is not None:
            session.removed = True
        return session

    def _distribute(self, bound: BoundSocket) -> bool:
        """Move a message of a bound socket to its publisher's session. Returns False if no message is waiting."""
        received = bound.receive()
        if received is None:
            return False
        publisher, parts = received
        session = None if publisher.target is None else self._followed.get(publisher.target)
        if session is None or session.removed or session.publisher is not publisher:
            session = self._session_of(publisher)
        if session is None:
            bound.keep(publisher, parts)
            return True
        for message in bound.take_kept(publisher) if publisher.kept else ():
            session.offer(message)
        session.offer(parts)
        return True

    def _distribute_kept(self) -> None:
        """Move kept messages whose publisher has a session by now, because the publisher may send no other message."""
        for bound in list(self._bound.values()):
            for publisher in bound.publishers.values():
                if publisher.kept and (session := self._session_of(publisher)) is not None:
                    for message in bound.take_kept(publisher):
                        session.offer(message)

    def _session_of(self, publisher: Publisher) -> StreamSession | None:
        """Return the session of a publisher's target, which from now on reads its messages; None without one."""
        if time.monotonic() < publisher.look_at:
            return None
        found = self._find(publisher)
        if isinstance(found, str):
            publisher.refuse(found)
            return None
        target = found.target
        known, session = self.sessions.get(target), self._followed.get(target)
        if known is not session or (session is not None and session.removed):
            return None  # commands about the target are waiting
        if session is not None and session.feed is None and session.sequence.state is not StreamState.CONNECTING:
            publisher.refuse("its worker has a stream of its own")
            return None
        other = None if session is None else session.publisher
        if other is not None and other is not publisher and not other.silent:
            publisher.refuse(f"the publisher {other.topic!r} at {other.address} sends the stream of its worker")
            return None
        if session is None or session.feed is None or other is not None:
            session = self._open_fed(target, found.source, publisher)
        session.publisher, publisher.target, publisher.problem = publisher, target, None
        session.connected()
        self._update(session)
        return session

    def _open_fed(self, target: Target, registered: EventSource | None, publisher: Publisher) -> StreamSession:
        """Open and follow a session that a publisher's messages are put into."""
        replay = None if registered is None else registered.replay_endpoint
        key = None if registered is None else registered.curve_server_key
        source = EventSource(target.dp_rank, publisher.endpoint, replay, publisher.topic, key)
        session = self.sessions[target] = self.open(target, source, fed=True)
        self._follow(session)
        return session

    def _run(self) -> None:
        self._poller.add(self._commands.socket, self._commands.run_next)
        next_tick = 0.0
        while not self._stopping.is_set():
            reading = self._inbox.read(0 if self._poller.ready else _TICK_SECONDS)
            self._record_applied(reading.batches, reading.results)
            turns = self._turns(reading.received)
            if self._poller.poll():
                self._record_applied(self._inbox.rest())  # so that commands and replays see what the index has
                self._poller.read()
            self._apply_turns(turns)
            idle = not (reading.batches or reading.unreported or turns or self._poller.ready)
            if idle and self._received_bytes > _RECEIVED_BYTES:
                self._received_bytes = 0
                give_back()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                self._tick(now)

    def _tick(self, now: float) -> None:
        """Let the sessions act whose time has come, and let the index free memory."""
        for session in [*self._schedule.irange_key(max_key=now)]:
            self._schedule.discard(session)
            session.check_at = inf
            if session.due <= now:
                self._record_applied(self._inbox.rest())
                if session.reconnect_if_due(now):
                    self._inbox.look_again(session.fd)
                session.tick(now)
                self._update(session)
            self._plan(session)
        self._distribute_kept()
        self._index.sweep()

    def _plan(self, session: StreamSession) -> None:
        """Schedule the next check of a session, if it is due earlier than scheduled."""
        due = session.due
        if due < session.check_at:
            self._schedule.discard(session)
            session.check_at = due
            self._schedule.add(session)

    def _update(self, session: StreamSession) -> None:
        """Publish a session's state, let the inbox expect its next batch, and schedule its next check."""
        if session.removed:
            return
        self._publish(session)
        self._plan(session)

    def _publish(self, session: StreamSession) -> None:
        session.publish()
        self._inbox.expect(session.fd, session.sequence.expected, session.largest_message)

    def _follow(self, session: StreamSession) -> None:
        self._leave(session.target)
        session.publish()  # the sequence may go on from a snapshot
        self._followed[session.target] = session
        session.fd = self._inbox.follow(session.live, session.target)
        self._by_fd[session.fd] = session
        self._poller.add(session.monitor, lambda: self._receive(session, session.receive_connection_event))
        if session.replay is not None:
            self._poller.add(session.replay, lambda: self._receive(session, session.receive_replay))
        self._plan(session)

    def _leave(self, target: Target) -> None:
        session = self._followed.pop(target, None)
        if session is None:
            return
        self._inbox.leave(session.fd)
        self._schedule.discard(session)
        del self._by_fd[session.fd]
        for socket in filter(None, (session.monitor, session.replay)):
            self._poller.remove(socket)
        session.close()
        self._index.clear(target)  # the target may have been added again while this session was still read

    def _receive(self, session: StreamSession, receive: Callable[[], bool]) -> bool:
        """Let a session receive one message of its replay or monitor socket. Returns False if no message is waiting."""
        before = session.replayed_bytes
        received = receive()
        if received:
            self._received_bytes += session.replayed_bytes - before
            self._update(session)
        return received

    def _record_applied(
        self, batches: list[AppliedBatches], results: Iterable[tuple[tuple[int, int], Applied | Exception]] = ()
    ) -> None:
        now = time.monotonic()
        changed: list[StreamSession] = []
        for turn in batches:
            self._received_bytes += turn.size
            session = self._by_fd[turn.socket]
            if session.removed:
                continue
            as_expected = session.sequence.takes(turn.first, StreamFrame(turn.last, turn.payload), now)
            assert as_expected
            session.record_live(turn.payload, turn.received_at)
            changed.append(session)
        for (socket, seq), result in results:
            self._by_fd[socket].record_result(seq, result)
        for session in changed:
            session.publish()

    def _turns(self, received: list[Received]) -> list[tuple[int, StreamSession, Received]]:
        """Return the turns that have messages, each with its place in `received` and its session."""
        turns: list[tuple[int, StreamSession, Received]] = []
        for place, turn in enumerate(received):
            if turn.messages:
                session = self._by_fd[turn.socket]
                self._received_bytes += turn.size
                session.limit_queues(turn.largest)
                turns.append((place, session, turn))
        return turns

    def _apply_turns(self, turns: list[tuple[int, StreamSession, Received]]) -> None:
        """Bring live messages in order, and apply the batches that are next: all runs of expected ones together."""
        now = time.monotonic()
        runs: dict[int, StreamSession] = {}
        lasts: list[tuple[StreamSession, StreamFrame]] = []
        for place, session, turn in turns:
            if session.removed:
                continue
            last = None if turn.first is None else StreamFrame(turn.first + turn.messages - 1, turn.payload)
            if turn.first is not None and last is not None and session.sequence.takes(turn.first, last, now):
                runs[place] = session
            else:
                last = session.receive_live(self._inbox.messages(place), now)
                self._update(session)
            if last is not None:
                lasts.append((session, last))
        for (place, seq), result in self._inbox.apply([*runs]):
            runs[place].record_result(seq, result)
        received_at = time.time()
        for session, last in lasts:
            session.record_live(last.payload, received_at)
            self._publish(session)


def make_inbox(index: Index, others: int) -> Inbox:
    """Return the inbox for an index. `others` is a file descriptor of the other events that end its wait."""
    if "native" in CORES:
        from indexer.native.inbox import NativeInbox, zmq_functions
        from indexer.native.index import NativeIndex

        if isinstance(index, NativeIndex) and (functions := zmq_functions()) is not None:
            return NativeInbox(index, functions, others)
    return PythonInbox(index, others)


def _malloc_trim() -> Callable[[int], object] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # in glibc; ctypes calls it without Python's lock
    except (AttributeError, OSError, TypeError):
        return None


_trim = _malloc_trim()


def give_back() -> None:
    """Return free memory to the system, if the C library can. Otherwise it stays with the process."""
    if _trim is not None:
        _trim(0)
