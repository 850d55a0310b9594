"""The session of one event stream: its sockets, the order of its batches, and the state of its connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf

import structlog
import zmq

from indexer.index import Applied, Index
from indexer.sockets import (
    USUAL_MESSAGE,
    Connected,
    Disconnected,
    HandshakeFailed,
    Reached,
    connect,
    discard_messages,
    has_message,
    keep_alive,
    limit_queue,
    monitor_of,
    read_monitor,
    receive,
    reconnect,
)
from indexer.streams.bound import Publisher
from indexer.streams.sequence import Action, Apply, AskReplay, Clear, SequenceCounters, StreamSequence, StreamState
from indexer.targets import Target, WorkerNames
from kvevents import EventSource, MalformedBatchError
from kvevents.batches import batch_time
from kvevents.curve import KeyPair, be_client
from kvevents.frames import (
    MalformedFrameError,
    StreamFrame,
    is_snapshot,
    parse_live,
    parse_replay,
    parse_snapshot,
    replay_request,
)

log = structlog.get_logger()

_feeds = count()
_RECONNECT_SECONDS = 1.0
# A publisher that closes this many connections in a row, each soon after it accepted it, has other keys or none.
# A publisher that stops closes one; a publisher that hangs closes none.
_FAILED_HANDSHAKES = 3
_SOON_SECONDS = 5.0


@dataclass(slots=True)
class StreamCounters:
    """Numbers of messages and events on a stream that could not be read."""

    bad_frames: int = 0
    bad_events: int = 0


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """State of one stream, for reports.

    - `lag`: seconds from the engine's time of that batch until the index applied it.
    - `confirmed`: seconds since the index was last known to have every batch; None if it never was.
    - `first_missing`: batch 0 is missing and no other, so that the publisher may number its batches from 1.
    - `began_at`: time at which the session began or its target was last cleared, in monotonic seconds.
    """

    state: StreamState
    last_seq: int | None
    received_at: float | None
    lag: float | None
    confirmed: float | None
    first_missing: bool
    began_at: float
    pending: int
    sequence: SequenceCounters
    unreadable: StreamCounters


@dataclass(eq=False, slots=True)
class StreamSession:
    """The subscription to one target's event stream.

    If its publisher connects to the index, `publisher` is what it is known by, and its messages are put into `feed`.

    A session has a SUB socket for live batches, a DEALER for replays if the publisher has any, and a monitor socket for
    connection events. Other threads may call `status`, and read what `publish` sets: `state`, `last_seq`,
    `first_missing` and `confirmed_at`, which describe what the index shows. `recheck` makes the reader read
    a socket again.
    """

    target: Target
    source: EventSource
    sequence: StreamSequence
    live: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    index: Index
    names: WorkerNames
    recheck: Callable[[zmq.Socket[bytes]], None]
    feed: zmq.Socket[bytes] | None = None
    publisher: Publisher | None = None
    state: StreamState = StreamState.CONNECTING
    last_seq: int | None = None
    first_missing: bool = False
    confirmed_at: float | None = None
    counters: StreamCounters = field(default_factory=StreamCounters)
    received_at: float | None = None
    lag: float | None = None
    began_at: float = field(default_factory=time.monotonic)
    fd: int = -1  # file descriptor of `live`, once the reader follows the session
    check_at: float = inf  # monotonic time at which the reader checks `due`
    largest_message: int = USUAL_MESSAGE
    replayed_bytes: int = 0
    removed: bool = False  # another thread removed the session; messages and actions no longer change anything
    suspended: bool = False  # the worker does not answer
    disconnected: bool = False  # the publisher was connected, and is not now
    breaks: int = 0
    reached_at: float = 0.0  # monotonic time of the last TCP connection
    failed_handshakes: int = 0  # consecutive ones that failed soon after the connection
    handshake_failed: bool = False  # since the last successful handshake
    failure_logged: bool = False
    unreadable_logged: bool = False
    reconnect_at: float | None = None  # monotonic time of the next attempt, after ZeroMQ stopped trying

    @property
    def due(self) -> float:
        """Monotonic time at which the session has something to do even if no message arrives."""
        reconnect_at = inf if self.reconnect_at is None else self.reconnect_at
        # A disconnected publisher cannot be asked for a replay.
        return reconnect_at if self.disconnected else min(reconnect_at, self.sequence.due)

    def status(self) -> StreamStatus:
        """Return the state of the stream. For any thread."""
        return StreamStatus(
            self.state,
            self.last_seq,
            self.received_at,
            self.lag,
            None if self.confirmed_at is None else time.monotonic() - self.confirmed_at,
            self.first_missing,
            self.began_at,
            self.sequence.pending,
            self.sequence.counters,
            self.counters,
        )

    def publish(self) -> None:
        """Show other threads the state of the sequence. Call this when the index shows the same batches."""
        self.state = StreamState.STALE if self.disconnected or self.suspended else self.sequence.state
        self.last_seq = self.sequence.last_seq
        self.first_missing = self.sequence.first_missing
        self.confirmed_at = self.sequence.confirmed_at

    def record_live(self, payload: bytes, received_at: float) -> None:
        """Record the arrival of an applied live batch, at a time in unix seconds."""
        made_at = batch_time(payload)
        self.received_at, self.lag = received_at, None if made_at is None else received_at - made_at

    def record_result(self, seq: int, result: Applied | Exception) -> None:
        """Record that a batch cleared the cache, had rejected events, or could not be applied."""
        if isinstance(result, Exception):
            if not isinstance(result, MalformedBatchError):
                log.error("a batch could not be applied", exc_info=result)
            self._skip_message(str(result))
            return
        if result.cleared:
            self.sequence.on_cleared(seq)
        if result.rejected:
            self.counters.bad_events += len(result.rejected)
            self._warn_once("event skipped", result.rejected[0].reason)

    def receive_live(self, messages: list[list[bytes]], now: float) -> StreamFrame | None:
        """Bring live messages in order, and apply the batches that are next. Returns the last readable batch."""
        frame = None
        for parts in messages:
            try:
                frame = parse_live(parts)
            except MalformedFrameError as error:
                self._skip_message(str(error))
                continue
            try:
                self._perform(self.sequence.on_live(frame, now))
            except Exception:  # the other messages are still read
                log.exception("a message could not be handled")
        return frame

    def receive_replay(self) -> bool:
        """Receive one message of a replay or a snapshot. Returns False if no message is waiting."""
        assert self.replay is not None
        parts = receive(self.replay)
        if parts is None:
            return False
        size = sum(map(len, parts))
        self.replayed_bytes += size
        self.limit_queues(size)
        now = time.monotonic()
        try:
            if is_snapshot(parts):
                actions = self.sequence.on_snapshot(*parse_snapshot(parts), now)
            else:
                actions = self.sequence.on_replay(parse_replay(parts), now)
        except MalformedFrameError as error:
            self._skip_message(str(error))
            return True
        self._perform(actions)
        return True

    def receive_connection_event(self) -> bool:
        """Receive one connection event of the live socket. Returns False if no event is waiting."""
        if not has_message(self.monitor):
            return False
        match read_monitor(self.monitor):
            case Connected():
                self.connected()
            case Reached():
                self.reached_at = time.monotonic()
            case Disconnected():
                self.breaks += 1
                self.disconnected = self.sequence.state is not StreamState.CONNECTING
            case HandshakeFailed(reason, final):
                self._handshake_failed(reason, final)
        return True

    def tick(self, now: float) -> None:
        """Let the sequence act on deadlines that have passed."""
        if not self.disconnected:
            self._perform(self.sequence.on_tick(now))

    def reconnect_if_due(self, now: float) -> bool:
        """Connect the live socket again if its time has come. Returns whether it did."""
        if self.reconnect_at is None or now < self.reconnect_at:
            return False
        self.reconnect_at = None
        reconnect(self.live, self.source.endpoint)
        return True

    def resync(self, now: float) -> None:
        """Clear the target, and read its stream again from the start."""
        self.began_at = now
        self._perform(self.sequence.on_resync(now))

    def offer(self, parts: list[bytes]) -> None:
        """Put a message of the publisher into the session's queue. A full queue leaves a gap."""
        assert self.feed is not None
        with suppress(zmq.Again):
            self.feed.send_multipart(parts, zmq.NOBLOCK)

    def suspend(self, suspended: bool) -> None:
        """Show the stream as stale while its worker does not answer."""
        self.suspended = suspended
        self.publish()

    def limit_queues(self, largest: int) -> None:
        """Lower the queue limits, which count messages, after a larger message of `largest` bytes."""
        if largest > self.largest_message:
            self.largest_message = largest
            for socket in filter(None, (self.live, self.replay)):
                limit_queue(socket, largest)

    def close(self) -> None:
        """Close all sockets."""
        self.live.disable_monitor()
        for socket in filter(None, (self.live, self.monitor, self.replay, self.feed)):
            socket.close(0)

    def connected(self) -> None:
        """Handle a connection of the publisher."""
        if self.handshake_failed and self.replay is not None and self.source.replay_endpoint is not None:
            # The publisher may have rejected this socket with a reason, after which ZeroMQ does not try again.
            reconnect(self.replay, self.source.replay_endpoint)
            self.recheck(self.replay)
        self.handshake_failed = self.failure_logged = self.disconnected = False
        self.failed_handshakes, self.reconnect_at = 0, None
        discard_messages(self.replay)  # the replay of an earlier connection; the sequence asks again
        self._perform(self.sequence.on_connected(time.monotonic()))

    def _handshake_failed(self, reason: str, final: bool) -> None:
        now = time.monotonic()
        self.handshake_failed = True
        soon = now - self.reached_at < _SOON_SECONDS
        self.failed_handshakes = self.failed_handshakes + 1 if soon and not self.suspended else 0
        if final:
            self.reconnect_at = now + _RECONNECT_SECONDS
        if final or self.failed_handshakes >= _FAILED_HANDSHAKES:
            if not self.failure_logged:  # attempts go on without end
                log.warning("handshake with the publisher failed", reason=reason, **self.names.about(self.target))
            self.failure_logged = True

    def _perform(self, actions: list[Action]) -> None:
        if self.removed:  # the target may belong to another session by now
            return
        for action in actions:
            match action:
                case Apply(frame):
                    self._apply(frame)
                case Clear():
                    log.info("event stream read again from the start", **self.names.about(self.target))
                    self.began_at = time.monotonic()
                    self.index.clear(self.target)
                    discard_messages(self.replay)
                case AskReplay(start):
                    self._request_replay(start)

    def _apply(self, frame: StreamFrame) -> None:
        try:
            applied = self.index.apply_payload(self.target, frame.payload)
        except Exception as error:
            self.record_result(frame.seq, error)
        else:
            self.record_result(frame.seq, applied)

    def _request_replay(self, start: int) -> None:
        assert self.replay is not None
        self.recheck(self.replay)
        try:
            self.replay.send_multipart(replay_request(start), zmq.NOBLOCK)
        except zmq.Again:  # the deadline of the replay still runs
            log.debug("replay endpoint not reached", **self.names.about(self.target))

    def _skip_message(self, reason: str) -> None:
        self.counters.bad_frames += 1
        self._warn_once("stream message skipped", reason)

    def _warn_once(self, event: str, reason: str) -> None:
        """Log the first unreadable message or event of the session; the counters have the number of all."""
        if not self.unreadable_logged:
            self.unreadable_logged = True
            log.warning(event, reason=reason, **self.names.about(self.target))


def open_sockets(
    context: zmq.Context[zmq.Socket[bytes]], source: EventSource, keys: KeyPair | None, fed: bool
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes], zmq.Socket[bytes] | None, zmq.Socket[bytes] | None]:
    """Open and connect the live, monitor, replay and feed sockets of a stream. `fed`: its publisher connects.

    Raises ValueError, which begins with the wrong field, for a bad endpoint, or if no more sockets can be opened.
    """
    with ExitStack() as on_error:
        try:
            live, feed = context.socket(zmq.PULL if fed else zmq.SUB), None
            on_error.callback(live.close, 0)
            _prepare(live)
            if fed:
                feed = context.socket(zmq.PUSH)
                on_error.callback(feed.close, 0)
            else:
                live.subscribe(source.topic)
            monitor = monitor_of(live)
            on_error.callback(monitor.close, 0)
            on_error.callback(live.disable_monitor)
            replay = None
            if source.replay_endpoint is not None:
                replay = context.socket(zmq.DEALER)
                on_error.callback(replay.close, 0)
                _prepare(replay)
        except zmq.ZMQError as error:
            raise ValueError(
                f"no socket for the stream at {source.endpoint}: {error}; raise the limit of open files (ulimit -n)"
            ) from error
        if source.curve_server_key is not None and keys is not None:
            for socket in filter(None, (None if fed else live, replay)):
                be_client(socket, source.curve_server_key, keys)
        if feed is None:
            connect(live, source.endpoint, "endpoint")
        else:
            feed.bind(within := f"inproc://feed-{next(_feeds)}")
            live.connect(within)
        if replay is not None and source.replay_endpoint is not None:
            connect(replay, source.replay_endpoint, "replay_endpoint")
        on_error.pop_all()
    return live, monitor, replay, feed


def _prepare(socket: zmq.Socket[bytes]) -> None:
    limit_queue(socket, USUAL_MESSAGE)
    keep_alive(socket)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
