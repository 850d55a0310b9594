"""The indexer: registered workers, their streams, and what they hold, behind one object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from indexer.hashing import Namespace, pack_tokens
from indexer.holdings import Target
from indexer.index import Index, TargetStatus
from indexer.matching import Match
from indexer.sequence import SequenceSettings
from indexer.streams import StreamReader, StreamStatus
from kvevents import EventSource, Tier

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Registration:
    """A stream to follow: one DP rank of a worker, serving one model for one tenant.

    `engine` is informative. `block_size` (tokens) is only needed before the first event has told it. Events that name
    no adapter are taken to be about `adapter`. `capacity`: the blocks that the engine's own memory has.
    """

    target: Target
    source: EventSource | None
    engine: str = ""
    block_size: int | None = None
    adapter: str | None = None
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class MatchQuery:
    """A tokenized prompt and all that tells its blocks from others with the same tokens."""

    model: str
    token_ids: list[int]
    adapter: str | None = None
    cache_salt: str | None = None
    tenant: str = DEFAULT_TENANT


class UnknownModelError(LookupError):
    """Nobody registered serves this model for this tenant."""


@dataclass(frozen=True, slots=True)
class TargetReport:
    """Everything known of one registered target."""

    registration: Registration
    stream: StreamStatus | None
    holdings: TargetStatus


class Indexer:
    """Follows the streams of registered workers and answers who holds what. `start` and `stop` own its thread."""

    def __init__(self, secret: str = "", orphan_blocks: int = 65_536, sequence: SequenceSettings | None = None) -> None:
        self.index = Index(secret, orphan_blocks)
        self._reader = StreamReader(self.index, sequence)
        self._served: dict[tuple[str, str], dict[Target, Registration]] = {}  # by tenant and model

    def start(self) -> None:
        """Begin to read the streams."""
        self._reader.start()

    def stop(self) -> None:
        """Stop reading and close every socket."""
        self._reader.stop()

    def register(self, registration: Registration) -> None:
        """Follow a target. A registration that is known does nothing; one that differs starts its target anew.

        Raises ValueError naming the field for an endpoint that cannot be connected to.
        """
        target = registration.target
        served = self._served.get((target.tenant, target.model), {})
        known = served.get(target)
        if known == registration:
            return
        stream = self._reader.open(target, registration.source) if registration.source else None
        if known is not None:
            self._reader.remove(target)
            self.index.drop(target)
        self.index.add(target, registration.adapter, registration.capacity)
        if stream is not None:
            self._reader.follow(stream)
        self._served.setdefault((target.tenant, target.model), {})[target] = registration

    def unregister(self, targets: Iterable[Target]) -> None:
        """Forget targets, their streams and what they hold."""
        for target in targets:
            served = self._served.get((target.tenant, target.model), {})
            if served.pop(target, None) is None:
                continue
            if not served:
                del self._served[target.tenant, target.model]
            self._reader.remove(target)
            self.index.drop(target)

    def registered(self) -> list[Registration]:
        """All registrations."""
        return [known for served in self._served.values() for known in served.values()]

    def clear(self, target: Target) -> None:
        """Forget what a target holds, because its cache was reset."""
        self.index.clear(target)

    def match(self, query: MatchQuery) -> list[Match]:
        """How many of a prompt's tokens each registered target would serve from its cache, the most first.

        The last token is always computed, so only full blocks before it count. Raises UnknownModelError, and
        OverflowError or TypeError for a token id that is none.
        """
        return self._matches(query, len(query.token_ids) - 1)

    def longest(self, query: MatchQuery) -> list[Match]:
        """How much of a token sequence each registered target holds, the most first. Raises as `match` does."""
        return self._matches(query, len(query.token_ids))

    def report(self, target: Target) -> TargetReport | None:
        """What is known of a target; None when it is not registered."""
        registration = self._served.get((target.tenant, target.model), {}).get(target)
        holdings = self.index.status(target)
        if registration is None or holdings is None:
            return None
        return TargetReport(registration, self._reader.status(target), holdings)

    def serves(self, model: str, tenant: str = DEFAULT_TENANT) -> bool:
        """Whether any registered target serves this model for this tenant."""
        return (tenant, model) in self._served

    def block_size(self, target: Target) -> int | None:
        """A target's block size in tokens: what its events said, or else its registration."""
        seen = self.index.block_sizes([target])
        if seen:
            return max(seen)
        registration = self._served.get((target.tenant, target.model), {}).get(target)
        return registration.block_size if registration else None

    def block_sizes(self, model: str, tenant: str = DEFAULT_TENANT) -> set[int]:
        """The block sizes, in tokens, that the workers of a model use."""
        served = self._served.get((tenant, model), {})
        sizes = {known.block_size for known in served.values() if known.block_size is not None}
        return sizes | self.index.block_sizes(served)

    def _matches(self, query: MatchQuery, tokens: int) -> list[Match]:
        served = self._served.get((query.tenant, query.model))
        if served is None:
            raise UnknownModelError(f"no registered worker serves model {query.model!r} for tenant {query.tenant!r}")
        packed = pack_tokens(query.token_ids)
        found: dict[Target, Match] = {}
        for block_size in self.block_sizes(query.model, query.tenant):
            namespace = Namespace(query.model, query.tenant, query.adapter, query.cache_salt, block_size)
            for match in self.index.match(namespace, packed, max(tokens, 0) // block_size):
                known = found.get(match.target)
                if known is None or known.matched_tokens < match.matched_tokens:
                    found[match.target] = match
        nothing = dict.fromkeys(Tier, 0)
        matches = [found.get(target) or Match(target, 0, nothing) for target in served]
        return sorted(matches, key=lambda match: -match.matched_tokens)
