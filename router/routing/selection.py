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
    the selection of that. `promise`: what the request was promised; `forecast`: what is predicted of it there; `late`:
    the seconds by which it is then late.
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
        late: float = 0.0,
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
        self.late = late

    @property
    def worker(self) -> Worker:
        return self.rank.worker
