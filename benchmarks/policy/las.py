"""llm-d's least attained service: programs take turns while its flow control holds requests.

The program with the best score is next:

    score    0.8 · (1 - service) + 0.2 · wait, both scaled to the range of the waiting programs
    service  prompt tokens + 2 · answer tokens of its answered calls, halved each 60 s in which it makes no call

Sources: llm-d/llm-d-router, pkg/epp/framework/plugins/flowcontrol/fairness/program-aware: strategy_las.go at 6626b83c,
and the half-life of README.md at d03a307c.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import ClassVar, Final

from benchmarks.overload.rivals import HeldRequest, LlmD, Utilization
from benchmarks.policy.rivals.llm_d import METRICS_INTERVAL
from router.admission.ticket import Ticket
from router.apis.requests import RoutedRequest
from router.fleet.worker import Worker
from router.routing.assignment import Assignment
from router.settings import PolicyName
from simulator.fleet.trace import TracedRequest

_SERVICE_WEIGHT: Final = 0.8
_WAIT_WEIGHT: Final = 0.2
_ANSWER_WEIGHT: Final = 2
_HALF_LIFE: Final = 60.0
# A client without a Retry-After arrives again by the longest back-off of OpenAI's library.
_AGAIN: Final = 8


class LeastService(Utilization):
    """llm-d's flow control, in which the program with the least service is next. Calls without a session are one."""

    retry_after: ClassVar[int | None] = _AGAIN

    def begin(self) -> None:
        super().begin()
        self._outputs: dict[int, int] = {}  # by the identity of a prompt
        self._service: dict[str, float] = {}
        self._ended_at: dict[str, float] = {}
        self._calls: Counter[str] = Counter()  # waiting or in flight

    def arrives(self, request: TracedRequest, prompt: RoutedRequest) -> None:
        """Receive the request that is placed next."""
        program = prompt.session or ""
        if not self._calls[program] and program in self._service:
            self._service[program] *= 0.5 ** ((self._clock() - self._ended_at[program]) / _HALF_LIFE)
        self._outputs[id(prompt)] = request.output_tokens

    def place(
        self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket, now: float | None = None
    ) -> Assignment | None:
        placed = super().place(prompt, tried, ticket, now)
        return None if placed is None else self._counted(prompt, placed)

    async def wait(self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket) -> Assignment:
        return self._counted(prompt, await super().wait(prompt, tried, ticket))

    def _counted(self, prompt: RoutedRequest, assignment: Assignment) -> Assignment:
        program = prompt.session or ""
        self._calls[program] += 1
        service = prompt.tokens + _ANSWER_WEIGHT * self._outputs.pop(id(prompt))
        assignment.on_release.append(partial(self._answered, program, service))
        return assignment

    def _answered(self, program: str, service: int, failed: bool = False) -> None:  # noqa: ARG002
        self._calls[program] -= 1
        self._service[program] = self._service.get(program, 0.0) + service
        self._ended_at[program] = self._clock()

    def chosen(self, first: HeldRequest) -> HeldRequest:  # noqa: ARG002
        """Return the call of the program with the best score."""
        waiting, now = self.waiting(), self._clock()
        services = _scaled([self._service.get(each.prompt.session or "", 0.0) for each in waiting])
        waits = _scaled([now - each.since for each in waiting])
        scores = [
            _SERVICE_WEIGHT * (1 - service) + _WAIT_WEIGHT * wait for service, wait in zip(services, waits, strict=True)
        ]
        return waiting[scores.index(max(scores))]


class LeastServiceSide(LlmD):
    """llm-d's scores behind its flow control, where programs take turns."""

    queue: ClassVar[type[Utilization]] = LeastService


LEAST_SERVICE = LeastServiceSide(
    "llm-d, least service", PolicyName.KV_AWARE, metrics_interval=METRICS_INTERVAL, rule="llm_d"
)


def _scaled(values: Sequence[float]) -> list[float]:
    """Return values as shares of their range; 0 for all if they are equal."""
    least = min(values)
    span = max(values) - least
    return [(value - least) / span if span else 0.0 for value in values]
