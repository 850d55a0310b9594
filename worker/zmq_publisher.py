"""The publisher that sends over ZeroMQ: a PUB socket, and a ROUTER socket for replays, both owned by one thread."""

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
from worker.publisher import EventPublisher, Snapshot
from worker.stream_security import StreamSecurity

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
MAX_REPLAYS = 64  # further requests wait in the socket
REPLAY_CHUNK = 64  # messages sent to one client before the live stream gets its turn …
REPLAY_TURN_S = 0.002  # … or as many as can be made in so long
REPLAY_RETRY_S = 0.005  # between attempts while every client's buffer is full
REPLAY_STALL_S = 30.0  # a client that takes nothing for so long has given up


class ZmqEventPublisher(EventPublisher):
    """Publishes on a PUB socket and answers replay requests on a ROUTER socket, both owned by one thread.

    `bind` overrides the rule that only wildcard, ipc and inproc endpoints are bound; the replay endpoint always is.
    Port 0 binds a free port. Raises ValueError, naming the field, for an endpoint or keys that cannot be read, and
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
        self.dropped = 0  # batches that never reached the stream
        self.malformed_requests = 0
        self.abandoned_replays = 0  # those who asked were not told the end
        self.snapshots = 0
        self.wire_form = wire_form
        self._topic = topic.encode()
        self._process = os.getpid()
        self._take_snapshot: Callable[[], Snapshot | None] | None = None

        self._lock = threading.Lock()  # guards the next three
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._max_waiting = max_queue_size
        self._closing = False

        # Belongs to the thread: batch s is in slot s % buffer_steps until a later one takes its place.
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
                # Without this a ROUTER silently drops what a slow client cannot take yet.
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_endpoint = _bind(self._router, self.replay_endpoint)
        except BaseException:
            self._close_sockets(linger_ms=0)
            raise
        self._thread = threading.Thread(target=self._run, name=f"kv-events-dp{attn_dp_rank}", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Queue a batch for sending; it may be changed afterwards.

        Raises RuntimeError after shutdown, and in a process that was forked off the publisher's own.
        """
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
        """Send the queued batches, at most SHUTDOWN_TIMEOUT_S long, then close the sockets and end the thread.

        In a process that was forked off the publisher's own there is nothing to do.
        """
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
        """Send every queued batch; whether that was the last of them."""
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
        """The sent batches from `start` on. Raises _Overtaken when newer ones take their place meanwhile."""
        end = self._sent_end
        return self._batches(client, max(start, end - len(self._sent)), end)

    def _batches(self, client: bytes, start: int, end: int) -> Iterator[list[bytes]]:
        for seq in range(start, end):
            sent = self._sent[seq % len(self._sent)]
            if sent is not None and sent[0] > seq:
                raise _OvertakenError
            if sent is not None and sent[0] == seq:
                yield replay_frames(client, self._topic, seq, sent[1])
        yield end_of_replay_frames(client, self._topic)

    def _snapshot(self, client: bytes) -> Iterator[list[bytes]]:
        """All that the engine holds; nothing but the end where nobody knows it."""
        snapshot = self._take_snapshot() if self._take_snapshot is not None else None
        if snapshot is not None:
            self.snapshots += 1
            part = 0
            for events in snapshot.batches:
                payload = encode_batch(EventBatch(snapshot.ts, events, self._attn_dp_rank), self.wire_form)
                yield snapshot_frames(client, self._topic, part, StreamFrame(snapshot.seq, payload))
                part += 1
            yield snapshot_frames(client, self._topic, part, StreamFrame(snapshot.seq, b""))
        yield end_of_replay_frames(client, self._topic)

    def _serve_replays(self) -> bool:
        """Give each client one chunk of its oldest replay; whether any client took something."""
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
                reason = "the client takes nothing"
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                done, reason = True, "the client is gone"
            except _OvertakenError:
                done, reason = True, "the client is slower than the stream: batches left the buffer meanwhile"
            except Exception:
                logger.exception("what a subscriber asked for could not be made")
                done, reason = True, "it could not be made"
            if replay.sent > before:
                replay.last_progress = time.monotonic()
                progressed = True
            if done:
                self._replays.remove(replay)
                progressed = True
                if reason:
                    self.abandoned_replays += 1
                    logger.info("a replay of DP rank %d was given up: %s", self._attn_dp_rank, reason)
        return progressed

    def _send_chunk(self, replay: _Replay) -> bool:
        """Send a client its next messages; whether that was the last. Raises zmq.Again when it can take no more."""
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
    """What one client still has to get: `next`, which it could not take yet, and the rest of `messages`."""

    client: bytes
    messages: Iterator[list[bytes]]
    last_progress: float
    next: list[bytes] | None = None
    sent: int = 0


class _OvertakenError(Exception):
    """Batches that are to be replayed were pushed out of the buffer."""


def _bind(sock: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind, and return the endpoint with the port that was bound."""
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
