"""The selection in a fleet with workers for prefill or decode alone: who decodes, and who computes the prompt."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from router.fleet.discovery import Engine
from router.fleet.worker import Worker
from router.policies import Policy, Request
from router.routing.assignment import Selection
from router.routing.candidates import CandidateFinder, CandidateSet
from router.routing.capacity import NO_LIMITS
from router.routing.disaggregation.adapters import ADAPTERS, Adapter, Nixl, Sglang
from router.routing.disaggregation.decision import decode_policy, disaggregate, prefill_policy
from router.routing.routed_prompt import RoutedPrompt
from router.routing.target_directory import unavailable
from router.settings import Backend, DisaggregationSettings, Role

_ADAPTER_OF_ENGINE: dict[Engine, type[Adapter]] = {Engine.SGLANG: Sglang, Engine.VLLM: Nixl}


class DisaggregatedSelector:
    """Selects a decode worker, and where it pays a prefill worker beside it.

    `policy`: the router's own, for fleets or models without decode workers.
    """

    def __init__(
        self, candidates: CandidateFinder, policy: Policy, settings: DisaggregationSettings, random: Random
    ) -> None:
        self._candidates = candidates
        self._policy = policy
        self._settings = settings
        self._decode_policy = decode_policy(random)
        self._prefill_policy = prefill_policy(random)

    def select(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], found: CandidateSet, request: Request, now: float
    ) -> Selection:
        """The selection among candidates. Raises RequestError (503) where a prefill worker is needed and none left."""
        candidates = found.candidates
        if not any(found.rank_of(candidate).worker.role is Role.DECODE for candidate in candidates):
            return found.select(self._policy(candidates, request))
        selection = found.select(self._decode_policy(candidates, request))
        adapter = self.adapter_of(selection.worker)
        if selection.worker.role is not Role.DECODE or adapter is None or prompt.path not in adapter.paths:
            return selection
        if adapter.one_answer and len(prompt.identities) * prompt.answers > 1:
            return selection  # what is handed over is the KV of one prompt
        prefills = self._candidates.find(prompt, excluded, NO_LIMITS, now, prefill=True)
        disaggregation = disaggregate(
            selection.decision.chosen,
            prefills.candidates,
            request,
            self._prefill_policy,
            self._settings,
            adapter.decodes_alone,
        )
        if disaggregation.prefill is not None:
            selection.prefill = prefills.select(disaggregation.prefill)
        elif not adapter.decodes_alone:
            raise unavailable("No prefill worker can be reached, and the decode workers compute no prompts.")
        selection.disaggregation = disaggregation
        return selection

    def adapter_of(self, worker: Worker) -> type[Adapter] | None:
        """How a decode worker goes on from a prefill worker; None where that is not known."""
        backend = self._settings.backend
        if backend is not Backend.AUTO:
            return ADAPTERS[backend]
        return _ADAPTER_OF_ENGINE.get(worker.description.engine) if worker.description else None
