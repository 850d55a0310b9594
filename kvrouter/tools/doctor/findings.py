"""The findings of the doctor: causes by the names of `router.observability.advice`, with what shows them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from router.observability.advice import about


class Finding(NamedTuple):
    """One problem: its cause, worker and evidence."""

    cause: str
    worker: str
    evidence: str
    dp_rank: int | None = None

    def as_json(self, found: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return the finding with its fix, for scripts. `found`: the fields of a router's finding."""
        known = about(self.cause) | dict(found)
        return {
            "cause": self.cause,
            "worker": self.worker,
            "dp_rank": self.dp_rank,
            **({"dp_ranks": found["dp_ranks"]} if "dp_ranks" in found else {}),
            "evidence": self.evidence,
            "fix": known["action"],
            "severity": known["severity"],
            "link": known["link"],
        }
