"""Priorities by name: the Gateway API Inference Extension's InferenceObjectives, and those of the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

# Where InferenceObjectives are in Kubernetes' API. Their group has another name at llm-d, which took them over.
PATH: Final = "/apis/{group}/v1alpha2/namespaces/{namespace}/inferenceobjectives"
_MOST: Final = 2**31 - 1


class Objectives:
    """Priorities of objectives: higher is sooner, 0 is usual, below 0 is the first to be refused.

    `settings`: those that are configured; what the cluster says goes before.
    """

    def __init__(self, settings: Mapping[str, int]) -> None:
        self._settings = dict(settings)
        self._cluster: dict[str, int] = {}

    def priority(self, name: str) -> int | None:
        """The priority of an objective; None where it is not known."""
        found = self._cluster.get(name)
        return self._settings.get(name) if found is None else found

    async def follow(self, objects: Iterable[dict[str, Any]]) -> None:
        """These are the cluster's InferenceObjectives now. One without a priority has 0."""
        found: dict[str, int] = {}
        for each in objects:
            name = (each.get("metadata") or {}).get("name")
            priority = (each.get("spec") or {}).get("priority") or 0
            if name and isinstance(priority, int) and abs(priority) <= _MOST:
                found[str(name)] = priority
        self._cluster = found
