"""Load shared between routers: what each has in flight, told to the others many times a second.

messages    what routers tell each other
elsewhere   what the others have in flight, as this router knows it
sharing     telling them what changes here, over any number of carriers
datagrams   the carrier between the processes of one machine
redis       the carrier between replicas
metrics     how it goes, for Prometheus

Nothing on the way of a request waits for any of it. A carrier that is lost costs quality: each router then sees its own
requests, and those of others only as the engines' metrics tell them.
"""

from __future__ import annotations

from router.settings import ReplicasSettings
from router.sharing.elsewhere import Elsewhere
from router.sharing.metrics import SharingCollector
from router.sharing.redis import RedisCarrier
from router.sharing.sharing import Carrier, LoadSharing

__all__ = ["Carrier", "Elsewhere", "LoadSharing", "SharingCollector", "replica_carriers"]


def replica_carriers(settings: ReplicasSettings) -> list[Carrier]:
    """The carriers between replicas that the settings name."""
    if not settings.redis:
        return []
    return [RedisCarrier(settings.redis, settings.prefix, settings.interval, settings.expiry)]
