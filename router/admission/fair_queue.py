"""The order of waiting requests: by priority, then those whose SLO can be met, then fairly between tenants.

Fairness is in tokens, by start-time fair queueing (Goyal, Vin, Cheng 1996). Every tenant has a clock that advances by
the tokens of its served requests, and the tenant with the lowest clock is next. A tenant without waiting requests
starts again at the clock of the tenant that was served last, so that it cannot save up.

    group = (priority, slo_missed, tenant, name)       the requests of a group are sorted by their `order`
    next  = the group with the lowest (priority, slo_missed, clock of its tenant, order of its first request)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from sortedcontainers import SortedKeyList

_numbers = count()
# Number of clocks from which those of tenants that have nothing to catch up on are dropped.
_FEW_CLOCKS = 1024


@dataclass(slots=True, eq=False)
class Waiting:
    """A waiting request.

    - `order`: its position in its group, where the lowest is first.
    - `tokens`: the tokens that its tenant is charged.
    - `size`: the bytes that it keeps in memory.
    """

    priority: int
    tenant: str
    name: str | None
    order: float
    tokens: int
    size: int = 0
    slo_missed: bool = False
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


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """A queue of at most `max_requests` requests, which keep at most `max_bytes` bytes in memory."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._groups: dict[_Group, SortedKeyList[W]] = {}
        self._of_tenant: Counter[str] = Counter()
        self._of_priority: Counter[int] = Counter()
        self._clocks: dict[str, float] = {}
        self._clock = 0.0  # of the tenant that was served last
        self._most_clocks = _FEW_CLOCKS
        self.length = 0
        self.size = 0  # bytes

    def __len__(self) -> int:
        return self.length

    def fits(self, size: int) -> bool:
        """Return whether a request of `size` bytes can be added."""
        return self.length < self._max_requests and self.size + size <= self._max_bytes

    def can_fit(self, request: W) -> bool:
        """Return whether a request could be added if all requests behind it were dropped."""
        kept = [queue for group, queue in self._groups.items() if group.sort_key <= request.sort_key]
        size = sum(each.size for queue in kept for each in queue)
        return sum(map(len, kept)) < self._max_requests and size + request.size <= self._max_bytes

    def add(self, request: W) -> None:
        self._put_in(request)
        if not self._of_tenant[request.tenant]:
            self._clocks[request.tenant] = max(self._clocks.get(request.tenant, 0.0), self._clock)
        self._of_tenant[request.tenant] += 1
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
        self._of_tenant[request.tenant] -= 1
        self._of_priority[request.priority] -= 1
        if not self._of_tenant[request.tenant]:
            del self._of_tenant[request.tenant]
        if not self._of_priority[request.priority]:
            del self._of_priority[request.priority]
        self.length -= 1
        self.size -= request.size
        if not self.length:
            self._clocks.clear()
            self._clock = 0.0
        elif request.tenant not in self._of_tenant and self._clocks[request.tenant] <= self._clock:
            del self._clocks[request.tenant]

    def let_others_first(self, request: W, order: float) -> None:
        """Move a request to the group of requests whose SLO is missed, at position `order`."""
        self._take_out(request)
        request.slo_missed, request.order = True, order
        self._put_in(request)

    def served(self, tenant: str, tokens: int) -> None:
        """Charge a tenant for a request of `tokens` tokens that was served. Ignored while no request waits."""
        if not self.length:
            return
        waits = tenant in self._of_tenant
        start = self._clocks[tenant] if waits else max(self._clocks.get(tenant, 0.0), self._clock)
        self._clock = max(self._clock, start)
        self._clocks[tenant] = start + max(tokens, 1)
        if len(self._clocks) > self._most_clocks:  # gateways' flows may be of any number
            self._clocks = {
                each: at for each, at in self._clocks.items() if each in self._of_tenant or at > self._clock
            }
            self._most_clocks = max(2 * len(self._clocks), _FEW_CLOCKS)

    def not_served(self, tenant: str, tokens: int) -> None:
        """Take back the charge of `served`, because no worker accepted the request."""
        if tenant in self._clocks:
            self._clocks[tenant] -= max(tokens, 1)

    def in_order(self, without: Container[str | None] = (), most_missed: int | None = None) -> Iterator[W]:
        """Return the requests in order. They may be removed and served meanwhile, which changes the order of the rest.

        - `most_missed`: the requests that may stay in a group of missed SLOs before the rest of the group is skipped.
        """
        heap = [(self._key(group, queue[0]), group, 0) for group, queue in self._groups.items()]
        heapify(heap)
        while heap:
            key, group, position = heappop(heap)
            queue = self._groups.get(group)
            if queue is None or group.name in without or position >= len(queue):
                continue
            request: W = queue[position]
            now = self._key(group, request)
            if now > key:  # its tenant was served meanwhile
                heappush(heap, (now, group, position))
                continue
            yield request
            stay = position + request.queued
            if not group.slo_missed or stay != most_missed:
                heappush(heap, (key, group, stay))

    def last(self) -> W | None:
        """Return the last request, which is the first to be dropped; None if the queue is empty."""
        if not self._groups:
            return None
        lowest = max(group.sort_key for group in self._groups)
        ends: list[tuple[_Group, W]] = [
            (group, queue[-1]) for group, queue in self._groups.items() if group.sort_key == lowest
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

    def _put_in(self, request: W) -> None:
        group = _group_of(request)
        if group not in self._groups:
            self._groups[group] = SortedKeyList(key=_position_in_group)
        self._groups[group].add(request)

    def _take_out(self, request: W) -> None:
        group = _group_of(request)
        self._groups[group].remove(request)
        if not self._groups[group]:
            del self._groups[group]

    def _key(self, group: _Group, request: W) -> tuple[int, bool, float, float, int]:
        return group.priority, group.slo_missed, self._clocks[group.tenant], request.order, request.number


def _group_of(request: Waiting) -> _Group:
    return _Group(request.priority, request.slo_missed, request.tenant, request.name)


def _position_in_group(request: Waiting) -> tuple[float, int]:
    return request.order, request.number
