"""Publishers of KV-cache events: one ZeroMQ stream per DP rank, with a replay of missed batches.

    publisher = EventPublisherFactory.create('{"publisher": "zmq", "endpoint": "tcp://*:5557"}', attn_dp_rank=0)
    publisher.publish(EventBatch(time.time(), events))
    publisher.shutdown()

The configuration is SGLang's with additional fields. Publishing never blocks. If the queue is full, the oldest waiting
batch is dropped. Its sequence number is then missing from the stream, so that subscribers detect the gap.

Access to its streams is open, by its public key, or by a list of client keys.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvevents import Event, EventBatch, WireForm
from kvevents.curve import be_server, load_key_pair, load_public_keys
from kvevents.decoding import read_json

logger = logging.getLogger(__name__)

_AtLeast0 = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_AtLeast1 = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang's publisher configuration; endpoints are those of rank 0.

    - `bind`: whether the stream's socket is bound or connected; `None`: by the endpoint.
    - `format`: SGLang's name for its own events; `wire_form` has the other dialects.
    - `hwm`: messages buffered for each subscriber.
    - `max_queue_size`: batches that may wait for the publisher's thread.
    - `curve_secret_key_file`: key pair (CURVE) that encrypts both sockets; `None`: no encryption.
    - `curve_client_keys`: folder with the public keys of allowed subscribers; `None`: every subscriber with our public
      key.
    """

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    buffer_steps: _AtLeast0 = 10_000
    hwm: _AtLeast0 = 100_000
    max_queue_size: _AtLeast1 = 100_000
    topic: str = ""
    format: Literal["default"] = "default"
    wire_form: WireForm = WireForm.VLLM_MAPS
    curve_secret_key_file: str | None = None
    curve_client_keys: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the arguments of a publisher's constructor, beside its rank."""
        fields = msgspec.structs.asdict(self)
        del fields["publisher"], fields["format"]
        if self.bind is None:
            del fields["bind"]
        return fields

    @classmethod
    def from_json(cls, text: str) -> PublisherConfig:
        """Parse the configuration. Raises ValueError, which names the invalid field."""
        try:
            return read_json(text, cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"KV events configuration: {error}") from error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All blocks that an engine holds after batch `seq`, as batches of events; `ts` is that moment in unix time."""

    seq: int
    ts: float
    batches: Iterator[list[Event]]


class EventPublisher(ABC):
    """A sender of one DP rank's event batches, in order.

    - `last_seq`: the number of the last batch, -1 before the first.
    """

    wire_form: WireForm = WireForm.VLLM_MAPS
    last_seq: int = -1
    dropped: int = 0
    _attn_dp_rank: int = 0

    def __init__(self, attn_dp_rank: int = 0) -> None:
        self._attn_dp_rank = attn_dp_rank

    @property
    def dp_rank(self) -> int:
        return self._attn_dp_rank

    def offer_snapshots(self, take: Callable[[], Snapshot | None]) -> None:  # noqa: B027
        """Answer snapshot requests, if they are supported, with the result of `take` on any thread."""

    @abstractmethod
    def publish(self, batch: EventBatch) -> None:
        """Send a batch without blocking. If its `dp_rank` is `None`, it is filled in."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send queued batches and release all resources. Repeated calls have no effect."""


class NullEventPublisher(EventPublisher):
    """A publisher that sends nothing: events are off, or another rank reports them."""

    def publish(self, batch: EventBatch) -> None:  # noqa: ARG002
        return

    def shutdown(self) -> None:
        return


class StreamSecurity:
    """The ZeroMQ context of a publisher's sockets, and the keys they use. Without keys, streams are not encrypted.

    A list of client keys needs an authenticator, which sees every connection of its context. That publisher therefore
    has its own context. Raises ValueError, which names the field, for unreadable keys.
    """

    def __init__(self, curve_secret_key_file: str | None, curve_client_keys: str | None) -> None:
        if curve_client_keys is not None and curve_secret_key_file is None:
            raise ValueError("curve_client_keys: also set curve_secret_key_file")
        field = "curve_secret_key_file"
        self._pair = load_key_pair(curve_secret_key_file, field) if curve_secret_key_file is not None else None
        self._authenticator: ThreadAuthenticator | None = None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        if curve_client_keys is not None:
            load_public_keys(curve_client_keys, "curve_client_keys")
            self.context = zmq.Context()
            self._authenticator = ThreadAuthenticator(self.context)
            self._authenticator.configure_curve(domain="*", location=curve_client_keys)
            self._authenticator.start()

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set up a socket before it is bound or connected."""
        if self._pair is not None:
            be_server(socket, self._pair)

    def close(self) -> None:
        """Stop the authenticator. All sockets have to be closed before."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self.context.term()
