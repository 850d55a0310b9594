"""KV-cache events on the wire: event types, engines' dialects, stream frames and replay."""

from kvevents.batches import MalformedBatchError, decode_batch, encode_batch
from kvevents.dialects import WireForm
from kvevents.endpoints import rank_endpoint
from kvevents.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Event,
    EventBatch,
    RejectedEvent,
    Tier,
    tier_of,
)
from kvevents.sources import EventSource

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EngineHash",
    "Event",
    "EventBatch",
    "EventSource",
    "MalformedBatchError",
    "RejectedEvent",
    "Tier",
    "WireForm",
    "decode_batch",
    "encode_batch",
    "rank_endpoint",
    "tier_of",
]
