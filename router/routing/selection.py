"""What was chosen for a request."""

from __future__ import annotations

from array import array

from router.fleet.worker import Worker
from router.policies import Decision
from router.prediction.slo import SLO, Prediction
from router.routing.disaggregation.decision import Disaggregation
from router.routing.routable_rank import RoutableRank

NO_HASHES: list[array[int]] = []


class Selection:
    """A decision that nothing has been reserved for yet.

    `rank`: what was chosen; `hashes`: the chunk hashes of the request's prompts there. `by_events`: the overlap by
    events and prompts in flight, whether or not it is the one used. `best_overlap`: the most tokens that any candidate
    has. `disaggregation`: whether another worker computes the prompt, where a decode worker was chosen; `prefill` is
    the selection of that. `slo`: the request's, if it has one. `prediction`: of its latency there. `slo_missed_by`: the
    seconds by which its SLO is expected to be missed; 0 if it is met.
    """

    def __init__(
        self,
        decision: Decision,
        rank: RoutableRank,
        hashes: list[array[int]] = NO_HASHES,
        by_events: int = 0,
        best_overlap: int = 0,
        disaggregation: Disaggregation | None = None,
        prefill: Selection | None = None,
        slo: SLO | None = None,
        prediction: Prediction | None = None,
        slo_missed_by: float = 0.0,
    ) -> None:
        self.decision = decision
        self.rank = rank
        self.hashes = hashes
        self.by_events = by_events
        self.best_overlap = best_overlap
        self.disaggregation = disaggregation
        self.prefill = prefill
        self.slo = slo
        self.prediction = prediction
        self.slo_missed_by = slo_missed_by

    @property
    def slo_missed(self) -> bool:
        """Whether the request's SLO is expected to be missed there."""
        return self.slo_missed_by > 0

    @property
    def worker(self) -> Worker:
        return self.rank.worker
