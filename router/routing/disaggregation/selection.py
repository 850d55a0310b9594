"""The selection in a fleet with prefill workers and decode workers.

    decode   the least loaded worker; its cached tokens decide only between equal loads
    remote   another worker computes the prompt, with two exceptions. The decode worker is free and has little left to
             compute: uncached < skip_tokens and uncached / prompt < skip_ratio. Or the decode worker is free, and all
             prefill workers are saturated.
    prefill  the worker with the lowest sum of queued prefill tokens, uncached tokens of the prompt, and loads of it

Tokens that a worker loads from a pool or pulls from a peer count as uncached at the price of the load. Cached tokens
count alike on all tiers. A decode worker whose load is not known does not count as free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Any

from router.fleet.discovery import Engine
from router.fleet.worker import Worker
from router.policies import Candidate, Decision, NamedPolicy, Policy, Request
from router.policies.interface import Phase
from router.policies.records import CostUnit, cheapest
from router.routing.assignment import Disaggregation, Selection
from router.routing.candidates import CandidateFinder, CandidateSet
from router.routing.custom_choice import decide
from router.routing.disaggregation.adapters import ADAPTERS, Adapter, Nixl, Sglang
from router.routing.prompt_reader import RoutedPrompt
from router.routing.ranks import NO_LIMITS
from router.routing.target_directory import unavailable
from router.settings import Backend, DisaggregationSettings, Role

# A weight below one half, so that it decides only between workers with the same number of requests.
_TIE = 0.4


def decode_policy(random: Random) -> Policy:
    """Return the policy that chooses the least loaded candidate. `random` breaks ties."""

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        most = max(candidate.context for candidate in candidates) + 1

        def terms(candidate: Candidate) -> dict[str, float]:
            return {
                "requests": float(candidate.requests),
                "context": _TIE * candidate.context / most,
                "uncached": _TIE * (candidate.work(request.tokens) + 1) / (request.tokens + 1),
            }

        return cheapest(candidates, terms, random, unit=CostUnit.REQUESTS)

    return choose


def prefill_policy(random: Random) -> Policy:
    """Return the policy that chooses the candidate with the fewest tokens to compute. `random` breaks ties."""

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        def terms(candidate: Candidate) -> dict[str, float]:
            return {
                "queued": float(candidate.pending),
                "prefill": float(max(request.tokens - candidate.reused, 0)),
                **({} if candidate.source is None else {"load": candidate.source.load}),
            }

        return cheapest(candidates, terms, random)

    return choose


def disaggregate(
    decode: Candidate,
    prefills: list[Candidate],
    request: Request,
    policy: Callable[[list[Candidate], Request], Decision | None],
    settings: DisaggregationSettings,
    decodes_alone: bool,
) -> Disaggregation:
    """Decide whether another worker than the chosen decode worker computes a prompt, and which of `prefills`.

    `policy`: chooses the prefill worker; None if it allows none.
    """
    uncached = round(decode.work(request.tokens))
    free = decode.kv_usage is not None and not decode.waiting and decode.pending < settings.skip_tokens
    saturated = all(candidate.pending >= settings.saturated_tokens for candidate in prefills)
    inputs: dict[str, Any] = {
        "tokens": request.tokens,
        "uncached": uncached,
        "decode_pending": decode.pending,
        "decode_waiting": decode.waiting,
        "decode_load_known": decode.kv_usage is not None,
        "prefill_workers_saturated": saturated,
    }
    if not prefills:
        return Disaggregation(None, "no prefill worker is left", inputs)
    if decodes_alone and free:
        short = uncached < settings.skip_tokens
        if short and (not request.tokens or uncached / request.tokens < settings.skip_ratio):
            return Disaggregation(None, "little is left to compute", inputs)
        if saturated:
            return Disaggregation(None, "all prefill workers are saturated", inputs)
    prefill = policy(prefills, request)
    return Disaggregation(prefill, "the policy allows no prefill worker" if prefill is None else "remote", inputs)


_ADAPTER_OF_ENGINE: dict[Engine, type[Adapter]] = {Engine.SGLANG: Sglang, Engine.VLLM: Nixl}


class DisaggregatedSelector:
    """Selects a decode worker, and a prefill worker if it reduces the work of the decode worker."""

    def __init__(
        self, candidates: CandidateFinder, policy: NamedPolicy, settings: DisaggregationSettings, random: Random
    ) -> None:
        """Create a selector. Models without decode workers use the router's policy alone."""
        self._candidates = candidates
        self._policy = policy.choose
        self._custom = policy.custom
        self._settings = settings
        self._decode_policy = decode_policy(random)
        self._prefill_policy = prefill_policy(random)

    def select(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], found: CandidateSet, request: Request, now: float
    ) -> Selection | None:
        """Return the selection among candidates; None if a policy of one's own excludes all of them.

        Raises RequestError (503) if the needed prefill worker is missing.
        """
        decodes = any(found.rank_of(candidate).worker.role is Role.DECODE for candidate in found.candidates)
        usual, phase = (self._decode_policy, Phase.DECODE) if decodes else (self._policy, Phase.BOTH)
        decision = decide(self._custom, usual, found, prompt, request, phase)
        if decision is None:
            return None
        selection = found.select(decision)
        if not decodes:
            return selection
        adapter = self.adapter_of(selection.worker)
        if selection.worker.role is not Role.DECODE or adapter is None or prompt.path not in adapter.paths:
            return selection
        if adapter.one_answer and len(prompt.identities) * prompt.answers > 1:
            return selection  # only the KV cache of one prompt can be handed over
        prefills = self._candidates.find(prompt, excluded, NO_LIMITS, now, prefill=True, pulls=adapter.pulls)
        disaggregation = disaggregate(
            selection.decision.chosen,
            prefills.candidates,
            request,
            lambda _, request: decide(self._custom, self._prefill_policy, prefills, prompt, request, Phase.PREFILL),
            self._settings,
            adapter.decodes_alone,
        )
        if disaggregation.prefill is not None:
            selection.prefill = prefills.select(disaggregation.prefill)
        elif not adapter.decodes_alone:
            raise unavailable("No prefill worker can be reached, and the decode workers compute no prompts.")
        selection.disaggregation = disaggregation
        return selection

    def need_prefill(self, workers: Sequence[Worker], prompt: RoutedPrompt) -> bool:
        """Return whether all of these workers need another worker to compute a prompt."""
        adapters = [self.adapter_of(worker) if worker.role is Role.DECODE else None for worker in workers]
        return all(each and not each.decodes_alone and prompt.path in each.paths for each in adapters)

    def adapter_of(self, worker: Worker) -> type[Adapter] | None:
        """Return the adapter of a decode worker; None if no adapter is known for its engine."""
        backend = self._settings.backend
        if backend is not Backend.AUTO:
            return ADAPTERS[backend]
        return _ADAPTER_OF_ENGINE.get(worker.description.engine) if worker.description else None
