"""The order of waiting requests: by priority, then those whose SLO can be met, then fairly between tenants.

Fairness is in tokens, by start-time fair queueing (Goyal, Vin, Cheng 1996). Every tenant has a clock that advances by
the tokens of its served requests, and the tenant with the lowest clock is next. A tenant without waiting requests
starts again at the clock of the tenant that was served last, so that it cannot save up.

    lane = (priority, slo_missed, tenant, name)        the requests of a lane are sorted by their `order`
    next = the lane with the lowest (priority, slo_missed, clock of its tenant, order of its first request)
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


@dataclass(slots=True, eq=False)
class Waiting:
    """A waiting request.

    - `name`: the model or adapter that it asks for.
    - `order`: its position in its lane, where the lowest is first.
    - `tokens`: the tokens that its tenant is charged.
    - `size`: the bytes that it keeps in memory.
    - `slo_missed`: whether all other requests of its priority are served first.
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


class _Lane(NamedTuple):
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
        self._lanes: dict[_Lane, SortedKeyList[W]] = {}
        self._of_tenant: Counter[str] = Counter()
        self._of_priority: Counter[int] = Counter()
        self._clocks: dict[str, float] = {}
        self._clock = 0.0  # of the tenant that was served last
        self.length = 0
        self.size = 0  # bytes

    def __len__(self) -> int:
        return self.length

    def fits(self, size: int) -> bool:
        """Return whether a request of `size` bytes can be added."""
        return self.length < self._max_requests and self.size + size <= self._max_bytes

    def can_fit(self, request: W) -> bool:
        """Return whether a request could be added if all requests behind it were dropped."""
        kept = [queue for lane, queue in self._lanes.items() if lane.sort_key <= request.sort_key]
        size = sum(each.size for queue in kept for each in queue)
        return sum(map(len, kept)) < self._max_requests and size + request.size <= self._max_bytes

    def add(self, request: W) -> None:
        """Add a request."""
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
        """Move a request to the lane of requests whose SLO is missed, at position `order`."""
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

    def in_order(self, without: Container[str | None] = (), most_missed: int | None = None) -> Iterator[W]:
        """Return the requests in order. They may be removed and served meanwhile, which changes the order of the rest.

        - `without`: names to skip; names may be added meanwhile.
        - `most_missed`: the requests that may stay in a lane of missed SLOs before the rest of the lane is skipped.
        """
        heap = [(self._key(lane, queue[0]), lane, 0) for lane, queue in self._lanes.items()]
        heapify(heap)
        while heap:
            key, lane, place = heappop(heap)
            queue = self._lanes.get(lane)
            if queue is None or lane.name in without or place >= len(queue):
                continue
            request: W = queue[place]
            now = self._key(lane, request)
            if now > key:  # its tenant was served meanwhile
                heappush(heap, (now, lane, place))
                continue
            yield request
            stay = place + request.queued
            if not lane.slo_missed or stay != most_missed:
                heappush(heap, (key, lane, stay))

    def last(self) -> W | None:
        """Return the last request, which is the first to be dropped; None if the queue is empty."""
        if not self._lanes:
            return None
        lowest = max(lane.sort_key for lane in self._lanes)
        ends: list[tuple[_Lane, W]] = [
            (lane, queue[-1]) for lane, queue in self._lanes.items() if lane.sort_key == lowest
        ]
        return max(ends, key=lambda end: self._key(*end))[1]

    def best_priority(self, name: str | None) -> int | None:
        """Return the highest priority, which is the lowest number, of the requests for a name."""
        return min((lane.priority for lane in self._lanes if lane.name == name), default=None)

    def lengths(self) -> dict[int, int]:
        """Return the number of waiting requests by priority."""
        return dict(self._of_priority)

    def ahead_of(self, priority: int) -> int:
        """Return the number of requests before one of this priority that is added now."""
        return sum(waiting for known, waiting in self._of_priority.items() if known <= priority)

    def _put_in(self, request: W) -> None:
        lane = _lane_of(request)
        if lane not in self._lanes:
            self._lanes[lane] = SortedKeyList(key=_place_in_lane)
        self._lanes[lane].add(request)

    def _take_out(self, request: W) -> None:
        lane = _lane_of(request)
        self._lanes[lane].remove(request)
        if not self._lanes[lane]:
            del self._lanes[lane]

    def _key(self, lane: _Lane, request: W) -> tuple[int, bool, float, float, int]:
        return lane.priority, lane.slo_missed, self._clocks[lane.tenant], request.order, request.number


def _lane_of(request: Waiting) -> _Lane:
    return _Lane(request.priority, request.slo_missed, request.tenant, request.name)


def _place_in_lane(request: Waiting) -> tuple[float, int]:
    return request.order, request.number
