"""The selection for a request that was promised something: a target that keeps the promise, as the policy likes them.

The policy's own choice is nearly always one that keeps it. Only where it is not, what every other candidate would take
is predicted.
"""

from __future__ import annotations

from random import Random

from router.learning.learned import Learned
from router.policies import Candidate, Decision, Policy, Request
from router.policies.promises import Forecast, Promise, choose_for_promise
from router.routing.candidates import CandidateSet
from router.routing.routable_rank import RoutableRank
from router.routing.routed_prompt import RoutedPrompt
from router.routing.selection import Selection
from router.sharing import PeerLoad


class PromisedSelector:
    """Predicts what candidates would take, and selects by that. `policy`: the router's own."""

    def __init__(self, learned: Learned, peer_load: PeerLoad, policy: Policy, random: Random) -> None:
        self._forecasts = learned.forecasts
        self._outputs = learned.outputs
        self._peer_load = peer_load
        self._policy = policy
        self._random = random

    def select(
        self, found: CandidateSet, usual: Selection, prompt: RoutedPrompt, request: Request, promise: Promise, now: float
    ) -> Selection:
        """The selection; `usual` is what it would be without a promise."""
        output = request.output_tokens
        forecast = self.forecast(usual.rank, usual.decision.chosen, prompt)
        late = forecast.late(promise, now, output)
        if late > 0 and found.count > 1:
            decision = usual.decision
            candidates = decision.candidates
            chosen, late = choose_for_promise(
                self._policy,
                candidates,
                lambda each: self.forecast(found.rank_of(each), each, prompt).late(promise, now, output),
                request,
                self._random,
            )
            if chosen is not decision.chosen:
                usual = found.select(Decision(chosen, candidates, decision.terms, unit=decision.unit))
                forecast = self.forecast(usual.rank, chosen, prompt)
        usual.promise, usual.forecast, usual.late = promise, forecast, late
        return usual

    def forecast(self, rank: RoutableRank, candidate: Candidate, prompt: RoutedPrompt) -> Forecast:
        """What a candidate is predicted to take for a prompt that is sent now."""
        worker, dp_rank = rank.target.worker, rank.target.dp_rank
        backlog = rank.load.backlog + self._peer_load.backlog(worker, dp_rank)
        output = self._outputs.expected(rank.served.model, prompt.max_tokens) * prompt.answers
        return self._forecasts.of(candidate, prompt.tokens, output, backlog)
