"""The publisher over ZeroMQ: a PUB socket for the stream and a ROUTER socket for replays, both owned by one thread."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from kvevents import EventBatch, WireForm, encode_batch, rank_endpoint
from kvevents.endpoints import publisher_binds
from kvevents.frames import (
    SNAPSHOT_START,
    MalformedFrameError,
    StreamFrame,
    end_of_replay_frames,
    live_frames,
    parse_replay_request,
    replay_frames,
    snapshot_frames,
)
from worker.publisher import EventPublisher, Snapshot, StreamSecurity

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
MAX_REPLAYS = 64  # further requests wait in the socket
REPLAY_CHUNK = 64  # messages sent to one client before the next turn of the live stream
REPLAY_TURN_S = 0.002  # seconds of one client's turn
REPLAY_RETRY_S = 0.005  # seconds between attempts while every client's buffer is full
REPLAY_STALL_S = 30.0  # seconds without progress after which a client's replay is abandoned


class ZmqEventPublisher(EventPublisher):
    """A publisher with a PUB socket and a ROUTER socket for replays, both owned by one thread.

    By default only wildcard, ipc and inproc endpoints are bound; `bind` overrides this. The replay endpoint is always
    bound. Port 0 binds a free port. Raises ValueError, which names the field, for an invalid endpoint or key, and
    OSError for an endpoint in use.
    """

    def __init__(
        self,
        attn_dp_rank: int = 0,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        curve_secret_key_file: str | None = None,
        curve_client_keys: str | None = None,
        *,
        bind: bool | None = None,
        wire_form: WireForm = WireForm.VLLM_MAPS,
    ) -> None:
        super().__init__(attn_dp_rank)
        self.endpoint = rank_endpoint(endpoint, attn_dp_rank)
        self.replay_endpoint = rank_endpoint(replay_endpoint, attn_dp_rank) if replay_endpoint else None
        self.dropped = 0  # batches that were not sent
        self.malformed_requests = 0
        self.abandoned_replays = 0  # replays without an end message
        self.snapshots = 0
        self.wire_form = wire_form
        self._topic = topic.encode()
        self._process = os.getpid()
        self._take_snapshot: Callable[[], Snapshot | None] | None = None

        self._lock = threading.Lock()  # guards the next three attributes
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._max_waiting = max_queue_size
        self._closing = False

        # Used by the thread only: batch s is in slot s % buffer_steps until a later batch replaces it.
        self._sent: list[tuple[int, bytes] | None] = [None] * buffer_steps
        self._sent_end = 0
        self._replays: list[_Replay] = []

        security = StreamSecurity(curve_secret_key_file, curve_client_keys)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._security = security
        self._pub = security.context.socket(zmq.PUB)
        self._router = security.context.socket(zmq.ROUTER) if self.replay_endpoint else None
        try:
            for sock in filter(None, (self._pub, self._router)):
                security.apply(sock)
            self._pub.set_hwm(hwm)
            if publisher_binds(self.endpoint) if bind is None else bind:
                self.endpoint = _bind(self._pub, self.endpoint)
            else:
                _connect(self._pub, self.endpoint)
            if self._router is not None and self.replay_endpoint is not None:
                # Without ROUTER_MANDATORY, messages to a client with a full buffer are dropped silently.
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_endpoint = _bind(self._router, self.replay_endpoint)
        except BaseException:
            self._close_sockets(linger_ms=0)
            raise
        self._thread = threading.Thread(target=self._run, name=f"kv-events-dp{attn_dp_rank}", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Queue a batch, which may then be changed. Raises RuntimeError after shutdown and in a forked process."""
        if batch.dp_rank is None:
            batch = EventBatch(batch.ts, batch.events, self._attn_dp_rank)
        payload = encode_batch(batch, self.wire_form)
        if os.getpid() != self._process:
            raise RuntimeError(f"this publisher belongs to process {self._process}: create one after the fork")
        with self._lock:
            if self._closing:
                raise RuntimeError("this publisher was shut down: create a new one to publish")
            if len(self._waiting) >= self._max_waiting:
                self._waiting.popleft()
                self.dropped += 1
            self.last_seq += 1
            self._waiting.append((self.last_seq, payload))
            wake = len(self._waiting) == 1
        if wake:
            self._wake()

    def shutdown(self) -> None:
        """Send the queued batches for at most SHUTDOWN_TIMEOUT_S, and close. No effect in a forked process."""
        if os.getpid() != self._process:
            return
        with self._lock:
            first = not self._closing
            self._closing = True
        if first:
            self._wake()
        self._thread.join(timeout=2 * SHUTDOWN_TIMEOUT_S)

    def offer_snapshots(self, take: Callable[[], Snapshot | None]) -> None:
        self._take_snapshot = take

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # enough wake-ups are pending, or the thread has ended
            self._wake_sender.send(b"\0")

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake_receiver, zmq.POLLIN)
            progressed = False
            while True:
                self._poll(poller, progressed)
                if self._publish_waiting():
                    return
                self._accept_replays()
                progressed = self._serve_replays()
        except Exception:
            logger.exception("the KV event publisher of DP rank %d stopped", self._attn_dp_rank)
        finally:
            self._close_sockets(linger_ms=int(SHUTDOWN_TIMEOUT_S * 1000))

    def _poll(self, poller: zmq.Poller, progressed: bool) -> None:
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN if len(self._replays) < MAX_REPLAYS else 0)
        timeout_ms = (0 if progressed else int(REPLAY_RETRY_S * 1000)) if self._replays else None
        if self._wake_receiver.fileno() in dict(poller.poll(timeout_ms)):
            self._wake_receiver.recv(4096)

    def _publish_waiting(self) -> bool:
        """Send every queued batch. Return whether the publisher is shutting down."""
        with self._lock:
            batches, self._waiting = self._waiting, deque()
            closing = self._closing
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        while batches and not (closing and time.monotonic() > deadline):
            seq, payload = batches.popleft()
            self._pub.send_multipart(live_frames(self._topic, seq, payload))
            if self._sent:
                self._sent[seq % len(self._sent)] = (seq, payload)
            self._sent_end = seq + 1
        with self._lock:
            self.dropped += len(batches)
        return closing

    def _accept_replays(self) -> None:
        while self._router is not None and len(self._replays) < MAX_REPLAYS:
            try:
                client, start = parse_replay_request(self._router.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            except MalformedFrameError:
                self.malformed_requests += 1
                continue
            messages = self._snapshot(client) if start == SNAPSHOT_START else self._replay(client, start)
            self._replays.append(_Replay(client, messages, time.monotonic()))

    def _replay(self, client: bytes, start: int) -> Iterator[list[bytes]]:
        """Return the sent batches from `start` on. The iterator raises _OvertakenError if newer ones replace them."""
        end = self._sent_end
        return self._batches(client, max(start, end - len(self._sent)), end)

    def _batches(self, client: bytes, start: int, end: int) -> Iterator[list[bytes]]:
        for seq in range(start, end):
            sent = self._sent[seq % len(self._sent)]
            if sent is not None and sent[0] > seq:
                raise _OvertakenError
            if sent is not None and sent[0] == seq:
                yield replay_frames(client, self._topic, seq, sent[1])
        yield end_of_replay_frames(client)

    def _snapshot(self, client: bytes) -> Iterator[list[bytes]]:
        """Yield all blocks that the engine holds. Without a source of snapshots, yield only the end message."""
        snapshot = self._take_snapshot() if self._take_snapshot is not None else None
        if snapshot is not None:
            self.snapshots += 1
            part = 0
            for events in snapshot.batches:
                payload = encode_batch(EventBatch(snapshot.ts, events, self._attn_dp_rank), self.wire_form)
                yield snapshot_frames(client, self._topic, part, StreamFrame(snapshot.seq, payload))
                part += 1
            yield snapshot_frames(client, self._topic, part, StreamFrame(snapshot.seq, b""))
        yield end_of_replay_frames(client)

    def _serve_replays(self) -> bool:
        """Send one chunk to each client, of its oldest replay. Return whether any client received a message."""
        progressed = False
        served: set[bytes] = set()
        for replay in list(self._replays):
            if replay.client in served:
                continue
            served.add(replay.client)
            before = replay.sent
            reason = ""
            try:
                done = self._send_chunk(replay)
            except zmq.Again:
                done = time.monotonic() - replay.last_progress > REPLAY_STALL_S
                reason = "the client reads nothing"
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                done, reason = True, "the client disconnected"
            except _OvertakenError:
                done, reason = True, "the client is slower than the stream: its batches were evicted from the buffer"
            except Exception:
                logger.exception("a replay or snapshot could not be created")
                done, reason = True, "it could not be created"
            if replay.sent > before:
                replay.last_progress = time.monotonic()
                progressed = True
            if done:
                self._replays.remove(replay)
                progressed = True
                if reason:
                    self.abandoned_replays += 1
                    logger.info("a replay of DP rank %d was abandoned: %s", self._attn_dp_rank, reason)
        return progressed

    def _send_chunk(self, replay: _Replay) -> bool:
        """Send a client its next messages. Return whether they were the last. Raises zmq.Again if it is blocked."""
        assert self._router is not None
        until = time.monotonic() + REPLAY_TURN_S
        for _ in range(REPLAY_CHUNK):
            if replay.next is None:
                replay.next = next(replay.messages, None)
            if replay.next is None:
                return True
            self._router.send_multipart(replay.next, zmq.NOBLOCK)
            replay.next = None
            replay.sent += 1
            if time.monotonic() > until:
                break
        return False

    def _close_sockets(self, linger_ms: int) -> None:
        self._pub.close(linger=linger_ms)
        if self._router is not None:
            self._router.close(linger=linger_ms)
        self._security.close()
        self._wake_receiver.close()
        self._wake_sender.close()


@dataclass(slots=True)
class _Replay:
    """The remaining messages of one client's replay. `next` is the message that did not fit its buffer."""

    client: bytes
    messages: Iterator[list[bytes]]
    last_progress: float
    next: list[bytes] | None = None
    sent: int = 0


class _OvertakenError(Exception):
    """Batches of a replay were evicted from the buffer before they were sent."""


def _bind(sock: zmq.Socket[bytes], endpoint: str) -> str:
    sock.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot bind endpoint {endpoint!r}: {error.strerror}") from error
    if not endpoint.startswith("tcp://") or not endpoint.endswith(":0"):
        return endpoint
    port = sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{endpoint.removesuffix(':0')}:{port}"


def _connect(sock: zmq.Socket[bytes], endpoint: str) -> None:
    if endpoint.endswith(":0"):
        raise ValueError(f"endpoint {endpoint!r}: port 0 can only be bound; name the port to connect to")
    sock.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot connect to endpoint {endpoint!r}: {error.strerror}") from error
