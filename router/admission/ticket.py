"""A request's urgency, as it is read and while it waits: its priority, its deadline, its SLO and its hints.

    x-kvrouter-priority               an integer, lower is sooner; overrides the body's `priority`
    x-request-timeout                 seconds until the whole answer is due
    x-envoy-expected-rq-timeout-ms    milliseconds until the whole answer is due, set by an Envoy before the router
    x-stainless-read-timeout,
    x-stainless-timeout               seconds that OpenAI's and Anthropic's clients wait for a byte

The second and the third set a deadline, at which the answer ends. The last two are the read timeouts of clients, which
close the connection then. A proxy in between may hide that, so the request is not sent after this time. An answer that
has started continues. `grpc-timeout` is not read, because it belongs to gRPC calls. `service_levels` reads SLOs, and
`router/apis/agent_hints.py` reads hints.

A `WaitingRequest` is a request that waits in the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum

from http_api.errors import RequestError
from router.admission.fair_queue import Waiting
from router.apis.agent_hints import HINT_HEADERS, AgentHints, hints_in_headers
from router.apis.requests import RoutedRequest
from router.fleet.worker import Worker
from router.http.headers import HeaderItems, Headers, number_of
from router.prediction.service_levels import SLO_HEADERS, ServiceLevels, read_slo
from router.prediction.slo import SLO
from router.programs import Call
from router.routing.assignment import Assignment
from router.routing.late_binding import PREFILL_WEIGHT, held_order, slo_order
from router.routing.ranks import RoutableRank

PRIORITY_HEADER = b"x-kvrouter-priority"
TIMEOUT_HEADER = b"x-request-timeout"
_ENVOY_TIMEOUT_HEADER = b"x-envoy-expected-rq-timeout-ms"
_READ_TIMEOUT_HEADERS = frozenset({b"x-stainless-read-timeout", b"x-stainless-timeout"})
_HEADERS = _READ_TIMEOUT_HEADERS | SLO_HEADERS | HINT_HEADERS | {PRIORITY_HEADER, TIMEOUT_HEADER, _ENVOY_TIMEOUT_HEADER}

# Longer timeouts count as no timeout.
_LONGEST_TIMEOUT = 7 * 86400.0
_MOST_PRIORITY = 2**31


@dataclass(frozen=True, slots=True)
class Flow:
    """A gateway's flow of requests: `name` has its own turns in the queue, as a tenant has. See `Ticket.sheddable`."""

    name: str = ""
    sheddable: bool = False


@dataclass(slots=True, init=False)
class Ticket:
    """The claim of a request to be placed. Times are of `time.monotonic`.

    - `priority`: lower is sooner.
    - `deadline`: when the whole answer is due; None: any time.
    - `arrived`: when the request was complete.
    - `place_by`: the latest time to send it, at most `deadline`; None: any time.
    - `cold_until`: when it stops waiting for a worker; None before it first waits for one.
    - `sheddable`: whether it is refused where it would wait for capacity.
    - `waited`: the seconds for which it waited in the queue before its last place.
    - `charged`: whether its tenant was charged for its last place.
    - `call`: its call of a session; None if it names none.
    """

    priority: int
    tenant: str
    deadline: float | None
    tokens: int
    size: int
    arrived: float
    place_by: float | None
    slo: SLO | None
    hints: AgentHints | None
    cold_until: float | None
    sheddable: bool
    waited: float
    charged: bool
    call: Call | None

    def __init__(
        self,
        priority: int = 0,
        tenant: str = "",
        deadline: float | None = None,
        tokens: int = 0,
        size: int = 0,
        arrived: float = 0.0,
        place_by: float | None = None,
        slo: SLO | None = None,
        hints: AgentHints | None = None,
    ) -> None:
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        self.tokens = tokens
        self.size = size
        self.arrived = arrived
        self.place_by = place_by
        self.slo = slo
        self.hints = hints
        self.cold_until = None
        self.sheddable = False
        self.waited = 0.0
        self.charged = False
        self.call = None

    def left(self, now: float) -> float | None:
        """Return the seconds until the answer is due; None if it has no deadline."""
        return None if self.deadline is None else max(self.deadline - now, 0.0)


def urgent(headers: HeaderItems) -> Headers:
    """Return the headers that set a request's urgency, SLO and hints."""
    return [header for header in headers if header[0] in _HEADERS]


def read_ticket(
    headers: HeaderItems,
    priority: int,
    *,
    tenant: str = "",
    best_priority: int | None = None,
    tokens: int = 0,
    size: int = 0,
    service_levels: ServiceLevels | None = None,
    model: str | None = None,
    arrived: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Ticket:
    """Return the ticket of a complete request. Raises RequestError (400), which names the invalid header.

    - `best_priority`: the best priority that its tenant may use, and its default; None: any priority.
    - `arrived`: when it was complete, by `clock`; None: now.
    """
    now = clock()
    priority = priority or best_priority or 0
    if best_priority is None and not headers and service_levels is None:  # the usual case
        return Ticket(priority, tenant, None, tokens, size, now)
    deadlines: list[float] = []
    read_timeouts: list[float] = []
    for name, value in headers:
        if name == PRIORITY_HEADER:
            priority = _priority(value)
        elif name == TIMEOUT_HEADER:
            seconds = _number(value)
            if seconds is None or seconds <= 0:
                raise RequestError(
                    f"{_text(name)} is {_text(value)!r}. Send seconds above 0, or leave it out.", param=_text(name)
                )
            deadlines.append(now + seconds)
        elif name == _ENVOY_TIMEOUT_HEADER:
            milliseconds = _number(value)
            if milliseconds:  # 0: no timeout
                deadlines.append(now + milliseconds / 1000)
        elif name in _READ_TIMEOUT_HEADERS and (seconds := _number(value)):
            read_timeouts.append(now + seconds)
    slo = read_slo(headers, service_levels, tenant, model, now if arrived is None else arrived)
    if best_priority is not None:
        priority = max(priority, best_priority)
    deadline = min(deadlines) if deadlines else None
    place_by = min([*deadlines, *read_timeouts]) if deadlines or read_timeouts else None
    return Ticket(priority, tenant, deadline, tokens, size, now, place_by, slo, hints_in_headers(headers))


def deadline_error() -> RequestError:
    """Return the error of a request whose deadline has passed: 504."""
    return RequestError(
        "The deadline of the request has passed. Allow it more time, or try again later.",
        status=504,
        type="timeout_error",
        code="deadline_exceeded",
    )


def _priority(value: bytes) -> int:
    try:
        priority = int(value)
    except ValueError:
        priority = _MOST_PRIORITY + 1
    if abs(priority) > _MOST_PRIORITY:
        name = _text(PRIORITY_HEADER)
        raise RequestError(f"{name} is {_text(value)!r}. Send an integer; lower is sooner, 0 is usual.", param=name)
    return priority


def _number(value: bytes) -> float | None:
    """Return a number of at least 0; None for other values, and for numbers above a week in milliseconds."""
    number = number_of(value)
    return number if number is not None and number <= _LONGEST_TIMEOUT * 1000 else None


def _text(value: bytes) -> str:
    return value.decode("latin-1")


class WaitReason(StrEnum):
    """The reason why a request waits.

    - `SATURATED`: all targets are at their limits.
    - `LATE_BINDING`: its target is busy with prefills.
    - `NO_WORKER`: its model has no worker.
    - `WORKING_SET`: its session has no room beside the contexts of live sessions.
    """

    SATURATED = "saturated"
    LATE_BINDING = "late_binding"
    NO_WORKER = "no_worker"
    WORKING_SET = "working_set"


@dataclass(slots=True, eq=False)
class WaitingRequest(Waiting):
    """A waiting request, and the future that its proxy waits on.

    - `tried`: workers that may not receive it.
    - `held_for`: the busy target that late binding last held it for; None if it waits for another reason.
    """

    prompt: RoutedRequest = field(kw_only=True)
    tried: Collection[Worker] = field(kw_only=True)
    ticket: Ticket = field(kw_only=True)
    reason: WaitReason = field(kw_only=True)
    assignment: asyncio.Future[Assignment] = field(kw_only=True)
    since: float = field(kw_only=True)
    prefill: float = field(kw_only=True)
    timer: asyncio.TimerHandle | None = None
    until_deadline: bool = False
    ttft_missed: bool = False
    held_for: RoutableRank | None = None

    def is_over(self, now: float) -> bool:
        """Return whether its deadline has passed."""
        return self.ticket.place_by is not None and now >= self.ticket.place_by


def queue_order(prefill: float, ticket: Ticket, ttft_missed: bool, now: float, weight: float = PREFILL_WEIGHT) -> float:
    """Return a request's position in its group, lowest first. `prefill`: the predicted seconds of its prefill."""
    slo = ticket.slo
    if slo is None or slo.first_token_by is None:
        return held_order(ticket.arrived or now, prefill, weight)
    return held_order(now, prefill) if ttft_missed else slo_order(slo.first_token_by, prefill)
