"""DP ranks of workers as targets of requests, and their capacity for one more request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from indexer import Target
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, chunk_root
from router.cache_state.target_cache import TargetCache
from router.fleet.worker import Worker
from router.load.running_prompts import RunningPrompts
from router.load.target_load import LoadTable, TargetLoad
from router.policies.rates import Rates
from router.prediction.learned import OutputLengths
from router.routing.late_binding import is_busy
from router.settings import Role


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
    - `cache`: what is known of its cache for the target's model, beside the index.
    - `capacity`: the blocks of its cache; None if unknown.
    - `full`: whether it has no room, so that evictions have a price. `LoadView` sets it.
    - `fill`: the share of its cache that holds blocks; 1 if unknown. `LoadView` sets it.
    - `shows_fill`: whether the capacity is known, and events show the blocks. `LoadView` sets it.
    - `counts_shared`: whether prefixes that prompts share count once, as much of its known memory is in use. `LoadView`
      sets it.
    - `rates`, `output`, `context_token`: its likely speed, the expected tokens of an answer, and the time that a token
      of context adds to it (`router.routing.load_view`). `LoadView` sets them.
    """

    def __init__(
        self, worker: Worker, served: ServedModel, cache: TargetCache, load: TargetLoad, one_of_many: bool
    ) -> None:
        self.worker = worker
        self.served = served
        self.target = cache.target
        self.cache = cache
        self.load = load
        self.one_of_many = one_of_many
        self.weight = worker.settings.weight
        self.capacity_tokens = worker.capacity_tokens
        self.capacity = None if worker.description is None else worker.description.capacity
        self.row = 0
        self.full = False
        self.fill = 0.0
        self.shows_fill = False
        self.counts_shared = False
        self.rates = Rates()
        self.output = 0.0
        self.context_token = 0.0


@dataclass(slots=True)
class Limits:
    """The most that a target of weight 1 may have in flight. None: no limit. Requests above it wait in the router.

    - `closed`: the workers and DP ranks that may not receive the request, because they have no room for its session.
    - `computed`: whether each target also has the limit that its engine can run at once (`TargetLimit`).
    - `lenient`: whether a target may also receive the first request that does not fit beside the others, because no
      request waits in the router. It waits in the engine, and begins there at once when memory is free.
    - `paced`: whether targets compute prompts for a part of the time only, because the fleet refuses requests anyway.
    - `late_binding`: whether requests wait for their target while it is busy or paced. Otherwise another one receives
      them.
    """

    requests: int | None = None
    tokens: int | None = None
    closed: Collection[tuple[str, int]] = ()
    computed: bool = False
    lenient: bool = False
    paced: bool = False
    late_binding: bool = False
    unlimited: bool = field(init=False)

    def __post_init__(self) -> None:
        self.unlimited = self.requests is None and self.tokens is None and not self.closed and not self.computed

    def without(self, closed: Collection[tuple[str, int]]) -> Limits:
        """Return the limits of a request that some DP ranks may not receive."""
        return Limits(self.requests, self.tokens, closed, self.computed, self.lenient, self.paced, self.late_binding)

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


class Demand:
    """The KV memory that a request needs on a target: for its prompt and its expected answer, in tokens."""

    def __init__(self, prompt: RoutedRequest, outputs: OutputLengths, running: RunningPrompts | None) -> None:
        self.tokens = prompt.tokens
        self._prompt = prompt
        self._outputs = outputs
        self._running = running
        self._output: dict[str, int] = {}  # by model
        self._shared: dict[ServedModel, dict[Target, int]] = {}

    def output(self, served: ServedModel) -> int:
        """Return the tokens that its answer needs."""
        output = self._output.get(served.model)
        if output is None:
            output = self._output[served.model] = int(self._outputs.of_request(served.model, self._prompt))
        return output

    def fits(self, rank: RoutableRank, requests: float, lenient: bool) -> bool:
        """Return whether it can run on a rank beside a number of requests. `lenient`: as in `Limits`."""
        load, output = rank.load, self.output(rank.served)
        if lenient:
            return load.fits(requests, 0, 0)
        if load.fits(requests, self.tokens, output):
            return True
        return load.limit.has_slot(requests) and load.fits(requests, self._unshared(rank), output)

    def _unshared(self, rank: RoutableRank) -> int:
        """Return the tokens of its prompt that it does not share with requests that run on a rank."""
        served, prompt = rank.served, self._prompt
        shared = self._shared.get(served)
        if shared is None:
            shared = self._shared[served] = {}
            if self._running is not None and len(prompt.identities) == 1:
                root = served.root_of(prompt.cache_salt)
                shared = self._running.overlaps(prompt.identities[0].all_hashes(root, CHUNK_TOKENS))
                self._shared[served] = shared
        return self.tokens - shared.get(rank.target, 0)


class TargetCapacity:
    """The capacity that targets have left. The load of other routers counts, and a worker's weight scales it."""

    def __init__(self, load: LoadTable, outputs: OutputLengths, running: RunningPrompts | None) -> None:
        self._load = load
        self._outputs = outputs
        self._running = running

    def demand(self, prompt: RoutedRequest) -> Demand:
        """Return what a request needs."""
        return Demand(prompt, self._outputs, self._running)

    def has_capacity(self, rank: RoutableRank, limits: Limits, demand: Demand) -> bool:
        """Return whether a rank may receive one more request."""
        worker, load = rank.worker, rank.load
        if limits is not NO_LIMITS and worker.health.full:
            return False
        if limits.unlimited:
            return True
        if (worker.url, rank.target.dp_rank) in limits.closed:
            return False
        requests = load.requests + load.peers.requests + worker.metrics.get(rank.target.dp_rank).unseen
        if limits.computed and requests and not demand.fits(rank, requests, limits.lenient):
            return False
        if limits.computed and not limits.late_binding and requests and is_prefill_busy(rank, True, limits):
            return False
        context = load.context + load.peers.context
        return limits.has_capacity(requests / rank.weight, context / rank.weight, demand.tokens)

    def at_limits(self, worker: Worker, dp_rank: int, limits: Limits) -> bool:
        """Return whether a DP rank may receive no further request, however short."""
        if worker.health.full:
            return True
        load, weight = self._load.of(worker.url, dp_rank), worker.settings.weight
        requests = load.requests + load.peers.requests + worker.metrics.get(dp_rank).unseen
        if limits.computed and requests and not load.fits(requests, 1, 0):
            return True
        return not limits.has_capacity(requests / weight, (load.context + load.peers.context) / weight, 1)

    def opens_at(self, ranks: Sequence[RoutableRank]) -> float | None:
        """Return when the first of the paced ranks may receive a prompt again; None if none is paced."""
        paced = [rank.load.paced_until for rank in ranks if rank.load.is_paced(rank.load.clock())]
        return min(paced, default=None)


def is_prefill_busy(rank: RoutableRank, crowded: bool, limits: Limits) -> bool:
    """Return whether a rank computes enough prompts for now. `crowded`: more requests wait than there are targets."""
    if limits.paced and rank.worker.role is not Role.PREFILL and rank.load.is_paced(rank.load.clock()):
        return True  # a worker that only prefills has no answers to slow down
    return is_busy(rank.load, crowded, rank.load.peers.streamed, rank.weight)


def without(workers: Sequence[Worker], excluded: Collection[Worker]) -> Sequence[Worker]:
    return [worker for worker in workers if worker not in excluded] if excluded else workers
