"""DP ranks of workers as targets of requests, and their capacity for one more request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from indexer import Target
from router.cache_state.in_flight_prefixes import chunk_root
from router.fleet.worker import Worker
from router.load.target_load import LoadTable, TargetLoad
from router.routing.late_binding import is_busy


class ServedModel:
    """A model or adapter behind a name: one object for all workers that serve it.

    - `root`: the hash before the first chunk of prompts without a cache salt.
    - `replacement`: the path of an adapter that replaced another of its name while the worker ran. Its events do not
      distinguish the two, so its holdings are predicted from the prompts that were sent.
    """

    def __init__(self, model: str, adapter: str | None, replacement: str | None = None) -> None:
        self.model = model
        self.adapter = adapter
        self.replacement = replacement
        self.root = self.root_of(None)

    def root_of(self, salt: str | None) -> int:
        """Return the hash before the first chunk of prompts with a cache salt."""
        name = self.adapter if self.replacement is None else f"{self.adapter}\0{self.replacement}"
        return chunk_root(self.model, name, salt)


class RoutableRank:
    """A DP rank of a worker, as the target of requests for one name, in the row `row` of the name's targets.

    - `load`: its load for all names, of this router, other routers and other clients.
    - `capacity`: the blocks of its cache; None if unknown.
    - `full`: whether it has no room, so that evictions have a price. `LoadView` sets it.
    - `fill`: the share of its cache that holds blocks; 1 if unknown. `LoadView` sets it.
    """

    def __init__(
        self, worker: Worker, served: ServedModel, target: Target, load: TargetLoad, one_of_many: bool
    ) -> None:
        self.worker = worker
        self.served = served
        self.target = target
        self.load = load
        self.one_of_many = one_of_many
        self.weight = worker.settings.weight
        self.capacity_tokens = worker.capacity_tokens
        self.capacity = None if worker.description is None else worker.description.capacity
        self.row = 0
        self.full = False
        self.fill = 0.0


@dataclass(slots=True)
class Limits:
    """The most that a target of weight 1 may have in flight. None: no limit. Requests above it wait in the router.

    - `closed`: the workers and DP ranks that may not receive the request, because they have no room for its session.
    """

    requests: int | None = None
    tokens: int | None = None
    closed: Collection[tuple[str, int]] = ()
    unlimited: bool = field(init=False)

    def __post_init__(self) -> None:
        self.unlimited = self.requests is None and self.tokens is None and not self.closed

    def has_capacity(self, requests: float, context: float, tokens: int) -> bool:
        """Return whether a target, with these requests that hold `context` tokens, may receive one more prompt.

        A prompt that is larger than the limit may go to a target that has no other request.
        """
        if self.requests is not None and requests >= self.requests:
            return False
        return self.tokens is None or requests <= 0 or context + tokens <= self.tokens


# No limits at all: full workers may receive requests, too.
NO_LIMITS = Limits()
# No limits but those of workers that are full.
UNLIMITED = Limits()


class TargetCapacity:
    """The capacity that targets have left. The load of other routers counts, and a worker's weight scales it."""

    def __init__(self, load: LoadTable) -> None:
        self._load = load

    def has_capacity(self, worker: Worker, dp_rank: int, limits: Limits, tokens: int) -> bool:
        """Return whether a DP rank may receive one more prompt of `tokens` tokens."""
        if limits is not NO_LIMITS and worker.health.full:
            return False
        if limits.unlimited:
            return True
        if (worker.url, dp_rank) in limits.closed:
            return False
        load, weight = self._load.of(worker.url, dp_rank), worker.settings.weight
        requests = load.requests + load.peers.requests + worker.metrics.get(dp_rank).unseen
        return limits.has_capacity(requests / weight, (load.context + load.peers.context) / weight, tokens)

    def prefill_busy(self, rank: RoutableRank, crowded: bool) -> bool:
        """Return whether late binding holds requests for a rank. `crowded`: more requests wait than it has targets."""
        return is_busy(rank.load, crowded, rank.load.peers.streamed, rank.weight)


def without(workers: Sequence[Worker], excluded: Collection[Worker]) -> Sequence[Worker]:
    return [worker for worker in workers if worker not in excluded] if excluded else workers
