"""Sockets that the index binds, for publishers that connect to it.

Many publishers connect to one address, and each names itself in its topic, `kv@POD@MODEL`. A publisher's messages are
moved to a socket of its own target, and read there in the same way as any other stream:

    publishers ──▶ BoundSocket ──by topic, DP rank and CURVE key──▶ PUSH ──inproc──▶ PULL of the target's session

Messages of a publisher without a target are kept for a while, because its worker may be discovered later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.thread import ThreadAuthenticator

from indexer.sockets import USUAL_MESSAGE, keep_alive, limit_queue
from indexer.targets import Registration, Target
from kvevents.batches import batch_rank
from kvevents.curve import KeyPair, be_server
from kvevents.endpoints import parse_endpoint
from kvevents.sources import LONGEST_TOPIC

log = structlog.get_logger()

# Limits of one bound socket: its publishers, and the kept messages of one and of all publishers without a target.
_MOST_PUBLISHERS = 4096
_MOST_KEPT = 256
_MOST_KEPT_BYTES = 32 << 20
_SECONDS_BETWEEN_LOOKUPS = 0.2
# Silence of a publisher after which another one with the same target takes its place.
_SILENT_SECONDS = 30.0
_TOPIC_PREFIX = "kv@"
_DOMAIN = "kv-events"  # of requests for authentication


@dataclass(frozen=True, slots=True)
class BindSettings:
    """The sockets that the index binds, and the publishers that may connect.

    - `keys`: the key pair of encrypted sockets; None: they are not encrypted.
    - `publisher_keys`: a folder with the public keys of publishers that may connect; None: any publisher may.
    - `guarded`: registrations require a token.
    """

    endpoints: tuple[str, ...] = ()
    keys: KeyPair | None = None
    publisher_keys: Path | None = None
    guarded: bool = False

    def check(self, endpoint: str) -> None:
        """Raise ValueError, which begins with the field, if the index may not bind this endpoint."""
        if parse_endpoint(endpoint).is_wildcard and not self.guarded and self.keys is None:
            raise ValueError(
                f"endpoint: publishers on all networks could connect to {endpoint}. Set server.token or "
                "events.curve_secret_key_file, or bind one address"
            )


@dataclass(eq=False, slots=True)
class Publisher:
    """A publisher that connected to a bound socket: one DP rank, by its topic and its CURVE key.

    - `identity`: its public key; empty without encryption.
    - `received_at`: when its last message arrived, in unix seconds.
    - `problem`: why nothing is credited to it; None if its messages are read as its target's stream.
    - `kept`: messages that wait for a target.
    """

    endpoint: str
    topic: str
    identity: str
    dp_rank: int
    address: str
    messages: int = 0
    received_at: float = 0.0
    target: Target | None = None
    problem: str | None = "its worker is not known yet"
    kept: deque[list[bytes]] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    look_at: float = 0.0  # monotonic time of the next search for its target

    @property
    def pod_and_model(self) -> tuple[str | None, str | None]:
        """The pod and the model that its topic names; None if the topic has another form."""
        if not self.topic.startswith(_TOPIC_PREFIX):
            return None, None
        pod, _, model = self.topic.removeprefix(_TOPIC_PREFIX).partition("@")
        return pod, model or None

    @property
    def silent(self) -> bool:
        """True if it sent nothing for a while."""
        return time.time() - self.received_at > _SILENT_SECONDS

    def refuse(self, problem: str) -> None:
        """Drop its target until the next search for one."""
        self.target, self.problem = None, problem
        self.look_at = time.monotonic() + _SECONDS_BETWEEN_LOOKUPS


class BoundSocket:
    """A SUB socket that publishers connect to. Raises ValueError, field first, if it cannot be bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: KeyPair | None) -> None:
        self.endpoint = endpoint
        self.publishers: dict[tuple[str, str, int], Publisher] = {}
        self.unreadable = 0
        self._encrypted = keys is not None
        self._kept_bytes = 0
        self.socket = context.socket(zmq.SUB)
        try:
            limit_queue(self.socket, USUAL_MESSAGE)
            keep_alive(self.socket)
            self.socket.subscribe("")
            if keys is not None:
                be_server(self.socket, keys)
                self.socket.zap_domain = _DOMAIN.encode()
            self.socket.setsockopt(zmq.IPV6, "[" in endpoint)
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise ValueError(f"endpoint: cannot bind {endpoint} ({error})") from error

    def receive(self) -> tuple[Publisher, list[bytes]] | None:
        """Receive a readable message with its publisher; None if no message is waiting."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            first, parts = frame, [frame.bytes]
            while frame.more:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
                parts.append(frame.bytes)
            publisher = self._publisher_of(first, parts)
            if publisher is not None:
                return publisher, parts
            self.unreadable += 1

    def keep(self, publisher: Publisher, parts: list[bytes]) -> None:
        """Keep a message until its publisher has a target. The oldest messages are dropped first."""
        if len(publisher.kept) == _MOST_KEPT:
            self._kept_bytes -= sum(map(len, publisher.kept[0]))
        size = sum(map(len, parts))
        if self._kept_bytes + size <= _MOST_KEPT_BYTES:
            publisher.kept.append(parts)
            self._kept_bytes += size

    def take_kept(self, publisher: Publisher) -> Iterable[list[bytes]]:
        """Return the kept messages of a publisher, which are no longer kept."""
        kept, publisher.kept = publisher.kept, deque(maxlen=_MOST_KEPT)
        self._kept_bytes -= sum(len(part) for parts in kept for part in parts)
        return kept

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(0)

    def _publisher_of(self, frame: zmq.Frame, parts: list[bytes]) -> Publisher | None:
        """Return the publisher of a message; None if the message is no batch or names no publisher."""
        if len(parts) != 3 or len(parts[0]) > LONGEST_TOPIC or (rank := batch_rank(parts[2])) is None:
            return None
        try:
            topic = parts[0].decode()
        except UnicodeDecodeError:
            return None
        identity = _property(frame, "User-Id") if self._encrypted else ""
        publisher = self.publishers.get((topic, identity, rank))
        if publisher is None:
            if len(self.publishers) >= _MOST_PUBLISHERS and not self._forget_one():
                return None
            publisher = Publisher(self.endpoint, topic, identity, rank, _property(frame, "Peer-Address"))
            self.publishers[topic, identity, rank] = publisher
            log.info(
                "publisher connected", endpoint=self.endpoint, topic=topic, dp_rank=rank, address=publisher.address
            )
        publisher.messages += 1
        publisher.received_at = time.time()
        return publisher

    def _forget_one(self) -> bool:
        """Forget the oldest publisher without a target. Returns False if all have one."""
        key = next((key for key, known in self.publishers.items() if known.target is None), None)
        if key is None:
            return False
        self.take_kept(self.publishers.pop(key))
        return True


def authenticator(context: zmq.Context[zmq.Socket[bytes]], publisher_keys: Path | None) -> ThreadAuthenticator:
    """Start and return what decides which publishers may connect to encrypted sockets, and names them by their keys."""
    started = ThreadAuthenticator(context)
    started.start()
    started.configure_curve(domain=_DOMAIN, location=CURVE_ALLOW_ANY if publisher_keys is None else str(publisher_keys))
    return started


def find_target(
    publisher: Publisher, registered: Iterable[Registration], pods: Mapping[str, str]
) -> Registration | str:
    """Return the registration whose stream a publisher sends, or in words why it has no registration.

    - `pods`: the workers, as they are registered, by their names and addresses.
    """
    pod, model = publisher.pod_and_model
    ranks = [each for each in registered if each.target.dp_rank == publisher.dp_rank]
    here = [each for each in ranks if each.source is not None and each.source.endpoint == publisher.endpoint]
    worker = None if pod is None else pods.get(pod, pod)
    found = [each for each in here if each.source and each.source.topic and publisher.topic == each.source.topic]
    if not found and worker is not None:
        named = [each for each in ranks if each.target.worker == worker]
        found = [each for each in named if each.target.model == model] or named
    if not found and pod is None:
        found = [each for each in here if each.source and not each.source.topic]
    if not found:
        return f"no worker with DP rank {publisher.dp_rank} is named by the topic {publisher.topic!r}"
    if len(found) > 1:
        return f"the topic {publisher.topic!r} names several targets"
    source = found[0].source
    key = None if source is None else source.curve_server_key
    if key is not None and publisher.identity != key:
        return f"the key of the publisher is not that of {found[0].target.worker}"
    return found[0]


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
