"""What runs beside an engine: it reports what its KV cache holds. Needs pyzmq and msgspec; disaggregation, numpy.

A `Reporter` takes three calls and keeps the books; an `EventPublisher` sends batches for an engine that keeps its own.
"""

from worker.publisher import (
    EventPublisher,
    EventPublisherFactory,
    NullEventPublisher,
    PublisherConfig,
    ZmqEventPublisher,
)
from worker.reporter import ParallelRanks, Reporter

__all__ = [
    "EventPublisher",
    "EventPublisherFactory",
    "NullEventPublisher",
    "ParallelRanks",
    "PublisherConfig",
    "Reporter",
    "ZmqEventPublisher",
]
