"""Other models for requests, by the InferenceModelRewrites of the cluster.

A rule with the request's model counts more than one for all models. Of equal rules the one of the oldest object counts,
and of that object the first. Targets share the rule's requests by their weights. The requests of a session that headers
name get one target, so that its prompts stay cached.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Final, TypeAlias
from zlib import crc32

import msgspec
import structlog

log = structlog.get_logger()

# The path of InferenceModelRewrites in Kubernetes' API. llm-d, which maintains them now, uses another group.
REWRITES_PATH: Final = "/apis/{group}/v1alpha2/namespaces/{namespace}/inferencemodelrewrites"


class _ModelMatch(msgspec.Struct):
    value: str
    type: str | None = "Exact"


class _Match(msgspec.Struct):
    model: _ModelMatch | None = None


class _Target(msgspec.Struct, rename="camel"):
    model_rewrite: str
    weight: int | None = None


class _Rule(msgspec.Struct):
    matches: list[_Match] | None = None
    targets: list[_Target] | None = None


class _PoolRef(msgspec.Struct):
    name: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    pool_ref: _PoolRef | None = None
    rules: list[_Rule] | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    creation_timestamp: str = ""


class _Rewrite(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec


class _Targets:
    """The targets of one rule."""

    def __init__(self, targets: list[_Target]) -> None:
        self._names = [each.model_rewrite for each in targets]
        weights = [max(1 if each.weight is None else each.weight, 0) for each in targets]
        self._until = list(accumulate(weights if any(weights) else [1] * len(targets)))

    def at(self, share: float) -> str:
        """Return the target at a share of all weights, from 0 to below 1."""
        return self._names[bisect(self._until, share * self._until[-1])]


_ByModel: TypeAlias = dict[str, _Targets]


class ModelRewrites:
    """The rules that apply to a pool. `pool`: the name of the InferencePool; "" for rules of every pool."""

    def __init__(self, pool: str = "", draw: Callable[[], float] = random.random) -> None:
        self._pool = pool
        self._draw = draw
        self._exact: _ByModel = {}
        self._all: _Targets | None = None

    def __bool__(self) -> bool:
        return bool(self._exact) or self._all is not None

    def target(self, model: str, session: str | None) -> str | None:
        """Return the model to use for one that a request names; None if no rule applies."""
        targets = self._exact.get(model, self._all)
        if targets is None:
            return None
        return targets.at(self._draw() if session is None else crc32(session.encode()) / 2**32)

    async def follow(self, objects: Iterable[dict[str, Any]]) -> None:
        """Replace the rules by those of these objects. Invalid objects are ignored."""
        exact: _ByModel = {}
        of_all: _Targets | None = None
        for each in sorted(
            self._valid(objects), key=lambda each: (each.metadata.creation_timestamp, each.metadata.name)
        ):
            for rule in each.spec.rules or ():
                if not rule.targets:
                    continue
                targets = _Targets(rule.targets)
                if not rule.matches:
                    of_all = of_all or targets
                for match in rule.matches or ():
                    if match.model is not None and match.model.type in (None, "Exact"):
                        exact.setdefault(match.model.value, targets)
        self._exact, self._all = exact, of_all

    def _valid(self, objects: Iterable[dict[str, Any]]) -> Iterable[_Rewrite]:
        for each in objects:
            try:
                found = msgspec.convert(each, _Rewrite)
            except msgspec.ValidationError as error:
                log.warning("an InferenceModelRewrite is invalid and ignored", reason=str(error))
                continue
            if not self._pool or (found.spec.pool_ref is not None and found.spec.pool_ref.name == self._pool):
                yield found
