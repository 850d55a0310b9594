"""Load shared between routers: what each has in flight, told to the others many times a second.

messages    what routers tell each other
elsewhere   what the others have in flight, as this router knows it
sharing     telling them what changes here, over any number of channels
datagrams   the channel between the processes of one machine
redis       the channel between replicas
metrics     how it goes, for Prometheus

Nothing on the way of a request waits for any of it. A channel that is lost costs quality: each router then sees its own
requests, and those of others only as the engines' metrics tell them.
"""

from __future__ import annotations

from router.settings import ReplicasSettings
from router.sharing.metrics import SharingCollector
from router.sharing.peer_load import PeerLoad
from router.sharing.redis import RedisChannel
from router.sharing.sharing import LoadSharing, SharingChannel

__all__ = ["LoadSharing", "PeerLoad", "SharingChannel", "SharingCollector", "replica_channels"]


def replica_channels(settings: ReplicasSettings) -> list[SharingChannel]:
    """The channels between replicas that the settings name."""
    if not settings.redis:
        return []
    return [RedisChannel(settings.redis, settings.prefix, settings.interval, settings.expiry)]
