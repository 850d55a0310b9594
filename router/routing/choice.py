"""What can be chosen for a request, and what was."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.disaggregation.decision import Disaggregation
from router.fleet.worker import Worker
from router.policies import Candidate, Decision


class Option(NamedTuple):
    """A target that could take a request, and the prefix hashes of the prompts it would get.

    `by_events`: the overlap by events and prompts in flight, whether or not it is the one used.
    """

    candidate: Candidate
    worker: Worker
    hashes: list[array[int]]
    by_events: int


@dataclass(slots=True)
class Choice:
    """A decision that nothing has been reserved for yet.

    `disaggregation`: whether another worker computes the prompt, where the choice is a decode worker; `prefill` is the
    choice of that.
    """

    decision: Decision
    options: Sequence[Option]
    chosen: Option
    disaggregation: Disaggregation | None = None
    prefill: Choice | None = None

    @classmethod
    def of(cls, decision: Decision, options: Sequence[Option]) -> Choice:
        """A decision for the candidate of one of these options."""
        for option in options:
            if option.candidate is decision.choice:
                return cls(decision, options, option)
        raise ValueError("a policy must choose one of its candidates")

    @property
    def worker(self) -> Worker:
        return self.chosen.worker
