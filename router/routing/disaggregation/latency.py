"""The predicted latency of pairs for one request: TTFT at the prefill worker and in the transfer, TPOT at decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from router.policies import Candidate, Request
from router.policies.records import CostUnit
from router.prediction.slo import SLO, Prediction, miss_cost
from router.routing.candidates import CandidateSet
from router.routing.ranks import RoutableRank
from router.routing.state import RoutingState

# The cost of an option that misses the SLO of a request which is refused rather than served late.
_REFUSED: Final = 1e9


class PairLatency:
    """Predicts the latency of a request on pairs of candidates, and on decode workers alone."""

    def __init__(
        self,
        state: RoutingState,
        found: CandidateSet,
        prefills: CandidateSet,
        request: Request,
        encoding: float,
    ) -> None:
        """Create the predictor of one request.

        - `found`, `prefills`: its decode workers, and its prefill workers.
        - `encoding`: the predicted seconds until its media are encoded.
        """
        self._predictions = state.learned.predictions
        self._turns = state.learned.turns
        self._transfers = state.transfers
        self._peer_load = state.sharing.peer_load
        self._found = found
        self._prefills = prefills
        self._request = request
        self._encoding = encoding

    def of(self, prefill: Candidate | None, decode: Candidate) -> Prediction:
        """Return the predicted latency on a pair. Without `prefill`, the decode worker computes the prompt."""
        tokens, output = self._request.tokens, self._request.output_tokens
        rank = self._found.rank_of(decode)
        if prefill is None:
            return self._predictions.of(decode, tokens, output, self._backlog(rank))
        moved = max(tokens - decode.overlap, 0)
        transfer = self._transfers.seconds(prefill.target, decode.target, moved)
        backlog = self._backlog(self._prefills.rank_of(prefill))
        after = transfer + self._transfers.step_seconds(rank)
        return self._predictions.of_pair(prefill, decode, tokens, output, backlog, after)

    def slo_cost(
        self, slo: SLO, unit: CostUnit, slo_miss_cost: float, now: float
    ) -> Callable[[Candidate | None, Candidate], float]:
        """Return the function that prices the SLOs that an option would miss, in a unit of costs."""
        turns = self._turns.expected(self._found.rank_of(self._found.candidates[0]).target.model)
        price = miss_cost(unit, slo, slo_miss_cost, turns) or 0.0

        def cost(prefill: Candidate | None, decode: Candidate) -> float:
            prediction = self.of(prefill, decode)
            refused = slo.refuses_late and prediction.slo_missed_by(slo, now, 1.0) > 0
            return price * prediction.loss(slo, now) + (_REFUSED if refused else 0.0)

        return cost

    def _backlog(self, rank: RoutableRank) -> float:
        """Return the seconds until a target can begin the prompt. Media are encoded while it computes others."""
        backlog = rank.load.backlog + self._peer_load.backlog(rank.target.worker, rank.target.dp_rank)
        return max(backlog, self._encoding)
