"""The input and output of policies. Policies read nothing but these records and change nothing.

Unknown values of a candidate are never taken for zero:

    cached tokens   without live events only prompts in flight count as cached; all other tokens count as uncached
    memory          the longest wait of the targets whose engines report it
    fuller          a cache whose content or size cannot be observed is assumed to be full
    eviction        a worker whose evictions cannot be observed is assumed to evict
    queue, context  this router's own requests in flight
    KV usage        the usage of the fullest candidate with a known one (`known_usage`)
    rates           the rates of the slowest known worker (`router.policies.rates`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final, TypeVar

from indexer import Target
from router.policies.rates import Rates
from router.policies.shared_tokens import SharedTokens


@dataclass(frozen=True, slots=True)
class Source:
    """A source outside a target, from which it can load the tokens of a prompt that follow its own.

    - `name`: the pool, or "peers".
    - `price`: the price of loading a token, as a share of computing it.
    - `waiting`: the tokens of loads that come before it.
    - `computed_seconds`: the seconds in which a token is computed.
    - `peer`: the target to pull from; None for a pool.
    - `start`: the time before its first token is loaded, in computed tokens.
    """

    name: str
    tokens: int
    price: float
    waiting: int = 0
    computed_seconds: float = 0.0
    peer: Target | None = None
    start: float = 0.0

    @property
    def duration(self) -> float:
        """The time until the tokens are loaded, in computed tokens."""
        return self.start + self.price * (self.tokens + self.waiting)

    @property
    def own_load(self) -> float:
        """The cost of the load without a wait, in computed tokens: at most the cost of computing its tokens.

        An engine loads what it finds in a pool, also where computing is faster. Then the load earns no credit.
        """
        return min(self.start + self.price * self.tokens, float(self.tokens))

    @property
    def load(self) -> float:
        """The cost of the load and of the wait for the loads before it, in computed tokens."""
        return self.own_load + self.price * self.waiting

    @property
    def load_seconds(self) -> float:
        """The seconds until the tokens are loaded."""
        return self.duration * self.computed_seconds

    @property
    def saved(self) -> float:
        """The computed tokens that a load saves; 0 or less if computing is faster."""
        return self.tokens - self.load


@dataclass(slots=True, init=False)
class Candidate:
    """A target that could serve the request. Amounts are in tokens unless stated otherwise.

    - `overlap`: tokens of the prompt that it would serve from its cache, whatever the tier.
    - `pending`: uncached tokens sent to it whose first byte was not received.
    - `context`: tokens that its requests in flight hold.
    - `loads`: requests without a first byte that load tokens from a pool or a peer.
    - `cpu`, `disk`: tokens of the overlap that are loaded from CPU memory, and from disk.
    - `eviction`: μ, the later cost of evicting for one prefill token, in prefill tokens; 0 while it evicts nothing.
    - `fuller`: how much fuller its cache is than that of the emptiest target, as a share of its size.
    - `context_token`: the time that a token of context adds to an answer there, in computed tokens.
    - `memory`: the expected wait for KV memory, in computed tokens.
    - `kv_usage`: share of its KV memory in use by running requests, 0 to 1; None if unknown.
    - `backlog`: seconds until the prefills sent to it are done, by `rates`.
    - `rates`: its speed; None if unknown, or if all workers are alike.
    - `source`: where it can load tokens beyond its overlap; None for nowhere.
    """

    target: Target
    overlap: int
    requests: int
    pending: int
    context: int
    waiting: int
    loads: int
    cpu: int
    disk: int
    eviction: float
    fuller: float
    context_token: float
    memory: float
    kv_usage: float | None
    backlog: float
    rates: Rates | None
    source: Source | None

    def __init__(
        self,
        target: Target,
        overlap: int = 0,
        requests: int = 0,
        pending: int = 0,
        context: int = 0,
        waiting: int = 0,
        loads: int = 0,
        cpu: int = 0,
        disk: int = 0,
        eviction: float = 0.0,
        kv_usage: float | None = None,
        backlog: float = 0.0,
        rates: Rates | None = None,
        source: Source | None = None,
        fuller: float = 0.0,
        context_token: float = 0.0,
        memory: float = 0.0,
    ) -> None:
        self.target = target
        self.overlap = overlap
        self.requests = requests
        self.pending = pending
        self.context = context
        self.waiting = waiting
        self.loads = loads
        self.cpu = cpu
        self.disk = disk
        self.eviction = eviction
        self.fuller = fuller
        self.context_token = context_token
        self.memory = memory
        self.kv_usage = kv_usage
        self.backlog = backlog
        self.rates = rates
        self.source = source

    @property
    def reused(self) -> int:
        """The tokens that it does not compute: its overlap, and what it loads from its source."""
        return self.overlap if self.source is None else self.overlap + self.source.tokens

    def work(self, tokens: int) -> float:
        """Return the tokens of a prompt that it computes, and those that it loads at the price of the load."""
        left = max(tokens - self.reused, 0)
        return left if self.source is None else left + self.source.load

    def copy(self) -> Candidate:
        return Candidate(
            self.target,
            self.overlap,
            self.requests,
            self.pending,
            self.context,
            self.waiting,
            self.loads,
            self.cpu,
            self.disk,
            self.eviction,
            self.kv_usage,
            self.backlog,
            self.rates,
            self.source,
            self.fuller,
            self.context_token,
            self.memory,
        )


@dataclass(slots=True, init=False)
class Request:
    """A policy's view of a request.

    - `beginning`: a hash of the prompt's beginning, which replaces a missing session.
    - `at`: the time of the choice, in seconds of any clock.
    - `shared`: the parts of the prompt that several sessions asked for; None without any.
    """

    tokens: int
    output_tokens: float
    session: str | None
    beginning: int | None
    at: float
    shared: SharedTokens | None

    def __init__(
        self,
        tokens: int,
        output_tokens: float = 0.0,
        session: str | None = None,
        beginning: int | None = None,
        at: float = 0.0,
        shared: SharedTokens | None = None,
    ) -> None:
        self.tokens = tokens
        self.output_tokens = output_tokens
        self.session = session
        self.beginning = beginning
        self.at = at
        self.shared = shared


class CostUnit(StrEnum):
    """The unit of a policy's costs. The values are shown in `/explain`, headers, metrics and on the page."""

    TOKENS = "tokens"  # of prefill
    SECONDS = "seconds"
    REQUESTS = "requests"
    TOKEN_REQUESTS = "token_requests"  # tokens of prefill times requests
    SCORE = "score"  # a sum of weighted shares
    TURNS = "turns"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of choosing a candidate, term by term."""

    candidate: Candidate
    terms: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.terms.values())


# Members of an enumeration are looked up in it each time.
_TOKENS: Final = CostUnit.TOKENS


class Decision:
    """The chosen candidate. The costs of all candidates are computed on demand.

    - `candidates`: all candidates, or a function that makes their records later, with the load of that moment.
    - `count`: the number of candidates, if `candidates` is a function.
    - `excluded`: what a policy of one's own excluded, each with the name of its function.
    """

    def __init__(
        self,
        chosen: Candidate,
        candidates: list[Candidate] | Callable[[], list[Candidate]],
        terms: Callable[[Candidate], dict[str, float]],
        free: bool = False,
        count: int = 0,
        unit: CostUnit = _TOKENS,
        excluded: list[tuple[Candidate, str]] | None = None,
    ) -> None:
        self.chosen = chosen
        self.excluded = excluded
        self.count = len(candidates) if isinstance(candidates, list) else count
        self._candidates = candidates
        self.terms = terms
        self.free = free
        self.unit = unit

    @property
    def candidates(self) -> list[Candidate]:
        candidates = self._candidates
        if not isinstance(candidates, list):
            candidates = self._candidates = candidates()
        return candidates

    @property
    def costs(self) -> list[Cost]:
        """The cost of every candidate, in their order."""
        return [Cost(candidate, self.terms(candidate)) for candidate in self.candidates]

    def summary(self) -> str:
        """Return the chosen candidate's terms for a header: `pending=0 total=0 unit=tokens candidates=2`."""
        cost = Cost(self.chosen, self.terms(self.chosen))
        terms = " ".join(f"{name}={value:.6g}" for name, value in (*cost.terms.items(), ("total", cost.total)))
        return f"{terms} unit={self.unit} candidates={self.count}"


# Candidates are never empty.
Policy = Callable[[list[Candidate], Request], Decision]


class ByTurn(ABC):
    """A policy that depends only on the number of candidates."""

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:  # noqa: ARG002
        return self.decision(candidates, self.turn(len(candidates)))

    @abstractmethod
    def turn(self, candidates: int) -> int:
        """Return the position of the next choice among `candidates`."""

    @abstractmethod
    def decision(self, candidates: list[Candidate], turn: int) -> Decision:
        """Return the decision for the candidate at a position. Equal arguments give equal decisions."""


def cheapest(
    candidates: list[Candidate],
    terms: Callable[[Candidate], dict[str, float]],
    random: Random,
    near: float = 0.0,
    unit: CostUnit = _TOKENS,
) -> Decision:
    """Return the decision for the candidate with the lowest sum of terms. Ties are as in `one_of_lowest`."""
    totals = [sum(terms(candidate).values()) for candidate in candidates]
    return Decision(one_of_lowest(candidates, totals, random, near), candidates, terms, unit=unit)


def one_of_lowest(
    candidates: list[Candidate],
    totals: list[float],
    random: Random,
    near: float = 0.0,
) -> Candidate:
    """Return the candidate with the lowest total, or a random one within the share `near` of it."""
    lowest, first, ties = totals[0], 0, 0
    for place, total in enumerate(totals):
        if total < lowest:
            lowest, first, ties = total, place, 1
        elif total == lowest:
            ties += 1
    if not near and ties == 1:
        return candidates[first]
    most = lowest * (1 + near)
    return one_of_tied([candidates[place] for place, total in enumerate(totals) if total <= most], random)


TiedT = TypeVar("TiedT")


def one_of_tied(tied: list[TiedT], random: Random) -> TiedT:
    """Return any of them."""
    return tied[int(random.random() * len(tied))]  # equals random.choice, which takes four times as long


def known_usage(candidates: list[Candidate]) -> float:
    """Return the KV usage to assume if it is unknown: the highest known one, or a full cache."""
    return max((c.kv_usage for c in candidates if c.kv_usage is not None), default=1.0)
