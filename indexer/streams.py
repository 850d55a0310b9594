"""One thread that reads every worker's event stream and applies it to the index.

Each stream has a SUB socket for live batches, a DEALER for replays, and a monitor that tells when the publisher was
reached. Reading never waits for anything: what is missing is asked for and meanwhile the rest goes on.

One file, because the sockets, their turns and their ends belong to that one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import attrgetter
from queue import Empty, SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from threading import Event, Lock, Thread
from typing import TypeVar

import structlog
import zmq
from sortedcontainers import SortedKeyList

from indexer.factory import make_inbox
from indexer.holdings import Target
from indexer.inbox import Received, Taken
from indexer.index import Applied, Index, tell
from indexer.memory import give_back
from indexer.names import WorkerNames
from indexer.receiving import (
    MESSAGES_A_TURN,
    USUAL_MESSAGE,
    bound_queue,
    connect,
    connect_again,
    discard,
    has_some,
    keep_alive,
    receive,
)
from indexer.sequence import (
    Action,
    Apply,
    AskReplay,
    Clear,
    SequenceCounters,
    SequenceSettings,
    StreamSequence,
    StreamState,
)
from indexer.stream_monitor import Connected, Disconnected, Reached, Refused, monitor_of, read_monitor
from kvevents import EventSource, MalformedBatchError
from kvevents.curve import KeyPair, be_client, checked_key, temporary_key_pair
from kvevents.decode import batch_time
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

T = TypeVar("T")

_TICK_SECONDS = 0.1  # between looks at the deadlines
_SECONDS_A_TURN = 0.005  # that the answers of a replay, or of a monitor, may take
_ANSWER_TIMEOUT = 30.0  # seconds until the reader gets to a question
_CONNECT_AGAIN_S = 1.0
# Who hangs up that often at once does not understand us. One that stops does so once; one that hangs says nothing.
_HANG_UPS = 3
_AT_ONCE_S = 5.0
# After so many bytes were received, and when there is nothing to do, free memory is given back.
_RECEIVED_BYTES = 16 << 20


@dataclass(slots=True)
class StreamCounters:
    """What could not be read on a stream."""

    bad_frames: int = 0
    bad_events: int = 0


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """How one stream stands.

    `received_at`: the unix time of the last live batch. `lag`: seconds from the engine's time of that batch until it
    was applied here. `confirmed`: seconds since every batch was last known to be applied; None if it never was.
    `began_at`: the monotonic time since which it is followed, or of its last resync.
    """

    state: StreamState
    last_seq: int | None
    received_at: float | None
    lag: float | None
    confirmed: float | None
    began_at: float
    pending: int
    sequence: SequenceCounters
    unreadable: StreamCounters


@dataclass(eq=False, slots=True)
class Stream:
    """The sockets and the order of one target's stream.

    `state`, `last_seq` and `confirmed_at` are those of the sequence once the index shows them: other threads ask.
    """

    target: Target
    source: EventSource
    sequence: StreamSequence
    live: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    state: StreamState = StreamState.CONNECTING
    last_seq: int | None = None
    confirmed_at: float | None = None
    counters: StreamCounters = field(default_factory=StreamCounters)
    received_at: float | None = None
    lag: float | None = None
    began_at: float = field(default_factory=time.monotonic)
    complained: bool = False
    refused: bool = False
    disagreed: bool = False  # once since the last agreement, or more often
    gone: bool = False  # the publisher was reached, and is not there any more
    suspended: bool = False  # its worker does not answer
    left: bool = False  # nobody wants to know what it says from now on
    reached_at: float = 0.0  # (monotonic) the last time that something accepted the connection
    hang_ups: int = 0  # one after another
    connect_at: float | None = None  # (monotonic) again, because ZeroMQ gave up
    largest_message: int = USUAL_MESSAGE
    fd: int = -1  # of `live`, once it is followed
    look_at: float = inf  # (monotonic) what is due of it may be due from then on

    @property
    def due(self) -> float:
        """(monotonic) From when on there is something to do, whatever comes."""
        again = inf if self.connect_at is None else self.connect_at
        return again if self.gone else min(again, self.sequence.due)  # who is gone cannot be asked

    def shown(self) -> None:
        """The index shows all that the sequence has seen."""
        self.state = StreamState.STALE if self.gone or self.suspended else self.sequence.state
        self.last_seq = self.sequence.last_seq
        self.confirmed_at = self.sequence.confirmed_at

    def took(self, payload: bytes, received_at: float) -> None:
        """A live batch was received at this unix time, and applied."""
        made_at = batch_time(payload)
        self.received_at, self.lag = received_at, None if made_at is None else received_at - made_at

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self.live, self.monitor, *([self.replay] if self.replay else [])]


class StreamReader:
    """Reads the streams of all targets. `start` and `stop` own its thread; the other methods are for any thread.

    `streams`: those it was told to follow, by target, to be looked at. `keys`: who it is to the publishers of encrypted
    streams; without, somebody new. `names`: what workers are called in the log.
    """

    def __init__(
        self,
        index: Index,
        settings: SequenceSettings | None = None,
        keys: KeyPair | None = None,
        names: WorkerNames | None = None,
    ) -> None:
        self._index = index
        self._settings = settings
        self._keys = keys
        self._names = names or WorkerNames()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # else 1023, four of which a stream has
        self.streams: dict[Target, Stream] = {}
        self._followed: dict[Target, Stream] = {}  # those the thread has got to
        # Of the sockets that are not live. ZeroMQ's own poll looks at every socket each time. What is watched here
        # instead tells once that something came; so a socket is `ready` until nothing is left, and again after what
        # else may have taken its word.
        self._selector = DefaultSelector()
        self._inbox = make_inbox(index, self._selector.fileno())
        self._live: dict[int, Stream] = {}  # by the socket's file descriptor
        self._handlers: dict[zmq.Socket[bytes], Callable[[], bool]] = {}
        self._ready: dict[zmq.Socket[bytes], None] = {}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake_in, self._wake_out = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake_in.set_hwm(0)  # commands never wait, not even before the start
        self._wake_out.set_hwm(0)
        self._wake_out.bind("inproc://wake")
        self._wake_in.connect("inproc://wake")
        self._waking = Lock()
        self._received = 0  # bytes, since memory was given back
        self._to_look_at: SortedKeyList[Stream, float] = SortedKeyList(key=attrgetter("look_at"))
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="kv-event-reader", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close every socket."""
        self._stopping.set()
        if self._thread.is_alive():
            self._tell(lambda: None)
            self._thread.join()
        while not self._commands.empty():  # streams that were opened and not yet followed have sockets, too
            self._commands.get_nowait()()
        for stream in self._followed.values():
            self._close(stream)
        self._selector.close()
        self._wake_in.close(0)
        self._wake_out.close(0)
        self._context.term()

    def open(self, target: Target, source: EventSource) -> Stream:
        """Connect to a target's stream, for `follow`. Raises ValueError, naming the field, for an endpoint or a key
        that is none, and when no more sockets can be had."""
        if source.curve_server_key is not None:
            checked_key(source.curve_server_key, "curve_server_key")
        with ExitStack() as unless_opened:
            try:
                live = self._context.socket(zmq.SUB)
                unless_opened.callback(live.close, 0)
                bound_queue(live, USUAL_MESSAGE)
                keep_alive(live)
                live.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
                live.subscribe(source.topic)
                monitor = monitor_of(live)
                unless_opened.callback(monitor.close, 0)
                unless_opened.callback(live.disable_monitor)
                replay = None
                if source.replay_endpoint is not None:
                    replay = self._context.socket(zmq.DEALER)
                    unless_opened.callback(replay.close, 0)
                    bound_queue(replay, USUAL_MESSAGE)
                    keep_alive(replay)
                    replay.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            except zmq.ZMQError as error:
                raise ValueError(
                    f"no socket for the stream at {source.endpoint}: {error}; raise the limit of open files (ulimit -n)"
                ) from error
            if source.curve_server_key is not None:
                self._keys = self._keys or temporary_key_pair()
                for socket in filter(None, (live, replay)):
                    be_client(socket, source.curve_server_key, self._keys)
            connect(live, source.endpoint, "endpoint")
            if replay is not None and source.replay_endpoint is not None:
                connect(replay, source.replay_endpoint, "replay_endpoint")
            unless_opened.pop_all()
        return Stream(target, source, StreamSequence(replay is not None, self._settings), live, monitor, replay)

    def follow(self, stream: Stream) -> None:
        """Read an opened stream, in place of the one its target had."""
        self._forget(stream.target)
        self.streams[stream.target] = stream
        self._tell(lambda: self._follow(stream))

    def remove(self, target: Target) -> None:
        """Stop following a target's stream."""
        self._forget(target)

        def leave() -> None:
            self._leave(target)

        self._tell(leave)

    def suspend(self, targets: Iterable[Target], suspended: bool) -> None:
        """The worker of some targets does not answer, or does so again: so do their streams."""
        affected = list(targets)

        def suspend() -> None:
            for target in affected:
                if (stream := self._followed.get(target)) is not None:
                    stream.suspended = suspended
                    stream.shown()

        self._tell(suspend)

    def resync(self, target: Target) -> bool:
        """Forget what a target's stream told and read it again from its start. False when nobody could replay it."""
        known = self.streams.get(target)
        if known is None or known.replay is None:
            return False

        def resync() -> None:
            stream = self._followed.get(target)
            if stream is not None:
                stream.began_at = time.monotonic()
                self._act(stream, stream.sequence.on_resync(stream.began_at))

        self._tell(resync)
        return True

    def status(self, target: Target) -> StreamStatus | None:
        """How a target's stream stands; None when it has none."""
        stream = self.streams.get(target)
        if stream is None:
            return None
        sequence = stream.sequence
        return StreamStatus(
            stream.state,
            stream.last_seq,
            stream.received_at,
            stream.lag,
            None if stream.confirmed_at is None else time.monotonic() - stream.confirmed_at,
            stream.began_at,
            sequence.pending,
            sequence.counters,
            stream.counters,
        )

    def between_batches(self, ask: Callable[[Target, StreamSequence | None], T], target: Target) -> T:
        """Call `ask` with a target and the order of its stream, while no batch is being applied.

        Raises TimeoutError when the reader has no time.
        """
        answer: Future[T] = Future()

        def call() -> None:
            stream = self._followed.get(target)
            try:
                answer.set_result(ask(target, stream.sequence if stream and not stream.left else None))
            except Exception as error:
                answer.set_exception(error)

        self._tell(call)
        return answer.result(_ANSWER_TIMEOUT)

    def _forget(self, target: Target) -> None:
        stream = self.streams.pop(target, None)
        if stream is not None:
            stream.left = True

    def _tell(self, command: Callable[[], None]) -> None:
        with self._waking:  # sockets are not for two threads at once
            self._commands.put(command)
            self._wake_in.send(b"")

    def _run(self) -> None:
        self._watch(self._wake_out, self._obey)
        next_tick = 0.0
        while not self._stopping.is_set():
            reading = self._inbox.read(0 if self._ready else _TICK_SECONDS)
            self._took(reading.taken, reading.told)
            came = self._came(reading.received)
            for key, _ in self._selector.select(0):
                self._ready[key.data] = None
            if self._ready:
                self._took(self._inbox.rest())  # whoever is let in finds what the index has
            for socket in list(self._ready):
                if (handler := self._handlers.get(socket)) is not None:
                    with _logged():
                        if handler():
                            self._ready.pop(socket, None)
            self._take(came)
            if not (reading.taken or reading.untold or came or self._ready) and self._received > _RECEIVED_BYTES:
                self._received = 0
                give_back()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                self._tick(now)

    def _tick(self, now: float) -> None:
        """Do what is due. Of most streams nothing is."""
        for stream in [*self._to_look_at.irange_key(max_key=now)]:
            self._to_look_at.discard(stream)
            stream.look_at = inf
            if stream.due <= now:
                self._took(self._inbox.rest())
                if stream.connect_at is not None and now >= stream.connect_at:
                    stream.connect_at = None
                    connect_again(stream.live, stream.source.endpoint)
                    self._inbox.look_again(stream.fd)
                if not stream.gone:
                    self._act(stream, stream.sequence.on_tick(now))
            self._plan(stream)
        self._index.sweep()

    def _plan(self, stream: Stream) -> None:
        """Look at a stream when something is due, if not before."""
        due = stream.due
        if due < stream.look_at:
            self._to_look_at.discard(stream)
            stream.look_at = due
            self._to_look_at.add(stream)

    def _watch(self, socket: zmq.Socket[bytes], read: Callable[[], bool]) -> None:
        """Look at a socket: `read` what comes, for a turn each time."""
        self._handlers[socket] = lambda: _drain(read)
        self._selector.register(int(socket.fd), EVENT_READ, socket)
        self._ready[socket] = None  # it may have told before

    def _obey(self) -> bool:
        if receive(self._wake_out) is None:
            return False
        with suppress(Empty):
            self._commands.get_nowait()()
        return True

    def _follow(self, stream: Stream) -> None:
        self._leave(stream.target)
        stream.shown()  # it may go on from what was saved
        self._followed[stream.target] = stream
        stream.fd = self._inbox.follow(stream.live, stream.target)
        self._live[stream.fd] = stream
        self._watch(stream.monitor, lambda: self._read_monitor(stream))
        if stream.replay is not None:
            self._watch(stream.replay, lambda: self._read_replay(stream))
        self._plan(stream)

    def _leave(self, target: Target) -> None:
        stream = self._followed.pop(target, None)
        if stream is None:
            return
        self._inbox.leave(stream.fd)
        self._to_look_at.discard(stream)
        del self._live[stream.fd]
        for socket in filter(None, (stream.monitor, stream.replay)):
            self._selector.unregister(int(socket.fd))
            del self._handlers[socket]
            self._ready.pop(socket, None)
        self._close(stream)
        self._index.clear(target)  # the target may have been added anew while this stream was still read

    def _close(self, stream: Stream) -> None:
        stream.live.disable_monitor()
        for socket in stream.sockets():
            socket.close(0)

    def _took(self, taken: list[Taken], told: Iterable[tuple[tuple[int, int], Applied | Exception]] = ()) -> None:
        """Take note of batches that the inbox applied by itself."""
        now = time.monotonic()
        took: list[Stream] = []
        for turn in taken:
            self._received += turn.size
            stream = self._live[turn.socket]
            if stream.left:
                continue
            as_expected = stream.sequence.takes(turn.first, StreamFrame(turn.last, turn.payload), now)
            assert as_expected
            stream.took(turn.payload, turn.received_at)
            took.append(stream)
        for (socket, seq), applied in told:
            self._became(self._live[socket], seq, applied)
        for stream in took:
            stream.shown()

    def _came(self, received: list[Received]) -> list[tuple[int, Stream, Received]]:
        """Those of the turns that had something, with their places and streams."""
        came: list[tuple[int, Stream, Received]] = []
        for place, turn in enumerate(received):
            if turn.messages:
                stream = self._live[turn.socket]
                self._received += turn.size
                self._bound(stream, turn.largest)
                came.append((place, stream, turn))
        return came

    def _take(self, came: list[tuple[int, Stream, Received]]) -> None:
        """Bring batches in order and apply them: together, those that are the next ones."""
        now = time.monotonic()
        runs: dict[int, Stream] = {}
        lasts: list[tuple[Stream, StreamFrame]] = []
        for place, stream, turn in came:
            if stream.left:
                continue
            last = None if turn.first is None else StreamFrame(turn.first + turn.messages - 1, turn.payload)
            if turn.first is not None and last is not None and stream.sequence.takes(turn.first, last, now):
                runs[place] = stream
            else:
                last = self._take_one_by_one(stream, self._inbox.messages(place), now)
            if last is not None:
                lasts.append((stream, last))
        for (place, seq), applied in self._inbox.apply([*runs]):
            self._became(runs[place], seq, applied)
        received_at = time.time()
        for stream, last in lasts:
            stream.took(last.payload, received_at)
            self._show(stream)

    def _show(self, stream: Stream) -> None:
        """The index shows all that the sequence has seen; so what is expected next is known."""
        stream.shown()
        self._inbox.expect(stream.fd, stream.sequence.expected, stream.largest_message)

    def _take_one_by_one(self, stream: Stream, messages: list[list[bytes]], now: float) -> StreamFrame | None:
        """Bring a stream's messages in order and apply what is next; the last that could be read."""
        frame = None
        for parts in messages:
            try:
                frame = parse_live(parts)
            except MalformedFrameError as error:
                self._bad_frame(stream, str(error))
                continue
            with _logged():
                self._act(stream, stream.sequence.on_live(frame, now))
        return frame

    def _read_replay(self, stream: Stream) -> bool:
        assert stream.replay is not None
        parts = receive(stream.replay)
        if parts is None:
            return False
        size = sum(map(len, parts))
        self._received += size
        self._bound(stream, size)
        now = time.monotonic()
        try:
            if is_snapshot(parts):
                actions = stream.sequence.on_snapshot(*parse_snapshot(parts), now)
            else:
                actions = stream.sequence.on_replay(parse_replay(parts), now)
        except MalformedFrameError as error:
            self._bad_frame(stream, str(error))
            return True
        self._act(stream, actions)
        return True

    def _bound(self, stream: Stream, largest: int) -> None:
        """Let the queues of a stream have fewer messages, when larger ones come, in bytes."""
        if largest > stream.largest_message:
            stream.largest_message = largest
            for socket in filter(None, (stream.live, stream.replay)):
                bound_queue(socket, largest)

    def _read_monitor(self, stream: Stream) -> bool:
        if not has_some(stream.monitor):
            return False
        match read_monitor(stream.monitor):
            case Connected():
                if stream.disagreed and stream.replay is not None and stream.source.replay_endpoint is not None:
                    # Where the live socket was hung up on, this one may have been told why, and ZeroMQ gave up.
                    connect_again(stream.replay, stream.source.replay_endpoint)
                    self._ready[stream.replay] = None
                stream.refused = stream.disagreed = stream.gone = False
                stream.hang_ups, stream.connect_at = 0, None
                discard(stream.replay)
                self._act(stream, stream.sequence.on_connected(time.monotonic()))
            case Reached():
                stream.reached_at = time.monotonic()
            case Disconnected():
                stream.gone = stream.sequence.state is not StreamState.CONNECTING
                stream.shown()
            case Refused(reason, final):
                self._refused(stream, reason, final)
        return True

    def _refused(self, stream: Stream, reason: str, final: bool) -> None:
        now = time.monotonic()
        stream.disagreed = True
        at_once = now - stream.reached_at < _AT_ONCE_S
        stream.hang_ups = stream.hang_ups + 1 if at_once and not stream.suspended else 0
        if final:
            stream.connect_at = now + _CONNECT_AGAIN_S
            self._plan(stream)
        if final or stream.hang_ups >= _HANG_UPS:
            if not stream.refused:  # it is tried for ever
                log.warning("no agreement with the publisher", reason=reason, **self._names.about(stream.target))
            stream.refused = True

    def _act(self, stream: Stream, actions: list[Action]) -> None:
        if stream.left:  # its target may be another's by now
            return
        for action in actions:
            match action:
                case Apply(frame):
                    self._apply(stream, frame)
                case Clear():
                    log.info("event stream read anew", **self._names.about(stream.target))
                    self._index.clear(stream.target)
                    discard(stream.replay)
                case AskReplay(start):
                    self._ask(stream, start)
        self._show(stream)
        self._plan(stream)

    def _apply(self, stream: Stream, frame: StreamFrame) -> None:
        told: list[tuple[int, Applied | Exception]] = []
        tell(told, frame.seq, partial(self._index.apply_payload, stream.target, frame.payload))
        for seq, applied in told:
            self._became(stream, seq, applied)

    def _became(self, stream: Stream, seq: int, applied: Applied | Exception) -> None:
        """There is something to tell of a batch."""
        if isinstance(applied, Exception):
            if not isinstance(applied, MalformedBatchError):
                log.error("a batch could not be applied", exc_info=applied)
            self._bad_frame(stream, str(applied))
            return
        if applied.cleared:
            stream.sequence.on_cleared(seq)
        if applied.rejected:
            stream.counters.bad_events += len(applied.rejected)
            self._complain(stream, "event skipped", applied.rejected[0].reason)

    def _ask(self, stream: Stream, start: int) -> None:
        assert stream.replay is not None
        self._ready[stream.replay] = None
        try:
            stream.replay.send_multipart(replay_request(start), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("replay endpoint not reached", **self._names.about(stream.target))  # its deadline goes on

    def _bad_frame(self, stream: Stream, reason: str) -> None:
        stream.counters.bad_frames += 1
        self._complain(stream, "stream message skipped", reason)

    def _complain(self, stream: Stream, what: str, reason: str) -> None:
        """Log the first unreadable thing of a stream; the counters tell how many there were."""
        if not stream.complained:
            stream.complained = True
            log.warning(what, reason=reason, **self._names.about(stream.target))


@contextmanager
def _logged() -> Iterator[None]:
    """Whatever one stream brings, the others are read."""
    try:
        yield
    except Exception:
        log.exception("a message could not be handled")


def _drain(read: Callable[[], bool]) -> bool:
    """Read for a turn. Whether nothing is left."""
    end = time.monotonic() + _SECONDS_A_TURN
    for _ in range(MESSAGES_A_TURN):
        if not read():
            return True
        if time.monotonic() > end:
            break
    return False
