"""The answers of the index API: who holds how much of a prompt.

Of a large fleet's targets few hold something of a prompt. The others are in the answer too, behind these; what it says
of them stays the same until somebody registers, or leaves, and is encoded once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from indexer.holdings import Target
from indexer.indexer import Indexer
from indexer.matching import Match
from indexer.names import WorkerNames
from kvevents import Tier

# Members of an enumeration, and their names, are looked up each time.
_GPU, _CPU, _DISK, _ = Tier
_TIER_NAMES = [(tier, tier.name.lower()) for tier in Tier]
_NOTHING = dict.fromkeys(Tier, 0)


class _Nothing:
    """What is said of the targets of a model that hold nothing, and of instances none of whose ranks holds something.

    `ranks`: of each instance. `answer`: that nobody holds anything.
    """

    def __init__(self, tenant: str, targets: list[Target], names: WorkerNames) -> None:
        matches = [Match(target, 0, _NOTHING) for target in targets]
        instances = _by_instance(matches, names)
        self.answer = msgspec.json.encode({tenant: instances})
        self.targets = {match.target: _encoded(_match(match, names)) for match in matches}
        self.instances = {name: _encoded(instance) for name, instance in instances.items()}
        self.ranks = {name: list(instance["DP"]) for name, instance in instances.items()}


class Answers:
    """Encodes answers of an indexer."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer
        self._nothing: dict[tuple[str, str], _Nothing] = {}  # by model and tenant …
        self._known = (0, 0)  # … as long as these changes were the last

    def by_target(self, model: str, tenant: str, tokens: int, matches: list[Match]) -> bytes:
        """Of a prompt of so many tokens, target by target. `matches`: of those that hold something."""
        others = self._holding_nothing(model, tenant).targets.copy()
        for match in matches:
            others.pop(match.target, None)
        held = [_match(match, self._indexer.names) for match in matches]
        return msgspec.json.encode({"model": model, "tokens": tokens, "matches": [*held, *others.values()]})

    def by_instance(self, model: str, tenant: str, matches: list[Match]) -> bytes:
        """RFC 1403's answer: an instance's tiers are those of its rank that holds the most. `matches` as above."""
        nothing = self._holding_nothing(model, tenant)
        if not matches:
            return nothing.answer
        others, instances = nothing.instances.copy(), _by_instance(matches, self._indexer.names)
        for name, instance in instances.items():
            others.pop(name, None)
            for rank in nothing.ranks.get(name, ()):
                instance["DP"].setdefault(rank, 0)
        return msgspec.json.encode({tenant: instances | others})

    def _holding_nothing(self, model: str, tenant: str) -> _Nothing:
        changes = self._indexer.registrations, self._indexer.names.changes  # neither ever gets less
        if changes != self._known:
            self._known = changes
            self._nothing.clear()
        nothing = self._nothing.get((model, tenant))
        if nothing is None:
            targets = list(self._indexer.targets(model, tenant))
            nothing = self._nothing[model, tenant] = _Nothing(tenant, targets, self._indexer.names)
        return nothing


def _match(match: Match, names: WorkerNames) -> dict[str, Any]:
    return {
        "worker": names.of(match.target.worker),
        "dp_rank": match.target.dp_rank,
        "matched_tokens": match.matched_tokens,
        "tiers": {name: match.tiers[tier] for tier, name in _TIER_NAMES},
    }


def _by_instance(matches: list[Match], names: WorkerNames) -> dict[str, Any]:
    instances: dict[str, Any] = {}
    for match in matches:
        target, tokens, tiers = match.target, match.matched_tokens, match.tiers
        name = names.of(target.worker)
        instance = instances.get(name)
        if instance is None:
            gpu, cpu, disk = tiers[_GPU], tiers[_CPU], tiers[_DISK]
            instance = instances[name] = {"longest_matched": tokens, "GPU": gpu, "CPU": cpu, "DISK": disk, "DP": {}}
        instance["DP"][str(target.dp_rank)] = tokens
    return instances


def _encoded(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
