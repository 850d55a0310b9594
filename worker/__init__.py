"""What runs beside an engine: it reports what its KV cache holds. Needs pyzmq and msgspec; disaggregation, numpy.

A `Reporter` takes three calls and keeps the books; an `EventPublisher` sends batches for an engine that keeps its own.
"""

from worker.publisher import EventPublisher, NullEventPublisher, PublisherConfig
from worker.publisher_factory import EventPublisherFactory
from worker.reporter import ParallelRanks, Reporter
from worker.zmq_publisher import ZmqEventPublisher

__all__ = [
    "EventPublisher",
    "EventPublisherFactory",
    "NullEventPublisher",
    "ParallelRanks",
    "PublisherConfig",
    "Reporter",
    "ZmqEventPublisher",
]
