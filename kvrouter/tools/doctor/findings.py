"""The findings of the doctor: causes by the names of `router.observability.advice`, with what shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.observability.advice import about


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: its cause, worker and evidence."""

    cause: str
    worker: str
    evidence: str
    dp_rank: int | None = None

    def as_json(self, found: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the finding with its fix, for scripts. `found`: the fields of a router's finding."""
        known: dict[str, Any] = about(self.cause) | dict(found or {})
        return {
            "cause": self.cause,
            "worker": self.worker,
            "dp_rank": self.dp_rank,
            **({"dp_ranks": known["dp_ranks"]} if "dp_ranks" in known else {}),
            "evidence": self.evidence,
            "fix": known["action"],
            "severity": known["severity"],
            "link": known["link"],
        }
