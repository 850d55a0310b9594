"""What a policy is given, and what it answers. Plain records: policies read nothing else and change nothing.

What is not known of a candidate is never taken for zero:

    cached tokens   without live events only prompts in flight count as cached, the rest is taken to be computed
    eviction        a worker whose evictions cannot be seen is taken to evict (`router.prediction.eviction_pressure`)
    queue, context  what this router has in flight there
    KV usage        that of the fullest candidate whose usage is known (`known_usage`)
    rates           those of the slowest worker that is known (`router.policies.rates`)
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


@dataclass(slots=True, init=False)
class Candidate:
    """A target that could take the request. Amounts are in tokens unless they say otherwise.

    overlap      tokens of the prompt it would serve from its cache, whatever the tier
    requests     requests in flight, a count
    pending      uncached tokens sent to it whose first byte has not come
    context      tokens that its requests in flight hold
    waiting      requests whose first byte has not come, a count
    cpu, disk    how many of the overlap have to be loaded from there
    eviction     μ: what evicting for a token of prefill costs later, in prefill tokens; 0 while it evicts nothing
    kv_usage     share of its KV memory in use by running requests, 0 to 1; None: not known
    backlog      seconds until the prefills sent to it are done, by `rates`
    rates        how fast it is; None: not known, or all are alike
    """

    target: Target
    overlap: int
    requests: int
    pending: int
    context: int
    waiting: int
    cpu: int
    disk: int
    eviction: float
    kv_usage: float | None
    backlog: float
    rates: Rates | None

    def __init__(
        self,
        target: Target,
        overlap: int = 0,
        requests: int = 0,
        pending: int = 0,
        context: int = 0,
        waiting: int = 0,
        cpu: int = 0,
        disk: int = 0,
        eviction: float = 0.0,
        kv_usage: float | None = None,
        backlog: float = 0.0,
        rates: Rates | None = None,
    ) -> None:
        self.target = target
        self.overlap = overlap
        self.requests = requests
        self.pending = pending
        self.context = context
        self.waiting = waiting
        self.cpu = cpu
        self.disk = disk
        self.eviction = eviction
        self.kv_usage = kv_usage
        self.backlog = backlog
        self.rates = rates

    def copy(self) -> Candidate:
        """Another that is the same."""
        return Candidate(
            self.target,
            self.overlap,
            self.requests,
            self.pending,
            self.context,
            self.waiting,
            self.cpu,
            self.disk,
            self.eviction,
            self.kv_usage,
            self.backlog,
            self.rates,
        )


class Request:
    """What a policy knows of a request: tokens of its prompt, tokens its answer is expected to have, its session.

    `beginning`: the same for prompts that begin alike, which count as one session where the client names none.
    """

    def __init__(
        self, tokens: int, output_tokens: float = 0.0, session: str | None = None, beginning: int | None = None
    ) -> None:
        self.tokens = tokens
        self.output_tokens = output_tokens
        self.session = session
        self.beginning = beginning


class CostUnit(StrEnum):
    """What a policy counts its costs in. The values are what users see in `/explain`, headers, metrics and the page."""

    TOKENS = "tokens"  # of prefill
    SECONDS = "seconds"
    REQUESTS = "requests"
    TOKEN_REQUESTS = "token_requests"  # tokens of prefill times requests
    SCORE = "score"  # a sum of weighted shares
    TURNS = "turns"


@dataclass(frozen=True, slots=True)
class Cost:
    """What choosing a candidate would cost, term by term."""

    candidate: Candidate
    terms: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.terms.values())


# Members of an enumeration are looked up in it each time.
_TOKENS: Final = CostUnit.TOKENS


class Decision:
    """The chosen candidate. What every candidate would have cost is worked out when it is asked for.

    `candidates`: all of them, or what makes records of them once somebody looks: the chosen one as it was, the others
    with the load they have then. `count`: how many they are. `free`: what is chosen never costs anything. `unit`: of
    all terms.
    """

    def __init__(
        self,
        chosen: Candidate,
        candidates: list[Candidate] | Callable[[], list[Candidate]],
        terms: Callable[[Candidate], dict[str, float]],
        free: bool = False,
        count: int = 0,
        unit: CostUnit = _TOKENS,
    ) -> None:
        self.chosen = chosen
        self.count = len(candidates) if isinstance(candidates, list) else count
        self._candidates = candidates
        self.terms = terms
        self.free = free
        self.unit = unit

    @property
    def candidates(self) -> list[Candidate]:
        """What was chosen from."""
        candidates = self._candidates
        if not isinstance(candidates, list):
            candidates = self._candidates = candidates()
        return candidates

    @property
    def costs(self) -> list[Cost]:
        """The cost of every candidate, in their order."""
        return [Cost(candidate, self.terms(candidate)) for candidate in self.candidates]

    def summary(self) -> str:
        """The chosen one's terms in a line, for a header: `pending=0 prefill=12 total=12 unit=tokens candidates=2`."""
        cost = Cost(self.chosen, self.terms(self.chosen))
        terms = " ".join(f"{name}={value:.6g}" for name, value in (*cost.terms.items(), ("total", cost.total)))
        return f"{terms} unit={self.unit} candidates={self.count}"


# Candidates are never empty.
Policy = Callable[[list[Candidate], Request], Decision]


class ByTurn(ABC):
    """A policy for which only the number of candidates counts, so that its decisions can be made before."""

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:  # noqa: ARG002
        return self.decision(candidates, self.turn(len(candidates)))

    @abstractmethod
    def turn(self, candidates: int) -> int:
        """The place of the next one among `candidates`."""

    @abstractmethod
    def decision(self, candidates: list[Candidate], turn: int) -> Decision:
        """The decision for the candidate at a place. It is the same each time."""


def cheapest(
    candidates: list[Candidate],
    terms: Callable[[Candidate], dict[str, float]],
    random: Random,
    near: float = 0.0,
    unit: CostUnit = _TOKENS,
) -> Decision:
    """The candidate whose terms add up to the least; ties at random. `near`: as in `one_of_lowest`."""
    totals = [sum(terms(candidate).values()) for candidate in candidates]
    return Decision(one_of_lowest(candidates, totals, random, near), candidates, terms, unit=unit)


def one_of_lowest(
    candidates: list[Candidate],
    totals: list[float],
    random: Random,
    near: float = 0.0,
) -> Candidate:
    """The candidate with the lowest total; ties at random. Totals higher by a share of `near` count as tied."""
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
    """Any of them."""
    return tied[int(random.random() * len(tied))]  # as random.choice does, which takes four times as long


def known_usage(candidates: list[Candidate]) -> float:
    """The KV usage to assume where it is not known: the highest that is known, or a full cache."""
    return max((c.kv_usage for c in candidates if c.kv_usage is not None), default=1.0)
