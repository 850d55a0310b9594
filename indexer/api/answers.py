"""JSON answers of the index API: how many tokens of a prompt each target holds.

In a large fleet most targets hold nothing of a prompt. An answer lists them behind the others. Their part of the answer
changes only when a worker registers, leaves or is renamed, so it is encoded once and cached.
"""

from __future__ import annotations

from typing import Any

import msgspec

from indexer.index import Match
from indexer.indexer import Indexer
from indexer.targets import Target, WorkerNames
from kvevents import Tier

# Constants, because Python looks up members of an enumeration, and their names, at each use.
_GPU, _CPU, _DISK, _ = Tier
_TIER_NAMES = [(tier, tier.name.lower()) for tier in Tier]
_NO_TOKENS = dict.fromkeys(Tier, 0)


class _EmptyAnswers:
    """Encoded answers for a model's targets, each as if it held nothing.

    - `answer`: the whole answer by instance, for a prompt that no target holds.
    - `targets`, `instances`: the entry of each target and each instance.
    - `ranks`: the DP ranks of each instance.
    """

    def __init__(self, tenant: str, targets: list[Target], names: WorkerNames) -> None:
        matches = [Match(target, 0, _NO_TOKENS) for target in targets]
        instances = _by_instance(matches, names)
        self.answer = msgspec.json.encode({tenant: instances})
        self.targets = {match.target: _encode(_entry(match, names)) for match in matches}
        self.instances = {name: _encode(instance) for name, instance in instances.items()}
        self.ranks = {name: list(instance["DP"]) for name, instance in instances.items()}


class Answers:
    """Encoder of an indexer's answers."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer
        self._empty: dict[tuple[str, str], _EmptyAnswers] = {}  # by model and tenant
        self._version = (0, 0)  # the registrations and renames that `_empty` was made after

    def by_target(self, model: str, tenant: str, tokens: int, matches: list[Match]) -> bytes:
        """Return the answer of `/match`, target by target.

        - `tokens`: number of tokens in the prompt.
        - `matches`: the targets that hold a part of it.
        """
        others = self._empty_answers(model, tenant).targets.copy()
        for match in matches:
            others.pop(match.target, None)
        held = [_entry(match, self._indexer.names) for match in matches]
        return msgspec.json.encode({"model": model, "tokens": tokens, "matches": [*held, *others.values()]})

    def by_instance(self, model: str, tenant: str, matches: list[Match]) -> bytes:
        """Return the answer of RFC 1403, instance by instance.

        The tiers of an instance are those of its rank with the most tokens, which `matches` has first.
        """
        empty = self._empty_answers(model, tenant)
        if not matches:
            return empty.answer
        others, instances = empty.instances.copy(), _by_instance(matches, self._indexer.names)
        for name, instance in instances.items():
            others.pop(name, None)
            for rank in empty.ranks.get(name, ()):
                instance["DP"].setdefault(rank, 0)
        return msgspec.json.encode({tenant: instances | others})

    def _empty_answers(self, model: str, tenant: str) -> _EmptyAnswers:
        version = self._indexer.registrations, self._indexer.names.changes  # both only grow
        if version != self._version:
            self._version = version
            self._empty.clear()
        empty = self._empty.get((model, tenant))
        if empty is None:
            targets = list(self._indexer.targets(model, tenant))
            empty = self._empty[model, tenant] = _EmptyAnswers(tenant, targets, self._indexer.names)
        return empty


def _entry(match: Match, names: WorkerNames) -> dict[str, Any]:
    return {
        "worker": names.get(match.target.worker),
        "dp_rank": match.target.dp_rank,
        "matched_tokens": match.matched_tokens,
        "tiers": {name: match.tiers[tier] for tier, name in _TIER_NAMES},
    }


def _by_instance(matches: list[Match], names: WorkerNames) -> dict[str, Any]:
    instances: dict[str, Any] = {}
    for match in matches:
        target, tokens, tiers = match.target, match.matched_tokens, match.tiers
        name = names.get(target.worker)
        instance = instances.get(name)
        if instance is None:
            gpu, cpu, disk = tiers[_GPU], tiers[_CPU], tiers[_DISK]
            instance = instances[name] = {"longest_matched": tokens, "GPU": gpu, "CPU": cpu, "DISK": disk, "DP": {}}
        instance["DP"][str(target.dp_rank)] = tokens
    return instances


def _encode(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
