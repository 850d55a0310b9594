"""A publisher of an engine's batches, live and by replay, with faults that tests switch on."""

from __future__ import annotations

import threading
import time

import zmq

from kvevents import Event, EventBatch, encode_batch
from kvevents.frames import end_of_replay_frames, live_frames, parse_replay_request, replay_frames

DEADLINE_S = 60.0


class Publisher:
    """The live socket of one rank, and a ROUTER socket that answers replay requests from the published batches.

    - `hwm`: maximum number of live messages that wait for a slow subscriber; 0 is unlimited.
    - `halves_replays`: each replay leaves out every second batch, alternately the even and the odd ones.
    - `silent`: replay requests are not answered.
    - `legacy`: replay messages have no topic.
    - `keep`: number of batches that can be replayed; `None` is all.
    - `dropped`: sequence numbers that the next replay leaves out.
    - `requests`: start of each replay request.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], topic: bytes = b"", hwm: int = 0) -> None:
        self.topic = topic
        self.hwm = hwm
        self.halves_replays = False
        self.silent = False
        self.legacy = False
        self.keep: int | None = None
        self.dropped: set[int] = set()
        self.requests: list[int] = []
        self.batches: list[tuple[int, bytes]] = []
        self._context = context
        self.endpoint = self.replay_endpoint = "tcp://127.0.0.1:*"
        self._open()

    def publish(self, *events: Event, lost: bool = False) -> int:
        """Publish a batch and return its sequence number. A `lost` batch is not sent live, but can be replayed."""
        seq = self.batches[-1][0] + 1 if self.batches else 0
        self.send(seq, encode_batch(EventBatch(time.time(), list(events))), lost)
        return seq

    def send(self, seq: int, payload: bytes, lost: bool = False) -> None:
        self.batches.append((seq, payload))
        if not lost:
            self.send_raw(live_frames(self.topic, seq, payload))

    def send_raw(self, frames: list[bytes]) -> None:
        """Send a live message. Raises zmq.Again if the socket would wait for a subscriber."""
        self._live.send_multipart(frames, zmq.DONTWAIT)

    def wait_for_subscriber(self) -> None:
        """Wait until a subscriber is connected and has subscribed."""
        subscribed = False
        while not subscribed:
            assert self._live.poll(int(DEADLINE_S * 1000)), "no subscriber connected"
            subscribed = self._live.recv()[:1] == b"\x01"

    def restart(self) -> None:
        """Restart at the same endpoints, without published batches."""
        self.close()
        self.batches = []
        self._open()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._live.close(0)
        self._router.close(0)

    def _open(self) -> None:
        self._closing = threading.Event()
        self._live, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self._live.setsockopt(zmq.XPUB_VERBOSE, 1)  # report each subscriber, not only the first one
        self.endpoint = _bind(self._live, self.endpoint, self.hwm)
        self.replay_endpoint = _bind(self._router, self.replay_endpoint, 0)
        self._thread = threading.Thread(target=self._answer, args=(self._router, self._closing))
        self._thread.start()

    def _answer(self, router: zmq.Socket[bytes], closing: threading.Event) -> None:
        while not closing.is_set():
            if not router.poll(5):
                continue
            client, start = parse_replay_request(router.recv_multipart())
            self.requests.append(start)
            if self.silent:
                continue
            dropped, self.dropped = self.dropped, set()
            for seq, payload in self.batches[-self.keep :] if self.keep else list(self.batches):
                if seq < start or seq in dropped:
                    continue
                if not self.halves_replays or (seq + len(self.requests)) % 2:
                    self._reply(router, replay_frames(client, self.topic, seq, payload))
            self._reply(router, end_of_replay_frames(client))

    def _reply(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if self.legacy:
            del frames[2]
        router.send_multipart(frames)


def _bind(socket: zmq.Socket[bytes], endpoint: str, hwm: int) -> str:
    """Bind a socket, and return its endpoint. Waits until the previous owner has released the port."""
    socket.set_hwm(hwm)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
