"""Publish an engine's KV-cache events: one ZeroMQ stream per DP rank, with a replay of what a subscriber missed.

    publisher = EventPublisherFactory.create('{"publisher": "zmq", "endpoint": "tcp://*:5557"}', attn_dp_rank=0)
    publisher.publish(EventBatch(time.time(), events))
    publisher.shutdown()

The configuration is SGLang's, with a few fields more. Publishing never waits: a batch that finds the queue full pushes
out the oldest one waiting, whose sequence number stays missing from the stream, so that subscribers see the gap.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvevents import Event, EventBatch, WireForm

logger = logging.getLogger(__name__)

_AtLeast0 = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_AtLeast1 = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang's publisher configuration; endpoints are those of rank 0.

    `buffer_steps`: batches kept for replay. `hwm`: messages buffered for each subscriber. `max_queue_size`: batches
    that may wait for the publisher's thread. `wire_form`: whose dialect to speak. `curve_secret_key_file`: encrypt both
    sockets with this key pair (CURVE); `curve_client_keys`: a folder with the public keys of those who may subscribe,
    otherwise anyone who has ours.
    """

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: _AtLeast0 = 10_000
    hwm: _AtLeast0 = 100_000
    max_queue_size: _AtLeast1 = 100_000
    topic: str = ""
    wire_form: WireForm = WireForm.VLLM_MAPS
    curve_secret_key_file: str | None = None
    curve_client_keys: str | None = None

    @classmethod
    def from_json(cls, text: str) -> PublisherConfig:
        """Read the configuration. Raises ValueError, naming the field, for what does not fit."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"KV events configuration: {error}") from error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that an engine holds after the batch numbered `seq`, as batches of events; `ts` is when that was."""

    seq: int
    ts: float
    batches: Iterator[list[Event]]


class EventPublisher(ABC):
    """Takes the event batches of one DP rank, in order.

    `wire_form`: the dialect that it speaks. `last_seq`: the number of the last batch, -1 before the first. `dropped`:
    batches that never reached the stream.
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
        """Answer subscribers who ask for all that the engine holds by what `take` says, on any thread.

        A publisher that has no way to do so need not.
        """

    @abstractmethod
    def publish(self, batch: EventBatch) -> None:
        """Send a batch; its `dp_rank` is filled in where it is None. Never waits."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is queued and release everything; may be called again."""


class NullEventPublisher(EventPublisher):
    """Publishes nothing: events are off, or another rank reports them."""

    def publish(self, batch: EventBatch) -> None:  # noqa: ARG002
        return

    def shutdown(self) -> None:
        return
