"""The order of waiting requests: by priority, then those whose SLO can be met, then fairly.

Fairness is in tokens, by start-time fair queueing (Goyal, Vin, Cheng 1996): between tenants, and within a tenant
between programs. Each has a clock that advances by the tokens of its served requests, and the lowest clock is next. A
tenant or a program without waiting requests saves up nothing: it starts again at the clock that was served last. Nor
does such a program owe anything. Otherwise the next turn of each session would wait behind all new sessions, and its
cached prompt would be evicted meanwhile. Requests without a program take as many turns as programs of one request
would.

    group  = (priority, slo_missed, tenant, name)       its requests are sorted by their `order`, for each program
    next  = the request with the lowest (priority, slo_missed, clock of its tenant, clock of its program, order)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from sortedcontainers import SortedKeyList

_numbers = count()
# Number of clocks from which those of flows that have nothing to catch up on are dropped.
_FEW_CLOCKS = 1024


@dataclass(slots=True, eq=False)
class Waiting:
    """A waiting request.

    - `order`: its position among those of its group and program, where the lowest is first.
    - `tokens`: the tokens that its tenant and its program are charged.
    - `size`: the bytes that it keeps in memory.
    """

    priority: int
    tenant: str
    name: str | None
    order: float
    tokens: int
    size: int = 0
    slo_missed: bool = False
    program: str = ""
    number: int = field(default_factory=lambda: next(_numbers))
    queued: bool = False

    @property
    def sort_key(self) -> tuple[int, bool]:
        """The key that sorts requests across tenants: the lowest is served first, the highest is dropped first."""
        return self.priority, self.slo_missed


class _Group(NamedTuple):
    priority: int
    slo_missed: bool
    tenant: str
    name: str | None

    @property
    def sort_key(self) -> tuple[int, bool]:
        return self.priority, self.slo_missed


class _Clocks:
    """The clocks of flows that take turns.

    - `owing`: whether the clock of a flow counts when no request of it waits.
    - `at`: each flow's clock.
    - `waiting`: how many requests of each flow wait.
    - `begun`: a number for each flow with waiting requests, lower if it has waited for longer.
    """

    def __init__(self, owing: bool) -> None:
        self._owing = owing
        self.at: dict[str, float] = {}
        self.waiting: Counter[str] = Counter()
        self.begun: dict[str, int] = {}
        self._now = 0.0  # of the flow that was served last
        self._most = _FEW_CLOCKS

    def arrives(self, flow: str) -> None:
        """Count a request that waits."""
        if not self.waiting[flow]:
            self.at[flow] = max(self.at.get(flow, 0.0), self._now)
            self.begun[flow] = next(_numbers)
        self.waiting[flow] += 1

    def leaves(self, flow: str) -> None:
        """Count a request that no longer waits."""
        self.waiting[flow] -= 1
        if not self.waiting[flow]:
            del self.waiting[flow], self.begun[flow]
            if self.at[flow] <= self._now or not self._owing:
                del self.at[flow]

    def served(self, flow: str, tokens: float) -> None:
        """Charge a flow for a served request."""
        if flow not in self.waiting and not self._owing:
            return
        start = self.at[flow] if flow in self.waiting else max(self.at.get(flow, 0.0), self._now)
        self._now = max(self._now, start)
        self.at[flow] = start + tokens
        if len(self.at) > self._most:  # clients and gateways choose the names of flows
            self.at = {each: at for each, at in self.at.items() if each in self.waiting or at > self._now}
            self._most = max(2 * len(self.at), _FEW_CLOCKS)

    def not_served(self, flow: str, tokens: float) -> None:
        """Take back the charge of `served`."""
        if flow in self.at:
            self.at[flow] -= tokens


W = TypeVar("W", bound=Waiting)
_Key: TypeAlias = tuple[int, bool, float, int, float, float, int]
# The clock of a program, the order and the number of one of its requests, the program, and the request's position.
_Head: TypeAlias = tuple[float, float, int, str, int]


class FairQueue(Generic[W]):
    """A queue of at most `max_requests` requests, which keep at most `max_bytes` bytes in memory."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._groups: dict[_Group, dict[str, SortedKeyList[W]]] = {}  # by program
        self._of_priority: Counter[int] = Counter()
        self._tenants = _Clocks(owing=True)
        self._programs: dict[str, _Clocks] = {}  # by tenant, while its requests wait
        self.length = 0
        self.size = 0  # bytes

    def __len__(self) -> int:
        return self.length

    @property
    def free(self) -> int:
        """The number of requests that can be added."""
        return self._max_requests - self.length

    def fits(self, size: int) -> bool:
        """Return whether a request of `size` bytes can be added."""
        return self.length < self._max_requests and self.size + size <= self._max_bytes

    def can_fit(self, request: W) -> bool:
        """Return whether a request could be added if all requests behind it were dropped."""
        kept = [
            queue
            for group, queues in self._groups.items()
            if group.sort_key <= request.sort_key
            for queue in queues.values()
        ]
        size = sum(each.size for queue in kept for each in queue)
        return sum(map(len, kept)) < self._max_requests and size + request.size <= self._max_bytes

    def add(self, request: W) -> None:
        self._put_in(request)
        self._tenants.arrives(request.tenant)
        self._programs.setdefault(request.tenant, _Clocks(owing=False)).arrives(request.program)
        self._of_priority[request.priority] += 1
        self.length += 1
        self.size += request.size
        request.queued = True

    def remove(self, request: W) -> None:
        """Remove a request. Only the first call counts."""
        if not request.queued:
            return
        request.queued = False
        self._take_out(request)
        self._of_priority[request.priority] -= 1
        if not self._of_priority[request.priority]:
            del self._of_priority[request.priority]
        self.length -= 1
        self.size -= request.size
        self._tenants.leaves(request.tenant)
        self._programs[request.tenant].leaves(request.program)
        if request.tenant not in self._tenants.waiting:
            del self._programs[request.tenant]
        if not self.length:
            self._tenants = _Clocks(owing=True)

    def let_others_first(self, request: W, order: float) -> None:
        """Move a request to the group of requests whose SLO is missed, at position `order`."""
        self._take_out(request)
        request.slo_missed, request.order = True, order
        self._put_in(request)

    def served(self, tenant: str, tokens: int, program: str = "") -> None:
        """Charge a tenant and its program for a served request of `tokens` tokens. Ignored while no request waits."""
        if not self.length:
            return
        self._tenants.served(tenant, max(tokens, 1))
        if (programs := self._programs.get(tenant)) is not None:
            programs.served(program, _charge(programs, program, tokens))

    def not_served(self, tenant: str, tokens: int, program: str = "") -> None:
        """Take back the charge of `served`, because no worker accepted the request."""
        self._tenants.not_served(tenant, max(tokens, 1))
        if (programs := self._programs.get(tenant)) is not None:
            programs.not_served(program, _charge(programs, program, tokens))

    def in_order(self, without: Container[str | None] = (), most_missed: int | None = None) -> Iterator[W]:
        """Return the requests in order. They may be removed and served meanwhile, which changes the order of the rest.

        - `most_missed`: the requests of a program that may stay in a group of missed SLOs before its rest is skipped.
        """
        # A group's own entry is before all of its requests, so that programs are compared only if it has its turn.
        heap: list[tuple[_Key, _Group]] = [
            ((*self._turn(group), -inf, -inf, place), group) for place, group in enumerate(self._groups)
        ]
        heapify(heap)
        compared: dict[_Group, list[_Head]] = {}
        while heap:
            key, group = heappop(heap)
            queues = self._groups.get(group)
            if queues is None or group.name in without:
                continue
            heads = compared.get(group)
            if heads is None:
                heads = compared[group] = self._heads(group, queues)
            else:
                program, position = heads[0][3:]
                waiting = queues.get(program)
                if waiting is None or position >= len(waiting):
                    heappop(heads)
                else:
                    request: W = waiting[position]
                    now = self._key(group, request)
                    if now > key:  # its tenant or its program was served meanwhile
                        heapreplace(heads, (*now[4:], program, position))
                    else:
                        yield request
                        stay = position + request.queued
                        if group.slo_missed and stay == most_missed:
                            heappop(heads)
                        else:
                            heapreplace(heads, (*key[4:], program, stay))
            if heads and group in self._groups:
                heappush(heap, ((*self._turn(group), *heads[0][:3]), group))

    def _heads(self, group: _Group, queues: dict[str, SortedKeyList[W]]) -> list[_Head]:
        """Return the first request of each program of a group, as a heap."""
        at = self._programs[group.tenant].at
        heads: list[_Head] = []
        for program, queue in queues.items():
            first: W = queue[0]
            heads.append((at[program], first.order, first.number, program, 0))
        heapify(heads)
        return heads

    def last(self) -> W | None:
        """Return the last request, which is the first to be dropped; None if the queue is empty."""
        if not self._groups:
            return None
        lowest = max(group.sort_key for group in self._groups)
        ends: list[tuple[_Group, W]] = [
            (group, queue[-1])
            for group, queues in self._groups.items()
            if group.sort_key == lowest
            for queue in queues.values()
        ]
        return max(ends, key=lambda end: self._key(*end))[1]

    def best_priority(self, name: str | None) -> int | None:
        """Return the highest priority, which is the lowest number, of the requests for a name."""
        return min((group.priority for group in self._groups if group.name == name), default=None)

    def lengths(self) -> dict[int, int]:
        """Return the number of waiting requests by priority."""
        return dict(self._of_priority)

    def ahead_of(self, priority: int) -> int:
        """Return the number of requests before one of this priority that is added now."""
        return sum(waiting for known, waiting in self._of_priority.items() if known <= priority)

    def above(self, priority: int, name: str | None) -> int:
        """Return the number of requests for a name that have a higher priority."""
        return sum(
            len(queue)
            for group, queues in self._groups.items()
            if group.name == name and group.priority < priority
            for queue in queues.values()
        )

    def _put_in(self, request: W) -> None:
        queues = self._groups.setdefault(_group_of(request), {})
        if request.program not in queues:
            queues[request.program] = SortedKeyList(key=_position)
        queues[request.program].add(request)

    def _take_out(self, request: W) -> None:
        group = _group_of(request)
        queues = self._groups[group]
        queues[request.program].remove(request)
        if not queues[request.program]:
            del queues[request.program]
            if not queues:
                del self._groups[group]

    def _key(self, group: _Group, request: W) -> _Key:
        return *self._turn(group), self._programs[group.tenant].at[request.program], request.order, request.number

    def _turn(self, group: _Group) -> tuple[int, bool, float, int]:
        """Return what is compared of groups. Of tenants with equal clocks, the longest waiting is first."""
        tenants, tenant = self._tenants, group.tenant
        return group.priority, group.slo_missed, tenants.at[tenant], tenants.begun[tenant]


def _charge(programs: _Clocks, program: str, tokens: int) -> float:
    """Return what a program's clock advances by. Requests without a program share one, with a share for each."""
    return max(tokens, 1) / (1 if program else max(programs.waiting[program], 1))


def _group_of(request: Waiting) -> _Group:
    return _Group(request.priority, request.slo_missed, request.tenant, request.name)


def _position(request: Waiting) -> tuple[float, int]:
    return request.order, request.number
