"""Who answers: the version, the policy, the models and how their prompts become tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

from indexer.api.metrics import build_info
from router.fleet.fleet import Fleet
from router.settings import PolicyName
from router.tokens.tokenizer_source import TokenizerSource

_WAYS = {
    "local": "as the engine makes them",
    "untried": "the engine does not tell its own",
    "guessed": "unlike the engine, which cannot be asked",
}


class About:
    """What a router says of itself when it starts, in `/health` and on the page."""

    def __init__(self, policy: PolicyName, fleet: Fleet, source: TokenizerSource) -> None:
        self.identity = {**build_info(), "policy": policy.value}
        self._fleet = fleet
        self._source = source

    def models(self) -> dict[str, dict[str, Any]]:
        """Each base model that workers serve: how many of them, and how its prompts become tokens."""
        serving = Counter(model for worker in self._fleet.workers if worker.up for model in worker.models())
        report = self._source.report()
        return {
            model: {"workers": count, "tokens": _tokens(report.get(model))} for model, count in sorted(serving.items())
        }


def _tokens(report: dict[str, Any] | None) -> str:
    """How prompts become tokens, in a few words."""
    if report is None:
        return "prompts are not read"
    if report["way"] == "text":
        return "not known: prompts are routed by their text alone"
    if report["reading"] is None:
        return "asked of the engine"
    shapes = Counter(report["shapes"].values())
    said = f"made here by {report['reading']}"
    if shapes:
        way = shapes.most_common(1)[0][0]
        said += f", {_WAYS.get(way, way)}"
        if asked := shapes["engine"]:
            said += f"; of {asked} shapes of {sum(shapes.values())} the engine is asked"
    return said
