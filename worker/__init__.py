"""What runs beside an engine: it reports the engine's KV-cache events. Needs pyzmq and msgspec, nothing more."""

from worker.publisher import (
    EventPublisher,
    EventPublisherFactory,
    NullEventPublisher,
    PublisherConfig,
    ZmqEventPublisher,
)

__all__ = [
    "EventPublisher",
    "EventPublisherFactory",
    "NullEventPublisher",
    "PublisherConfig",
    "ZmqEventPublisher",
]
