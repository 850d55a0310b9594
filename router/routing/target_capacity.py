"""Whether a target may take one more request: its limits, and late binding's rule."""

from __future__ import annotations

from router.fleet.worker import Worker
from router.load.target_load import LoadTable
from router.routing.late_binding import is_busy
from router.routing.limits import Limits
from router.routing.routable_rank import RoutableRank
from router.sharing import PeerLoad


class TargetCapacity:
    """Counts what this router and its peers have in flight, in proportion to a worker's weight."""

    def __init__(self, load: LoadTable, peer_load: PeerLoad) -> None:
        self._load = load
        self._peer_load = peer_load

    def has_capacity(self, worker: Worker, dp_rank: int, limits: Limits, tokens: int) -> bool:
        """Whether a rank may get one more request, of `tokens`."""
        if limits.unlimited:
            return True
        load, weight = self._load.of(worker.url, dp_rank), worker.settings.weight
        peers = self._peer_load.of(worker.url, dp_rank)
        requests = load.requests + peers.requests + worker.metrics.of(dp_rank).unseen
        return limits.has_capacity(requests / weight, (load.context + peers.context) / weight, tokens)

    def prefill_busy(self, rank: RoutableRank, crowded: bool) -> bool:
        """Whether late binding holds requests for a rank. `crowded`: more of them wait than there are targets."""
        peers = self._peer_load.of(rank.worker.url, rank.target.dp_rank)
        return is_busy(rank.load, crowded, peers.streamed, rank.weight)
