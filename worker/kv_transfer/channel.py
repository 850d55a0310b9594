"""The mailbox of a rank: one PULL socket, one PUSH socket for each peer, and one thread that handles their events.

Rooms and peers change in this thread only, one call after another: received frames, posted calls, timers, and lost
peers. These calls need no lock and must not block.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.endpoints import tcp_endpoint
from worker.kv_transfer.frames import MAX_FRAME, AnyMessage, FrameCodec, FrameError

logger = logging.getLogger(__name__)

MAX_PEERS = 4096
SEND_QUEUE = 1000  # frames that may wait for one peer
COMPACT_TIMERS = 1000  # number of timers from which on cancelled ones are removed
FRAMES_A_TURN = 100  # frames that are read before posted calls and timers run
LINGER_MS = 500
REFUSALS = 3  # Failed attempts to connect. Ranks register after they listen, so a refusal means that the rank ended.
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class Timer:
    """A scheduled call. Only the channel's thread may cancel it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


@dataclass(slots=True)
class _Peer:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    timer: Timer
    connected: bool = False
    refused: int = 0


class Channel:
    """A mailbox and its thread.

    - `on_message`: receives each valid frame, in the thread.
    - `on_lost`: receives an endpoint whose connection ended, and the reason, in the thread.
    - `rejected`: dropped frames by kind.

    A connection ends when the peer closes it, when it is silent for two heartbeats, or when it cannot be established
    within `connect_timeout_s`. Raises OSError for an address in use.
    """

    def __init__(
        self,
        host: str,
        port: int,
        codec: FrameCodec,
        on_message: Callable[[AnyMessage], None],
        on_lost: Callable[[str, str], None],
        *,
        heartbeat_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.rejected: Counter[str] = Counter()
        self.errors = 0  # calls that raised
        self._codec = codec
        self._on_message = on_message
        self._on_lost = on_lost
        self._heartbeat_ms = max(1, int(heartbeat_s * 1000))
        self._connect_timeout_s = connect_timeout_s
        self._peers: dict[str, _Peer] = {}
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._compact_at = COMPACT_TIMERS
        self._order = itertools.count()
        self._posted: deque[Callable[[], None]] = deque()
        self._closing = threading.Event()

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        try:
            self._set_options(self._pull, ipv6=":" in host)
            # larger frames end the connection before they use memory
            self._pull.setsockopt(zmq.MAXMSGSIZE, 4 * MAX_FRAME)
            self._pull.bind(tcp_endpoint(host, port or "*"))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"cannot bind {tcp_endpoint(host, port)}: {error.strerror}") from error
        self.port = int(self._pull.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.endpoint = tcp_endpoint(host, self.port)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-channel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call for the channel's thread, from any thread and without blocking. After `close` it is dropped."""
        self._posted.append(call)
        self._wake()

    def close(self, last: Callable[[], None]) -> None:
        """Run posted calls and then `last`, send queued frames for at most LINGER_MS, and end the thread."""
        if not self._closing.is_set():
            self._posted.append(last)
            self._closing.set()
            self._wake()
        self._thread.join()

    # Methods below run in the channel's thread.

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        """Schedule a call at an instant of `time.monotonic()`."""
        timer = Timer(call)
        if len(self._timers) >= self._compact_at:
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._compact_at = max(COMPACT_TIMERS, 2 * len(self._timers))
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def send(self, endpoint: str, message: AnyMessage) -> bool:
        """Queue a frame for a peer, and connect first if necessary. Return False if the peer is lost."""
        peer = self._peers.get(endpoint) or self._connect(endpoint)
        if peer is None:
            return False
        try:
            peer.socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._lose(endpoint, f"{endpoint} reads no frames: {SEND_QUEUE} are waiting")
            return False
        return True

    def forget(self, endpoint: str) -> None:
        """Close the connection to a peer, if it exists."""
        peer = self._peers.pop(endpoint, None)
        if peer is None:
            return
        peer.timer.cancel()
        self._poller.unregister(peer.monitor)
        del self._monitors[peer.monitor]
        peer.socket.disable_monitor()
        peer.monitor.close(linger=0)
        peer.socket.close(linger=LINGER_MS if peer.connected else 0)

    def _connect(self, endpoint: str) -> _Peer | None:
        if len(self._peers) >= MAX_PEERS:
            self.rejected["peers"] += 1
            return None
        push = self._context.socket(zmq.PUSH)
        self._set_options(push, ipv6="[" in endpoint)
        push.setsockopt(zmq.RECONNECT_IVL, 100)
        push.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        monitor = push.get_monitor_socket(_WATCHED)
        try:
            push.connect(endpoint)
        except zmq.ZMQError:
            push.disable_monitor()
            monitor.close(linger=0)
            push.close(linger=0)
            self._posted.append(lambda: self._on_lost(endpoint, f"{endpoint} is not a valid address"))
            return None
        unreachable = f"{endpoint} can't be reached within {self._connect_timeout_s:g} s"
        timer = self.call_at(time.monotonic() + self._connect_timeout_s, lambda: self._lose(endpoint, unreachable))
        self._poller.register(monitor, zmq.POLLIN)
        self._monitors[monitor] = endpoint
        peer = self._peers[endpoint] = _Peer(push, monitor, timer)
        return peer

    def _set_options(self, sock: zmq.Socket[bytes], ipv6: bool) -> None:
        sock.setsockopt(zmq.IPV6, ipv6)
        sock.setsockopt(zmq.LINGER, 0)
        sock.set_hwm(SEND_QUEUE)
        sock.setsockopt(zmq.HEARTBEAT_IVL, self._heartbeat_ms)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * self._heartbeat_ms)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # enough wake-ups are pending, or the thread has ended
            self._wake_sender.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            while self._posted:
                self._call(self._posted.popleft())
        finally:
            for endpoint in list(self._peers):
                self.forget(endpoint)
            self._pull.close(linger=0)
            self._context.term()  # waits for lingering frames
            self._wake_receiver.close()
            self._wake_sender.close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._timeout_ms()))
        if self._wake_receiver.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(65536)
        for monitor in [sock for sock in ready if sock in self._monitors]:
            self._read_monitor(monitor)
        if self._pull in ready:
            self._read_frames()
        for _ in range(len(self._posted)):
            self._call(self._posted.popleft())
        while self._timers and self._timers[0][0] <= time.monotonic():
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                self._call(timer.call)

    def _timeout_ms(self) -> int | None:
        if self._posted:
            return 0
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        return max(0, int((self._timers[0][0] - time.monotonic()) * 1000) + 1) if self._timers else None

    def _read_monitor(self, monitor: zmq.Socket[bytes]) -> None:
        while (endpoint := self._monitors.get(monitor)) is not None:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            peer = self._peers[endpoint]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                peer.connected = True
                peer.timer.cancel()
            elif event == zmq.EVENT_DISCONNECTED:
                self._lose(endpoint, f"the connection to {endpoint} ended")
            else:
                peer.refused += 1
                if peer.refused == REFUSALS:
                    self._lose(endpoint, f"{endpoint} refuses connections")

    def _read_frames(self) -> None:
        for _ in range(FRAMES_A_TURN):
            try:
                parts = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._codec.decode(parts[0] if len(parts) == 1 else b"")
            except FrameError as error:
                self.rejected[error.kind] += 1
                if self.rejected[error.kind] == 1:
                    logger.warning("dropped a frame that is %s: %s (later ones are only counted)", error.kind, error)
                continue
            self._call(lambda message=message: self._on_message(message))  # type: ignore[misc]

    def _lose(self, endpoint: str, reason: str) -> None:
        self.forget(endpoint)
        self._call(lambda: self._on_lost(endpoint, reason))

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self.errors += 1
            logger.exception("a call in the disaggregation channel failed")
