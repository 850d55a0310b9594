"""The rules by which other routers hold requests beyond saturation, each with its own choice of a worker.

    llm-d        requests wait, by priority, while the workers' mean of max(queue / 5, memory / 0.8) is at least 1
    Dynamo       requests wait, by priority, while all workers have more than 16 engine steps to compute
    vllm-router  requests wait while 32,768 are in flight, and at most 100 wait

Each rule is written from its public source. A comment names repository, file and commit. docs/policy-benchmarks.md
lists them, and what each of them reads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from statistics import mean
from typing import ClassVar, Final

from benchmarks.policy.rivals import RivalSide, rival
from benchmarks.policy.rivals.llm_d import METRICS_INTERVAL
from http_api.errors import RequestError
from router.admission.admission import Admission
from router.admission.ticket import Ticket
from router.apis.requests import RoutedRequest
from router.fleet.engine_metrics import EngineView
from router.fleet.worker import Worker
from router.policies import NamedPolicy
from router.routing.assignment import Assignment
from router.settings import PolicyName
from simulator.fleet.simulated_router import Side

# llm-d/llm-d-router, pkg/epp/framework/plugins/flowcontrol/saturationdetector/utilization at 39142fb9: the defaults of
# queueDepthThreshold and kvCacheUtilThreshold.
_QUEUE_DEPTH: Final = 5
_KV_USAGE: Final = 0.8
# vllm-project/router, src/main.rs at 03e9af5c: the default of max_concurrent_requests.
_IN_FLIGHT: Final = 32_768


@dataclass(slots=True)
class HeldRequest:
    """A request that waits since a time."""

    prompt: RoutedRequest
    tried: Collection[Worker]
    ticket: Ticket
    since: float
    assignment: asyncio.Future[Assignment]


class HeldQueue(Admission):
    """A queue in which requests wait, in their order, while none may be sent.

    - `most`: the waiting requests from which more are refused. `longest`: the seconds after which one is refused, with
      `late_status`.
    - `by_priority`: whether the highest priority is first. Then `most` holds for each priority.
    - `interval`: the least seconds between two requests of the queue that are sent.
    - `retry_after`: the seconds after which a refused client tries again; None: its answer does not say.
    """

    most: ClassVar[int]
    longest: ClassVar[float] = 60.0
    late_status: ClassVar[int]
    by_priority: ClassVar[bool]
    interval: ClassVar[float] = 0.0
    retry_after: ClassVar[int | None] = None

    def begin(self) -> None:
        """Begin without waiting requests."""
        self._heap: list[tuple[int, int, HeldRequest]] = []
        self._numbers = count()
        self._bands: Counter[int] = Counter()  # waiting requests by priority
        self._pause: asyncio.Handle | None = None  # until the next request may be sent

    def may_send(self, prompt: RoutedRequest) -> bool:
        """Return whether a request may be sent."""
        raise NotImplementedError

    def place(
        self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket, now: float | None = None
    ) -> Assignment | None:
        """Return a request's assignment; None if it waits."""
        if self._bands.total() or not self.may_send(prompt):
            return None
        return super().place(prompt, tried, ticket, now)

    async def wait(self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket) -> Assignment:
        """Return the assignment of a request once it may be sent. Raises RequestError."""
        band = ticket.priority if self.by_priority else 0
        if self._bands[band] >= self.most:
            raise RequestError("The queue is full.", status=429, retry_after=self.retry_after)
        loop = asyncio.get_running_loop()
        waiting = HeldRequest(prompt, tried, ticket, self._clock(), loop.create_future())
        heappush(self._heap, (band, next(self._numbers), waiting))
        self._bands[band] += 1
        timer = loop.call_later(self.longest, self._late, waiting)
        self.wake()
        try:
            return await waiting.assignment
        finally:
            self._bands[band] -= 1
            timer.cancel()

    def wake(self) -> None:
        """Send the first requests of the queue while any may be sent."""
        if self._pause is None:
            self._send()

    def _send(self) -> None:
        self._pause = None
        while self._heap:
            first = self._heap[0][2]
            if not first.assignment.done():
                if not self.may_send(first.prompt):
                    return
                chosen = self.chosen(first)
                placed = super().place(chosen.prompt, chosen.tried, chosen.ticket)
                assert placed is not None  # nothing else holds requests
                chosen.assignment.set_result(placed)
                if self.interval:
                    self._pause = asyncio.get_running_loop().call_later(self.interval, self._send)
            if first.assignment.done():
                heappop(self._heap)
            if self._pause is not None:
                return

    def chosen(self, first: HeldRequest) -> HeldRequest:
        """Return the waiting request that is sent next. `first`: the first one by priority and arrival."""
        return first

    def waiting(self) -> list[HeldRequest]:
        """Return the waiting requests."""
        return [each for _, _, each in self._heap if not each.assignment.done()]

    def _late(self, waiting: HeldRequest) -> None:
        if not waiting.assignment.done():
            error = RequestError("The wait was too long.", status=self.late_status, retry_after=self.retry_after)
            waiting.assignment.set_exception(error)


def utilization(engines: Iterable[EngineView]) -> float:
    """Return llm-d's saturation of a fleet, from the queue and the KV memory that engines report.

    An engine whose metrics are missing counts as full.
    """
    return mean(
        1.0 if each.kv_usage is None else max((each.queue or 0) / _QUEUE_DEPTH, each.kv_usage / _KV_USAGE)
        for each in engines
    )


class Utilization(HeldQueue):
    """llm-d's flow control with its utilization detector: one cycle a millisecond sends one request.

    Sources: llm-d/llm-d-router, pkg/epp/flowcontrol, controller/internal/processor.go at 097961cf; the defaults of a
    priority band are 5,000 requests, and that of defaultRequestTTL is 60 s.
    """

    most = 5000
    late_status = 429
    by_priority = True
    interval = 0.001

    def may_send(self, prompt: RoutedRequest) -> bool:
        ranks = self._selector.ranks(prompt)
        return utilization(rank.worker.metrics.get(rank.target.dp_rank) for rank in ranks) < 1.0


class InFlight(HeldQueue):
    """vllm-router's limit of requests in flight: vllm-project/router, src/middleware.rs at 1dbe5075."""

    most = 100
    late_status = 408
    by_priority = False

    def may_send(self, prompt: RoutedRequest) -> bool:
        return sum(rank.load.requests for rank in self._selector.ranks(prompt)) < _IN_FLIGHT


def _begun(admission: Admission) -> Admission:
    assert isinstance(admission, HeldQueue)
    admission.begin()
    return admission


class LlmD(RivalSide):
    """llm-d's scores behind its flow control."""

    queue: ClassVar[type[Utilization]] = Utilization

    def make_admission(self, policy: NamedPolicy, make: Callable[[type[Admission]], Admission]) -> Admission:  # noqa: ARG002
        return _begun(make(self.queue))


class VllmRouter(Side):
    """vllm-router: its default policy behind its limit of requests in flight."""

    def make_admission(self, policy: NamedPolicy, make: Callable[[type[Admission]], Admission]) -> Admission:  # noqa: ARG002
        return _begun(make(InFlight))


SIDES: Final = (
    LlmD("llm-d", PolicyName.KV_AWARE, metrics_interval=METRICS_INTERVAL, rule="llm_d"),
    rival("dynamo", "Dynamo"),
    VllmRouter("vllm-router", PolicyName.CACHE_AWARE),
)
