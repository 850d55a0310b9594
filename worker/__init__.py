"""Reporting of an engine's KV cache. It needs pyzmq and msgspec; disaggregation also needs numpy.

A `Reporter` keeps the books for an engine. An `EventPublisher` sends the batches of an engine that keeps its own.
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
