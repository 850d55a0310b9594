"""Encode workers: the choice of one for each media item, and the items that wait for it.

    item ──▶ choose ──▶ waits while the worker has 16 items ──▶ sent ──▶ ended

An encode worker keeps what it encoded, so equal items are sent to the same one. Rendezvous hashing ranks the workers
for each item by its content. The ranking is the same at all routers, and after a restart. An added worker receives only
the items for which it ranks first.

The first worker of the ranking is chosen that has at most `_BOUND` times its share of all items (consistent hashing
with bounded loads). So neither one popular item nor many items that rank a worker first can overload it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from random import Random
from typing import Final

from xxhash import xxh3_64_intdigest

from router.fleet.fleet import Fleet
from router.fleet.health import Health
from router.fleet.worker import Worker, has_turn
from router.load.target_load import LoadTable, ReservedLoad

_BOUND: Final = 1.25
# Below this number of items a worker of weight 1 is never passed over. Engines encode as many in one step.
_FEW: Final = 4
# The seconds of one item before any is learned, and the weight of a new item in their mean.
_FIRST_GUESS: Final = 0.1
_WEIGHT: Final = 0.1
_HASHES: Final = 2.0**64


class EncodeQueue:
    """The items of this router at one encode worker: at most `most` are sent, and the others wait in their order.

    While the worker is full, none is sent.

    `seconds`: the learned seconds of an item that no other precedes; None before the first.
    """

    def __init__(self, health: Health, most: int) -> None:
        self.seconds: float | None = None
        self._health = health
        self._most = most
        self._sent = 0
        self._waiting: deque[EncodeTurn] = deque()

    @property
    def _may_send(self) -> bool:
        return self._sent < self._most and not self._health.full

    def enter(self, turn: EncodeTurn, first: bool) -> bool:
        """Return whether an item may be sent at once. If not, its turn begins later: before others if it is `first`."""
        if not self._may_send:
            (self._waiting.appendleft if first else self._waiting.append)(turn)
            return False
        self._sent += 1
        return True

    def leave(self, turn: EncodeTurn, was_sent: bool) -> None:
        """Remove an item, and begin the turn of the next one if this one was sent."""
        if not was_sent:
            if turn in self._waiting:
                self._waiting.remove(turn)
        else:
            self._sent -= 1
            if self._waiting:
                # In another callback, so that many failures in a row do not nest.
                asyncio.get_running_loop().call_soon(self.begin_next)

    def begin_next(self) -> None:
        """Begin the turns of the items that may be sent now."""
        while self._waiting and self._may_send:
            self._sent += 1
            self._waiting.popleft().begin()

    def learn(self, seconds: float) -> None:
        """Learn from an item that was encoded in `seconds` seconds, without those of other items."""
        known = seconds if self.seconds is None else self.seconds
        self.seconds = known + _WEIGHT * (seconds - known)


class EncodeTurn:
    """One item's turn at an encode worker, from the choice to its end. Its share of the load is reserved.

    `ahead`: the items that precede it there.
    """

    def __init__(
        self, worker: Worker, queue: EncodeQueue, reservation: ReservedLoad, ahead: int, clock: Callable[[], float]
    ) -> None:
        self.worker = worker
        self._queue = queue
        self._reservation = reservation
        self._ahead = ahead
        self._clock = clock
        self._on_turn: Callable[[], None] | None = None
        self._in_turn = False
        self._began = 0.0
        self._ended = False

    def wait(self, on_turn: Callable[[], None], first: bool = False) -> None:
        """Call `on_turn` when the item may be sent, unless it ends before. `first`: before other items."""
        self._on_turn = on_turn
        if self._queue.enter(self, first):
            self.begin()

    def begin(self) -> None:
        """Begin the turn. Called by the queue."""
        self._in_turn = True
        on_turn, self._on_turn = self._on_turn, None
        if on_turn is None:  # it ended meanwhile
            self._queue.leave(self, True)
        else:
            self._began = self._clock()
            on_turn()

    def encoded(self) -> None:
        """Learn from the time of the item at the worker, of which the items ahead used their parts."""
        self._queue.learn((self._clock() - self._began) / (self._ahead + 1))

    def end(self, failed: bool = False) -> None:  # noqa: ARG002 - a `ReleaseCallback`
        """Release the load, and let the next item be sent. Only the first call counts."""
        if self._ended:
            return
        self._ended, self._on_turn = True, None
        self._reservation.release()
        self._queue.leave(self, self._in_turn)


class Encoders:
    """The encode workers of a fleet, with their load and their learned times.

    - `random`: picks the items that a worker receives during its warm-up.
    - `most_items`: the most items of this router in flight at one worker. Others wait.
    """

    def __init__(
        self,
        fleet: Fleet,
        load: LoadTable,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
        most_items: int = 16,
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._most_items = most_items
        self._random = random
        self._clock = clock
        self._queues: dict[str, EncodeQueue] = {}

    def choose(self, name: str, key: int, excluded: Collection[Worker] = ()) -> Worker | None:
        """Return the encode worker for the item with this key, of a chat for a model's name; None if none is left."""
        able = [worker for worker in self._fleet.encoders(name) if worker not in excluded]
        able = [worker for worker in able if not worker.health.full] or able
        usable = [worker for worker in able if has_turn(worker, self._random)] or able
        if len(usable) <= 1:
            return usable[0] if usable else None
        loads = {worker: self._items(worker) for worker in usable}
        share = _BOUND * (sum(loads.values()) + 1) / sum([worker.settings.weight for worker in usable])
        few = min(_FEW, self._most_items)
        within = [worker for worker in usable if loads[worker] < math.ceil(max(share, few) * worker.settings.weight)]
        return max(within, key=lambda worker: _rank(worker, key))

    def place(self, worker: Worker) -> EncodeTurn:
        """Reserve the load of one item at a worker, in the step of the choice."""
        ahead, seconds = self._items(worker), self._expected(worker)
        reservation = ReservedLoad(self._load.of(worker.url, 0), 0, 0, seconds)
        return EncodeTurn(worker, self._queue(worker), reservation, ahead, self._clock)

    def seconds(self, name: str, keys: Iterable[int]) -> float:
        """Return the predicted seconds until the items with these keys are encoded; 0 without an encode worker."""
        chosen = Counter([worker for key in keys if (worker := self.choose(name, key)) is not None])
        return max([(self._items(each) + count) * self._expected(each) for each, count in chosen.items()], default=0.0)

    def wake(self) -> None:
        """Begin the turns of the items that may be sent now, because a worker may no longer be full."""
        for queue in list(self._queues.values()):
            queue.begin_next()

    def forget(self, worker: Worker) -> None:
        """Forget a worker that was removed. Its items may still end."""
        self._queues.pop(worker.url, None)

    def _queue(self, worker: Worker) -> EncodeQueue:
        queue = self._queues.get(worker.url)
        if queue is None:
            queue = self._queues[worker.url] = EncodeQueue(worker.health, self._most_items)
        return queue

    def _items(self, worker: Worker) -> int:
        """Return the items at a worker: of this router, of other routers, and of other clients."""
        load = self._load.of(worker.url, 0)
        return load.requests + load.peers.requests + worker.metrics.get(0).unseen

    def _expected(self, worker: Worker) -> float:
        """Return the seconds of one item at a worker; the mean of the others before the first."""
        seconds = self._queue(worker).seconds
        if seconds is not None:
            return seconds
        learned = [queue.seconds for queue in self._queues.values() if queue.seconds is not None]
        return sum(learned) / len(learned) if learned else _FIRST_GUESS


def _rank(worker: Worker, key: int) -> float:
    """Return the rank of a worker for an item. A worker of twice the weight ranks first for twice the items."""
    drawn = (xxh3_64_intdigest(worker.url.encode(), seed=key) + 1) / (_HASHES + 2)
    return -worker.settings.weight / math.log(drawn)
