"""The state that the parts of routing share, and their view of the fleet and of the index."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from indexer import MatchQuery, Registration, RowMatches, Target, TargetRows
from indexer.index import Index
from indexer.streams.sequence import StreamState
from indexer.streams.session import StreamSession
from router.apis.response_owners import ResponseOwners
from router.apis.response_turns import ResponseTurns
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.fleet.worker import Worker
from router.load.running_prompts import RunningPrompts
from router.load.target_load import LoadTable
from router.policies import NamedPolicy
from router.prediction.learned import Learned
from router.programs import Gate
from router.routing.disaggregation.transfers import TransferTimes
from router.routing.pulls import Pulls
from router.routing.sources import SourceFinder
from router.sharing import LoadSharing


class RoutedFleet(Protocol):
    """The workers, as far as the choice of a target needs them."""

    @property
    def version(self) -> int:
        """A number that grows whenever other workers may receive requests, or requests for other names."""

    @property
    def health_version(self) -> int:
        """A number that grows whenever a circuit opens or closes, and when a worker starts or stops warming up."""

    @property
    def disaggregated(self) -> bool:
        """True if some workers only prefill or only decode."""

    def able(self, name: str | None, prefill: bool = False) -> Sequence[Worker]:
        """Return the workers that may receive new requests for a name, regardless of recent failures."""

    @property
    def may_be_full(self) -> Collection[Worker]:
        """The workers among which those that are full are."""

    def full(self) -> Collection[Worker]:
        """Return the workers that may receive no request now, because they are full or asked for a pause."""

    def model_of(self, name: str) -> str | None:
        """Return the model behind the name of a model or adapter; None if no worker serves it."""

    def names(self) -> set[str]:
        """Return every name that a request may use."""

    def awaits(self, name: str, prefill: bool = False) -> bool:
        """Return whether a request for a name may wait for the first worker that serves it, or prefills for it."""


class RoutedIndex(Protocol):
    """The index of prefixes, as far as the choice of a target needs it."""

    @property
    def index(self) -> Index:
        """The core of the index."""

    @property
    def registrations(self) -> int:
        """A number that grows with every registration and every removal."""

    @property
    def salted(self) -> Set[Target]:
        """The targets with an additional salt, which routed requests never have."""

    def roots(self, model: str, adapter: str | None, cache_salt: str | None) -> list[tuple[int, int]]:
        """Return the block sizes of a model, each with the hash that these prompts start from.

        Raises UnknownModelError.
        """

    def registered(self) -> list[Registration]:
        """Return every registration of a target."""

    def match_rows(self, query: MatchQuery, rows: TargetRows, found: RowMatches) -> None:
        """Add to `found` the tokens of a prompt that each row's target holds. Raises UnknownModelError."""

    def block_size(self, target: Target) -> int | None:
        """Return a target's block size in tokens; None if it is not known."""

    def stream(self, target: Target) -> StreamSession | None:
        """Return a target's event stream; None if it has none."""

    def window(self, target: Target) -> int | None:
        """Return the last tokens of a prompt that a target keeps; None if it keeps prompts whole."""

    def clear(self, target: Target) -> None:
        """Forget everything that a target holds."""


@dataclass(slots=True)
class RoutingState:
    """The one state that the selector, the placement and the prompt reader work on.

    - `clock`: returns the time in seconds, for all parts.
    - `running`: the memory of running prompts; None if no computed limit reads it.
    - `needs_prompts`: whether anything reads prompts: the policy, or a recording. If not, no prompt is tokenized.
    """

    fleet: RoutedFleet
    indexer: RoutedIndex
    policy: NamedPolicy
    load: LoadTable
    in_flight_prefixes: InFlightPrefixes
    sent_prefixes: SentPrefixes
    audit: HitAudit
    learned: Learned
    sharing: LoadSharing
    clock: Callable[[], float] = time.monotonic
    sources: SourceFinder | None = None
    pulls: Pulls | None = None
    responses: ResponseOwners = field(default_factory=ResponseOwners)
    turns: ResponseTurns = field(default_factory=ResponseTurns)
    running: RunningPrompts | None = None
    needs_prompts: bool = field(init=False)
    transfers: TransferTimes = field(init=False)
    gate: Gate = field(init=False)

    def __post_init__(self) -> None:
        self.transfers = TransferTimes(self.learned.rates, self.clock)
        others = self.sharing.peer_load
        self.gate = Gate(self.clock, self._reports_evictions, others.live_tokens, self.sharing.parts)
        others.on_session.append(self.gate.heard)
        self.load.live_of = self.gate.live_tokens
        self.needs_prompts = self.policy.spec.reads_prompts

    def _reports_evictions(self, target: Target) -> bool:
        """Return whether a target's events show now what it holds."""
        stream = self.indexer.stream(target)
        return stream is not None and stream.state is StreamState.LIVE
