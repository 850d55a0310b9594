"""The capacity of targets for one more request: their limits, and late binding's rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.fleet.worker import Worker
from router.load.peer_load import PeerLoad
from router.load.target_load import LoadTable
from router.routing.late_binding import is_busy
from router.routing.routable_rank import RoutableRank


@dataclass(slots=True)
class Limits:
    """The most that a target of weight 1 may have in flight. Requests above it wait in the router.

    - `requests`: the number of requests; None: no limit.
    - `tokens`: the tokens of their prompts; None: no limit.
    """

    requests: int | None = None
    tokens: int | None = None
    unlimited: bool = field(init=False)

    def __post_init__(self) -> None:
        self.unlimited = self.requests is None and self.tokens is None

    def has_capacity(self, requests: float, context: float, tokens: int) -> bool:
        """Return whether a target may receive one more prompt of `tokens` tokens.

        A prompt that is larger than the limit may go to a target that has no other request.

        - `requests`: the number of requests that the target has in flight.
        - `context`: the tokens that these requests hold.
        """
        if self.requests is not None and requests >= self.requests:
            return False
        return self.tokens is None or requests <= 0 or context + tokens <= self.tokens


NO_LIMITS = Limits()


class TargetCapacity:
    """The capacity that targets have left. The load of other routers counts, and a worker's weight scales it."""

    def __init__(self, load: LoadTable, peer_load: PeerLoad) -> None:
        self._load = load
        self._peer_load = peer_load

    def has_capacity(self, worker: Worker, dp_rank: int, limits: Limits, tokens: int) -> bool:
        """Return whether a DP rank may receive one more prompt of `tokens` tokens."""
        if limits.unlimited:
            return True
        load, weight = self._load.of(worker.url, dp_rank), worker.settings.weight
        peers = self._peer_load.of(worker.url, dp_rank)
        requests = load.requests + peers.requests + worker.metrics.get(dp_rank).unseen
        return limits.has_capacity(requests / weight, (load.context + peers.context) / weight, tokens)

    def prefill_busy(self, rank: RoutableRank, crowded: bool) -> bool:
        """Return whether late binding holds requests for a rank.

        - `crowded`: whether more requests wait than the model has targets.
        """
        peers = self._peer_load.of(rank.worker.url, rank.target.dp_rank)
        return is_busy(rank.load, crowded, peers.streamed, rank.weight)
