"""Calls of sessions that wait for room beside the contexts of live sessions (`router.programs`).

Such a call is tried again after each event of the queue, and once a second, because idle sessions leave. At most
`ROOM_TRIES` calls are tried behind one that has no room. Once a call has waited for `OVERTAKING_SECONDS`, the calls of
its tenant and priority are placed in the order of their arrival. A subagent of a live program is placed before new
sessions.

The hold ends after `ROOM_SECONDS`, or after half of the client's time if that is sooner. Then a session that has begun
waits for its target only, and so does a context that fits beside no other. A new session is refused.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from sortedcontainers import SortedKeyList

from indexer import Target
from router.admission.refusals import AdmissionRate
from router.admission.ticket import WaitingRequest, WaitReason
from router.apis.requests import RoutedRequest
from router.policies import Candidate
from router.programs import Call, Gate, RankCapacity, key_of, marks_of
from router.routing.assignment import Selection
from router.routing.selector import TargetSelector
from router.settings import Role

ROOM_TRIES = 8
OVERTAKING_SECONDS = 120.0
ROOM_SECONDS = 300.0
_INTERVAL = 1.0
_CLIENT_SHARE = 0.5


class SeenSession(NamedTuple):
    """The session of a request as `/explain` shows it.

    - `charged`: the target that it is charged to; None while it is not live. `tokens`: the tokens of its context.
    - `closed`: whether sessions wait for room. `waiting`: how many calls do.
    - `rooms`: the tokens that each target has left beside the call, where a session is live and the capacity is known.
    """

    state: str
    charged: Target | None
    tokens: int
    closed: bool
    waiting: int
    rooms: dict[Target, int]


class Room:
    """The waiting calls, and the gate that holds them.

    - `rate`: the rate at which calls found room.
    """

    def __init__(
        self, gate: Gate, selector: TargetSelector, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        """Create a room without calls. `wake`: lets the queue choose again."""
        self.rate = AdmissionRate(clock, ROOM_SECONDS, round(ROOM_SECONDS))
        self._gate = gate
        self._selector = selector
        self._wake = wake
        self._clock = clock
        self._waiting: SortedKeyList[WaitingRequest] = SortedKeyList(key=_arrival)
        self._of_tenant: Counter[str] = Counter()
        self._next: asyncio.TimerHandle | None = None

    def __contains__(self, request: WaitingRequest) -> bool:
        """Return whether a request waits for room."""
        return request in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def in_order(self) -> list[WaitingRequest]:
        """Return the waiting calls, the oldest first."""
        return list(self._waiting)

    def above(self, priority: int, name: str | None) -> int:
        """Return the number of waiting calls for a name that have a higher priority."""
        return sum(each.priority < priority and each.name == name for each in self._waiting)

    def may_queue(self, request: WaitingRequest, free: int) -> bool:
        """Return whether a call may wait for room in a queue with `free` places.

        New sessions of a tenant take at most as many places as they leave free, so that other tenants find some.
        """
        call = request.ticket.call
        return (call is not None and call.session.begun) or self._of_tenant[request.tenant] < free

    def overdue(self) -> dict[tuple[int, str], WaitingRequest]:
        """Return the call that is placed next of each priority and tenant with a call that may not be overtaken."""
        found: dict[tuple[int, str], WaitingRequest] = {}
        now = self._clock()
        for request in self._waiting:
            if now < request.since + OVERTAKING_SECONDS:
                break
            found.setdefault((request.priority, request.tenant), request)
        return found

    def seen(self, prompt: RoutedRequest, tenant: str) -> Call | None:
        """Return the call that a request would be, without a record of it; None if it is no call of a session."""
        key = key_of(prompt, tenant)
        if key is None:
            return None
        sessions, hints = self._gate.sessions, prompt.hints
        final = hints is not None and bool(hints.final)
        call = Call(sessions.ended, sessions.seen(key), prompt.tokens, final, None)
        call.counted = True
        return call

    def explained(self, call: Call, hashes: list[array[int]], prompt: RoutedRequest) -> SeenSession:
        """Return the state of a call's session, and the room that it would leave on each target."""
        session, gate = call.session, self._gate
        rooms: dict[Target, int] = {}
        for rank in self._ranks(prompt) if len(hashes) == 1 else ():
            left = gate.room_left(rank, marks_of(hashes[0]))
            if left is not None:
                rooms[rank.target] = round(left)
        charged = session.target if session.charged is not None else None
        return SeenSession(gate.sessions.state(session), charged, session.tokens, gate.closed, len(self), rooms)

    def passes(self, call: Call, prompt: RoutedRequest, selection: Selection) -> bool:
        """Return whether a call may go to any target.

        If prefill workers have time to spare, one of them computes a lost context without delaying other requests.
        """
        call.held = False
        if len(selection.hashes) != 1:
            return True
        held = reachable(selection.best_overlap, selection.decision.chosen)
        passes = self._gate.passes(call, selection.hashes[0], held, bool(self._waiting))
        return passes or (selection.prefill is not None and self._selector.prefill_has_time(prompt))

    def closed(
        self, call: Call, prompt: RoutedRequest, selection: Selection, behind: bool
    ) -> Collection[tuple[str, int]] | None:
        """Return the workers and ranks without room for a call that does not pass; None if all have none: it waits.

        A decode worker has room only if a prefill worker has some, too. `behind`: calls that wait for room go first.
        """
        call.held = True
        if behind and self._waiting:
            return None
        ranks, prefills = self._selector.ranks(prompt), self._ranks(prompt, prefill=True)
        closed = self._gate.without_room(self._ranks(prompt), selection.hashes[0])
        if prefills:
            full = self._gate.without_room(prefills, selection.hashes[0])
            if len(full) == len(prefills):
                full = {(rank.worker.url, rank.target.dp_rank) for rank in ranks if rank.worker.role is Role.DECODE}
            closed |= full
        call.held = all((rank.worker.url, rank.target.dp_rank) in closed for rank in ranks)
        return None if call.held else closed

    def set_reason(self, request: WaitingRequest, reason: WaitReason) -> bool:
        """Set why a request waits. Return whether it waited for room, and waits for something else from now on."""
        request.reason = reason
        if (request in self) == (reason is WaitReason.WORKING_SET):
            return False
        if reason is not WaitReason.WORKING_SET:
            self._remove(request)
            return True
        self._waiting.add(request)
        self._of_tenant[request.tenant] += 1
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(_INTERVAL, self._try_again)
        return False

    def left(self, request: WaitingRequest, placed: bool = False) -> None:
        """Forget a request that waits no more. `placed`: it found room."""
        if request not in self:
            return
        self._remove(request)
        if placed:
            self.rate.count(request.priority)
            if self._clock() >= request.since + OVERTAKING_SECONDS:
                self._wake()  # the next one of its tenant is tried now

    def until(self, request: WaitingRequest) -> float:
        """Return when the hold of a call ends."""
        place_by = request.ticket.place_by
        longest = request.since + ROOM_SECONDS
        return longest if place_by is None else min(longest, request.since + _CLIENT_SHARE * (place_by - request.since))

    def may_go(self, request: WaitingRequest) -> bool:
        """Hold a call no more whose time is over. Return False for a new session, which is refused."""
        call = request.ticket.call
        if call is None:
            return False
        fits, prefills = self._gate.fits_alone, self._ranks(request.prompt, prefill=True)
        alone = fits(self._ranks(request.prompt), call.tokens) and (not prefills or fits(prefills, call.tokens))
        call.exempt = call.session.begun or not alone
        return call.exempt

    def _ranks(self, prompt: RoutedRequest, prefill: bool = False) -> list[RankCapacity]:
        ranks = self._selector.ranks(prompt, prefill)
        return [RankCapacity(rank.target, rank.worker.capacity_tokens) for rank in ranks]

    def _remove(self, request: WaitingRequest) -> None:
        self._waiting.remove(request)
        self._of_tenant[request.tenant] -= 1
        if not self._of_tenant[request.tenant]:
            del self._of_tenant[request.tenant]

    def _try_again(self) -> None:
        self._next = None
        if self._waiting:
            self._next = asyncio.get_running_loop().call_later(_INTERVAL, self._try_again)
            self._wake()


def reachable(best_overlap: int, chosen: Candidate) -> int:
    """Return the tokens of a prompt that need not be computed: those that a target holds, or can load.

    The tokens of a pool or a peer count less the cost of their load.
    """
    source = chosen.source
    return best_overlap if source is None else max(best_overlap, chosen.overlap + int(source.saved))


def places_ahead(call: Call | None) -> float:
    """Return the seconds by which a call is placed before earlier ones: a subagent is placed before new sessions.

    Its parent waits for it, and occupies memory meanwhile.
    """
    return ROOM_SECONDS if call is not None and call.held and call.subagent else 0.0


def _arrival(request: WaitingRequest) -> tuple[float, int]:
    return request.since, request.number
