"""The selection while requests have SLOs.

The policy's choice usually meets the request's SLO and makes no other request miss one. Only if it does not, the
latency of every other candidate is predicted.
"""

from __future__ import annotations

from router.load.peer_load import PeerLoad
from router.policies import Candidate, Decision
from router.prediction.learned import Learned
from router.prediction.slo import LITTLE, NO_SLO, SLO, Prediction, choose_for_slo, counts_in_prefill
from router.routing.assignment import Selection
from router.routing.candidates import CandidateSet
from router.routing.routable_rank import RoutableRank
from router.routing.routed_prompt import RoutedPrompt


class SLOSelector:
    """Selects by predicted latencies.

    - `slo_miss_cost`: the cost of a missed SLO, in prefill tokens.
    """

    def __init__(self, learned: Learned, peer_load: PeerLoad, slo_miss_cost: float) -> None:
        self._predictions = learned.predictions
        self._outputs = learned.outputs
        self._turns = learned.turns
        self._peer_load = peer_load
        self._slo_miss_cost = slo_miss_cost

    def select(self, found: CandidateSet, usual: Selection, prompt: RoutedPrompt, slo: SLO, now: float) -> Selection:
        """Return the selection for a request with an SLO. `usual`: the policy's selection without the SLO."""
        self._predictions.track_slos()
        selection, prediction = self._choose(found, usual, prompt, slo, now)
        selection.slo, selection.prediction = slo, prediction
        selection.slo_missed_by = prediction.slo_missed_by(slo, now, self._output(selection.rank, prompt))
        return selection

    def spare_others(self, found: CandidateSet, usual: Selection, prompt: RoutedPrompt, now: float) -> Selection:
        """Return the selection for a request without an SLO: not `usual` if other requests would miss theirs by it."""
        if not self._predictions.has_tpot_objective(usual.rank.target) or not counts_in_prefill(usual.decision.unit):
            return usual
        return self._choose(found, usual, prompt, NO_SLO, now)[0]

    def _choose(
        self, found: CandidateSet, usual: Selection, prompt: RoutedPrompt, slo: SLO, now: float
    ) -> tuple[Selection, Prediction]:
        prediction = self.prediction(usual.rank, usual.decision.chosen, prompt)
        if found.count <= 1 or prediction.loss(slo, now) <= LITTLE:
            return usual, prediction
        decision = usual.decision
        candidates = decision.candidates
        predictions = [self.prediction(found.rank_of(each), each, prompt) for each in candidates]
        turns = self._turns.expected(usual.rank.target.model)
        position = choose_for_slo(decision, predictions, slo, now, self._slo_miss_cost, turns)
        chosen = Decision(candidates[position], candidates, decision.terms, unit=decision.unit)
        return found.select(chosen), predictions[position]

    def prediction(self, rank: RoutableRank, candidate: Candidate, prompt: RoutedPrompt) -> Prediction:
        """Return the predicted latency of a prompt that a candidate receives now."""
        backlog = rank.load.backlog + self._peer_load.backlog(rank.target.worker, rank.target.dp_rank)
        return self._predictions.of(candidate, prompt.tokens, self._output(rank, prompt), backlog)

    def _output(self, rank: RoutableRank, prompt: RoutedPrompt) -> float:
        return self._outputs.expected(rank.served.model, prompt.max_tokens, prompt.announced_output) * prompt.answers
