"""One request that waits in the queue: the reason, its position, and its time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from router.admission.fair_queue import Waiting
from router.admission.ticket import Ticket
from router.fleet.worker import Worker
from router.routing.assignment import Assignment
from router.routing.late_binding import held_order, slo_order
from router.routing.prompt_reader import RoutedPrompt


class WaitReason(StrEnum):
    """The reason why a request waits.

    - `SATURATED`: all targets are at their limits.
    - `LATE_BINDING`: its target is busy with prefills.
    - `NO_WORKER`: its model has no worker.
    """

    SATURATED = "saturated"
    LATE_BINDING = "late_binding"
    NO_WORKER = "no_worker"


@dataclass(slots=True, eq=False)
class WaitingRequest(Waiting):
    """A waiting request, and the future that its proxy waits on.

    - `tried`: the workers that may not receive it.
    - `prefill`: the predicted seconds of its prefill.
    - `ttft_missed`: whether its last selection missed the SLO's TTFT.
    """

    prompt: RoutedPrompt = field(kw_only=True)
    tried: Collection[Worker] = field(kw_only=True)
    ticket: Ticket = field(kw_only=True)
    reason: WaitReason = field(kw_only=True)
    assignment: asyncio.Future[Assignment] = field(kw_only=True)
    since: float = field(kw_only=True)
    prefill: float = field(kw_only=True)
    timer: asyncio.TimerHandle | None = None
    until_deadline: bool = False
    ttft_missed: bool = False

    def is_over(self, now: float) -> bool:
        """Return whether its deadline has passed."""
        return self.ticket.place_by is not None and now >= self.ticket.place_by


def queue_order(prefill: float, ticket: Ticket, ttft_missed: bool, now: float) -> float:
    """Return the position of a request in its group of the queue, where the lowest is first.

    - `prefill`: the predicted seconds of its prefill.
    - `ttft_missed`: whether its last selection missed the SLO's TTFT.
    - `now`: the clock's time.
    """
    slo = ticket.slo
    if slo is None or slo.first_token_by is None:
        return held_order(ticket.arrived or now, prefill)
    return held_order(now, prefill) if ttft_missed else slo_order(slo.first_token_by, prefill)
