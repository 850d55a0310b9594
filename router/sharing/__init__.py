"""Load shared between routers: each sends its load in flight to the others, many times a second.

No request waits for any of it. If a channel is lost, each router sees only its own requests. The engines' metrics then
show it the requests of other routers.
"""

from __future__ import annotations

from router.load.peer_load import PeerLoad
from router.load.target_load import LoadTable
from router.settings import ReplicasSettings, Settings
from router.sharing.channels import RedisChannel
from router.sharing.sharing import LoadSharing, SharingChannel, SharingCollector
from router.sharing.worker_processes import WorkerProcesses

__all__ = ["LoadSharing", "PeerLoad", "SharingChannel", "SharingCollector", "build_sharing", "replica_channels"]


def replica_channels(settings: ReplicasSettings) -> list[SharingChannel]:
    """Return the channels between replicas that the settings configure."""
    if not settings.redis:
        return []
    return [RedisChannel(settings.redis, settings.prefix)]


def build_sharing(settings: Settings, load: LoadTable, worker_processes: WorkerProcesses | None) -> LoadSharing:
    """Return the load sharing over all channels of the settings and of the processes of one port.

    - `worker_processes`: the processes that share this one's port; None: it has no others.
    """
    channels = replica_channels(settings.replicas) + ([worker_processes.channel()] if worker_processes else [])
    peer_load = PeerLoad()
    return LoadSharing(load, peer_load, channels)
