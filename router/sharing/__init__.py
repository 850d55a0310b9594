"""Load shared between routers: what each has in flight, sent to the others many times a second.

messages           what routers send each other
peer_load          what the others have in flight, as this router knows it
sharing            sending them what changes here, over any number of channels
datagrams          the channel between the processes of one machine
redis              the channel between replicas
worker_processes   the processes of one port, and what one asks the others
all_processes      answers of all processes put together
metrics            how it goes, for Prometheus

Nothing on the way of a request waits for any of it. A channel that is lost costs quality: each router then sees its own
requests, and those of others only in the engines' metrics.
"""

from __future__ import annotations

from router.load.peer_load import PeerLoad
from router.load.target_load import LoadTable
from router.settings import ReplicasSettings, Settings
from router.sharing.metrics import SharingCollector
from router.sharing.redis import RedisChannel
from router.sharing.sharing import LoadSharing, SharingChannel
from router.sharing.worker_processes import WorkerProcesses

__all__ = ["LoadSharing", "PeerLoad", "SharingChannel", "SharingCollector", "build_sharing", "replica_channels"]


def replica_channels(settings: ReplicasSettings) -> list[SharingChannel]:
    """The channels between replicas that the settings name."""
    if not settings.redis:
        return []
    return [RedisChannel(settings.redis, settings.prefix, settings.interval, settings.expiry)]


def build_sharing(settings: Settings, load: LoadTable, worker_processes: WorkerProcesses | None) -> LoadSharing:
    """Return the load sharing over all channels of the settings and of the processes of one port.

    - `worker_processes`: the processes that share this one's port; None: it has no others.
    """
    channels = replica_channels(settings.replicas) + ([worker_processes.channel()] if worker_processes else [])
    peer_load = PeerLoad(settings.replicas.expiry, settings.proxy.speculation_seconds)
    return LoadSharing(load, peer_load, channels)
