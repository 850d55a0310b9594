"""The selection in a fleet with prefill workers and decode workers, by the policy's rule for pairs.

The rule (`router.policies.pairs`) receives the candidates of both roles, and the learned prices of moving tokens. It
chooses a decode worker, and a prefill worker or none. If that choice would miss an SLO, the default's rule chooses
again with the cost of missed SLOs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from http_api.errors import RequestError
from router.apis.endpoints import PROMPTED
from router.apis.requests import RoutedRequest
from router.fleet.discovery import Engine
from router.fleet.worker import Worker
from router.policies import Candidate, Policy, Request
from router.policies.custom import CustomPolicy
from router.policies.interface import Phase
from router.policies.pairs import PairChoice, PairCost, PairOptions, apart
from router.prediction.slo import LITTLE, NO_SLO, SLO, Prediction
from router.routing.assignment import Disaggregation, Selection
from router.routing.candidates import CandidateFinder, CandidateSet
from router.routing.custom_choice import decide
from router.routing.disaggregation.adapters import ADAPTERS, Adapter, Nixl, Sglang
from router.routing.disaggregation.latency import PairLatency
from router.routing.disaggregation.pair_rules import PairRules
from router.routing.ranks import UNLIMITED, Limits
from router.routing.state import RoutingState
from router.routing.target_directory import unavailable
from router.settings import Backend, DisaggregationSettings, Role

_ADAPTER_OF_ENGINE: dict[Engine, type[Adapter]] = {Engine.SGLANG: Sglang, Engine.VLLM: Nixl}


class DisaggregatedSelector:
    """Selects a decode worker, and a prefill worker if the policy's rule chooses one."""

    def __init__(
        self,
        state: RoutingState,
        candidates: CandidateFinder,
        settings: DisaggregationSettings,
        slo_miss_cost: float,
        rules: PairRules,
    ) -> None:
        """Create a selector. Models without decode workers use the router's policy alone.

        - `slo_miss_cost`: the cost of a missed SLO in prefill tokens.
        - `rules`: which workers belong together.
        """
        self._rules = rules
        self._state = state
        self._candidates = candidates
        self._policy: Policy = state.policy.choose
        self._choose_pair = state.policy.choose_pair or apart(self._policy, self._policy)
        self._custom = state.policy.custom
        self._transfers = state.transfers
        self._learned = state.learned
        self._settings = settings
        self._slo_miss_cost = slo_miss_cost

    def select(
        self,
        prompt: RoutedRequest,
        excluded: Collection[Worker],
        found: CandidateSet,
        request: Request,
        now: float,
        slo: SLO | None = None,
        limits: Limits = UNLIMITED,
    ) -> Selection | None:
        """Return the selection among candidates; None if a policy of one's own excludes all of them, or if the
        request should wait for a worker that is full or closed.

        Prefill workers have no limits but the closed DP ranks of `limits`.

        Raises RequestError: 503 if the needed prefill worker is missing, 400 if no worker computes the whole request.
        """
        decoding = [rank.worker for rank in map(found.rank_of, found.candidates) if rank.worker.role is Role.DECODE]
        adapter = self.adapter_of(decoding[0]) if decoding else None
        if adapter is None or prompt.path not in PROMPTED:
            phase = Phase.DECODE if decoding else Phase.BOTH
            return self._select_one(found, prompt, request, phase)
        prefilling = self._state.fleet.able(prompt.name, prefill=True)
        refusing = [worker for worker in (*prefilling, *decoding) if prompt.path in worker.no_handover]
        reason = _not_handed_over(adapter, prompt)
        if refusing and not reason and any(set(refusing) >= set(role) for role in (prefilling, decoding) if role):
            reason = adapter.refusal
        if reason:
            return self._select_whole(adapter, found, prompt, excluded, request, reason)
        if refusing:
            found = found.without([rank.row for rank in found.targets.ranks if rank.worker in refusing])
            excluded = [*excluded, *refusing]
        open_ranks = UNLIMITED.without(limits.closed)
        prefills = self._candidates.find(prompt, excluded, open_ranks, now, prefill=True, pulls=adapter.pulls)
        candidates = found.candidates
        ranks = [found.rank_of(candidate) for candidate in candidates]
        if not prefills.count and not (adapter.decodes_alone and self._settings.decode_computes):
            full = self._state.fleet.full()
            if limits.closed:
                return None
            if any(worker.accepts(prompt.name, prefill=True) and worker not in excluded for worker in full):
                return None
        together = [prefills.rank_of(candidate).worker for candidate in prefills.candidates]
        ruled_out = self._rules.excluded_among(decoding, together)
        unpaired = frozenset([(prefill.url, decode.url) for prefill, decode in ruled_out.barred])
        options = PairOptions(
            candidates,
            prefills.candidates,
            frozenset([rank.target for rank in ranks if rank.worker.role is not Role.DECODE]),
            adapter.decodes_alone and (self._settings.decode_computes or not prefills.count),
            self._transfers.seconds,
            self._learned.seconds_per_token(),
            prefills.shared,
            unpaired=unpaired,
        )
        latency = PairLatency(self._state, found, prefills, request, prompt.encoding)
        choice = self._choose(options, request, latency, slo, now)
        if self._custom is not None:
            decode = choice.decode.chosen.target.worker
            barred = [rank.row for rank in prefills.targets.ranks if (rank.worker.url, decode) in unpaired]
            allowed = prefills.without(barred) if barred else prefills
            changed = self._with_functions(self._custom, choice, options, found, allowed, prompt, request)
            if changed is None:
                return None
            choice = changed
        selection = found.select(choice.decode)
        # A prefix that only workers of the other role hold is not lost.
        held = max([candidate.overlap for candidate in prefills.candidates], default=0)
        selection.best_overlap = max(selection.best_overlap, held)
        if selection.worker.role is not Role.DECODE:
            return selection
        if choice.prefill is not None:
            selection.prefill = prefills.select(choice.prefill)
        elif not adapter.decodes_alone:
            raise unavailable(
                "No prefill worker of their revision can be reached, and the decode workers compute no prompts."
                if ruled_out.workers
                else "No prefill worker can be reached, and the decode workers compute no prompts."
            )
        prediction = latency.of(*choice.chosen)
        inputs: dict[str, Any] = {**choice.inputs, "predicted_ttft": prediction.ttft.expected}

        def predict(decode: Candidate) -> Prediction:
            return latency.of(None if options.needs_alone(decode) else choice.chosen[0], decode)

        selection.disaggregation = Disaggregation(choice.prefill, choice.reason, inputs, predict, ruled_out)
        if slo is not None:
            selection.slo_missed_by = prediction.slo_missed_by(slo, now, request.output_tokens)
        if slo is not None or now >= self._learned.predictions.due:
            selection.prediction = prediction
        return selection

    def _select_one(
        self, found: CandidateSet, prompt: RoutedRequest, request: Request, phase: Phase
    ) -> Selection | None:
        """Return the selection of one worker; None if a policy of one's own excludes all of them."""
        decision = decide(self._custom, self._policy, found, prompt, request, phase)
        return None if decision is None else found.select(decision)

    def _select_whole(
        self,
        adapter: type[Adapter],
        found: CandidateSet,
        prompt: RoutedRequest,
        excluded: Collection[Worker],
        request: Request,
        reason: str,
    ) -> Selection | None:
        """Return the selection of a worker that computes prompt and answer; None if the request should wait for one.

        Decode workers that may compute no prompts are chosen only if no other worker can. `reason`: why the prompt
        cannot be handed over.
        """
        if adapter.decodes_alone and self._settings.decode_computes:
            return self._select_one(found, prompt, request, Phase.DECODE)
        decoding = [rank.row for rank in found.targets.ranks if rank.worker.role is Role.DECODE]
        whole = found.without(decoding)
        if whole.count:
            return self._select_one(whole, prompt, request, Phase.BOTH)
        if any(worker.role is Role.BOTH and worker not in excluded for worker in found.targets.workers):
            return None
        if adapter.decodes_alone:
            return self._select_one(found, prompt, request, Phase.DECODE)
        raise RequestError(
            f"No worker of this model computes prompt and answer, and {reason}.", code="not_disaggregated"
        )

    def _choose(
        self, options: PairOptions, request: Request, latency: PairLatency, slo: SLO | None, now: float
    ) -> PairChoice:
        """Return the choice of the policy's rule. The default's counts missed SLOs if its first choice misses any."""
        predictions = self._learned.predictions
        if slo is not None:
            predictions.track_slos()
        usual = self._choose_pair(options, request)
        if not predictions.tracks_slos or not isinstance(self._choose_pair, PairCost):
            return usual
        weighed = slo or NO_SLO
        if latency.of(*usual.chosen).loss(weighed, now) <= LITTLE:
            return usual
        slo_cost = latency.slo_cost(weighed, usual.decode.unit, self._slo_miss_cost, now)
        return self._choose_pair(replace(options, slo_cost=slo_cost), request)

    def _with_functions(
        self,
        custom: CustomPolicy,
        usual: PairChoice,
        options: PairOptions,
        found: CandidateSet,
        prefills: CandidateSet,
        prompt: RoutedRequest,
        request: Request,
    ) -> PairChoice | None:
        """Return the choice with functions of one's own for both roles; None if they exclude all decode workers."""
        decode = decide(custom, lambda _, __: usual.decode, found, prompt, request, Phase.DECODE)
        if decode is None:
            return None
        choice = usual
        if decode.chosen is not usual.decode.chosen:
            choice = self._choose_pair(replace(options, decodes=[decode.chosen]), request)
        prefill, reason = choice.prefill, choice.reason
        if prefill is not None:
            chosen = prefill
            prefill = decide(custom, lambda _, __: chosen, prefills, prompt, request, Phase.PREFILL)
            reason = reason if prefill is not None else "the policy allows no prefill worker"
        return PairChoice(decode, prefill, reason, choice.inputs)

    def need_prefill(self, workers: Sequence[Worker], prompt: RoutedRequest) -> bool:
        """Return whether all of these workers need another worker to compute a prompt."""
        adapters = [self.adapter_of(worker) if worker.role is Role.DECODE else None for worker in workers]
        return all(each and not each.decodes_alone and not _not_handed_over(each, prompt) for each in adapters)

    def adapter_of(self, worker: Worker) -> type[Adapter] | None:
        """Return the adapter of a decode worker; None if no adapter is known for its engine."""
        backend = self._settings.backend
        if backend is not Backend.AUTO:
            return ADAPTERS[backend]
        return _ADAPTER_OF_ENGINE.get(worker.description.engine) if worker.description else None


def _not_handed_over(adapter: type[Adapter], prompt: RoutedRequest) -> str:
    """Return why a prompt cannot be handed over between two workers, in words; empty if it can be.

    Only the KV cache of one prompt, for one answer, can be moved. Only the worker that created a response knows it.
    """
    if prompt.path not in adapter.paths:
        return f"its engine hands over no prompts of {prompt.path}"
    if prompt.stored is not None:
        return "only the worker with an earlier response knows it: send the whole input"
    if adapter.one_answer and len(prompt.identities) * prompt.answers > 1:
        return "only one prompt for one answer can be handed over"
    return ""
