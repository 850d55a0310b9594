"""What a request says of its urgency: its priority, until when an answer is of use, and what it is promised.

| header | unit | means |
|---|---|---|
| `x-kvrouter-priority` | an integer, lower is sooner | goes before the body's `priority` |
| `x-request-timeout` | seconds | the whole answer is of use for so long |
| `x-envoy-expected-rq-timeout-ms` | milliseconds | the same: what an Envoy before the router allows for the answer |
| `x-stainless-read-timeout`, `x-stainless-timeout` | seconds | how long those clients wait for a byte |

The first two are a deadline of the answer: it is cut off there. The last ones are those of OpenAI's and Anthropic's
clients, which give up when nothing has come for so long. They hang up then, but a proxy between may hide it. After it
a request is not sent any more, and an answer that has begun goes on. `grpc-timeout` belongs to gRPC calls, of which
there are none here. What a request is promised is read in `service_levels`, what agents tell in `agent_hints`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from http_api.errors import RequestError
from router.apis.sessions import HINT_HEADERS, AgentHints, hints_in_headers
from router.http.headers import HeaderItems, Headers, number_of
from router.prediction.service_levels import SLO_HEADERS, ServiceLevels, read_slo
from router.prediction.slo import SLO

PRIORITY_HEADER = b"x-kvrouter-priority"
TIMEOUT_HEADER = b"x-request-timeout"
_ENVOY_TIMEOUT_HEADER = b"x-envoy-expected-rq-timeout-ms"
_READ_TIMEOUT_HEADERS = frozenset({b"x-stainless-read-timeout", b"x-stainless-timeout"})
_HEADERS = _READ_TIMEOUT_HEADERS | SLO_HEADERS | HINT_HEADERS | {PRIORITY_HEADER, TIMEOUT_HEADER, _ENVOY_TIMEOUT_HEADER}

# Longer ones are none.
_LONGEST_TIMEOUT = 7 * 86400.0
_MOST_PRIORITY = 2**31


@dataclass(slots=True)
class Ticket:
    """The claim of a request to be placed. Times are of `time.monotonic`.

    - `priority`: lower is sooner.
    - `deadline`: when the whole answer is due; None: never.
    - `tokens`: the tokens of its prompts.
    - `size`: the bytes of its body.
    - `arrived`: when the request was complete.
    - `place_by`: when sending it is of no more use, at `deadline` at the latest; None: never.
    - `slo`: its service-level objective; None for most requests.
    - `hints`: what its headers announce of the answer and the session.
    - `cold_until`: when it stops to wait for a worker; None before it first waits for one.
    """

    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    tokens: int = 0
    size: int = 0
    arrived: float = 0.0
    place_by: float | None = None
    slo: SLO | None = None
    hints: AgentHints | None = None
    cold_until: float | None = None

    def left(self, now: float) -> float | None:
        """Return the seconds until the answer is due; None if it has no deadline."""
        return None if self.deadline is None else max(self.deadline - now, 0.0)


def urgent(headers: HeaderItems) -> Headers:
    """The headers that a ticket is made of: all others are passed over."""
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
    """The ticket of a request that is complete now.

    `priority` is the body's, where 0 is none. `best_priority`: the best it may have, and what it gets without one.
    `service_levels`: the classes in the settings, if there are any; `model`: by whose name one may be found.
    `arrived`: when it was complete, where that was before now.
    Raises RequestError (400) naming the header at fault.
    """
    now = clock()
    priority = priority or best_priority or 0
    if best_priority is None and not headers and service_levels is None:  # nearly all
        return Ticket(priority, tenant, None, tokens, size, now)
    deadlines: list[float] = []
    give_up: list[float] = []
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
            give_up.append(now + seconds)
    slo = read_slo(headers, service_levels, tenant, model, now if arrived is None else arrived)
    if best_priority is not None:
        priority = max(priority, best_priority)
    deadline = min(deadlines) if deadlines else None
    place_by = min([*deadlines, *give_up]) if deadlines or give_up else None
    return Ticket(priority, tenant, deadline, tokens, size, now, place_by, slo, hints_in_headers(headers))


def deadline_error() -> RequestError:
    """What a client gets whose deadline has passed."""
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
    """A number from 0 on; None for anything else, and for one so large that it is no bound."""
    number = number_of(value)
    return number if number is not None and number <= _LONGEST_TIMEOUT * 1000 else None


def _text(value: bytes) -> str:
    return value.decode("latin-1")
