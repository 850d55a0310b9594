"""Where a request goes, and what is held for it there until it ends."""

from __future__ import annotations

from typing import Protocol

from indexer import Target
from router.apis.usage import Usage
from router.fleet.health import Attempt, Outcome
from router.fleet.load import Reservation
from router.fleet.worker import Worker
from router.holdings.audit import Prediction
from router.holdings.speculation import Ending
from router.learning.learned import RequestTiming
from router.routing.routed_prompt import RoutedPrompt
from router.routing.selection import Selection


class RequestSampler(Protocol):
    """Looks at some of the requests: at the next that is placed when one is `due`, in seconds of `time.monotonic`."""

    @property
    def due(self) -> float: ...

    def placed(self, prompt: RoutedPrompt, assignment: Assignment) -> SampledRequest | None:
        """A request was placed. Who wants to know what becomes of it, if anybody does."""


class SampledRequest(Protocol):
    """Is told what becomes of a request."""

    def first_byte(self) -> None:
        """Its answer began."""

    def answered(self, usage: Usage | None) -> None:
        """It was answered in full."""


class Assignment:
    """Where a request goes, and its share of that target's load until `release`.

    `held`: whether its prompts count as held soon where it goes. `now`: the time, where it was just read.
    """

    def __init__(self, chosen: Selection, reservation: Reservation, attempt: Attempt) -> None:
        self.worker: Worker = chosen.rank.worker
        self.target: Target = chosen.rank.target
        self.chosen = chosen
        self.decision = chosen.decision
        self.held = False
        self.reservation = reservation
        self.attempt = attempt
        self.prediction: Prediction | None = None  # where its prompts are known
        self.timing: RequestTiming | None = None
        self.seen: SampledRequest | None = None
        self.prefill: Assignment | None = None  # where the prompt is computed, if that is another worker
        self._endings: list[Ending] | None = None

    @property
    def overlap(self) -> int:
        """Tokens of the prompt that the target is expected to serve from its cache."""
        return self.decision.choice.overlap

    @property
    def wants_usage(self) -> bool:
        """Whether anything is learned from what the answer says of its tokens."""
        return self.timing is not None or self.seen is not None or self.prediction is not None

    def first_byte(self, now: float | None = None) -> None:
        """The answer began."""
        self.reservation.first_byte(now)
        if self.timing:
            self.timing.first_byte()
        if self.seen:
            self.seen.first_byte()

    def when_released(self, ending: Ending) -> None:
        """Have this called, too, when the request ended."""
        if self._endings is None:
            self._endings = []
        self._endings.append(ending)

    def release(self, now: float | None = None) -> None:
        """The request ended, however it did. Only the first call counts."""
        self.reservation.release(now)
        if not self.attempt.ended:
            self.attempt.end(Outcome.NEITHER, now=now)
        endings = self._endings
        if endings is not None:
            self._endings = None
            for ending in endings:
                ending(self.attempt.failed)
        if self.prefill is not None:
            self.prefill.release(now)
