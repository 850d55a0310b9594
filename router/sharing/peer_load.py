"""What other routers have in flight, as far as this one was told."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, takewhile

from indexer import Target
from router.holdings.speculation import ReleaseCallback, SpeculativeHoldings
from router.sharing.messages import MAX_TOLD, TOLD_STRIDE, Kind, Message, RankLoad, SentPrompt

# Whatever others say, so many are remembered.
MAX_ROUTERS = 1024
MAX_RANKS = 65_536
MAX_PROMPTS = 16_384


@dataclass(slots=True)
class PeerTargetLoad:
    """What all other routers together have in flight on a DP rank."""

    requests: int = 0
    pending: int = 0
    context: int = 0
    waiting: int = 0
    streamed: int = 0


NOTHING = PeerTargetLoad()


@dataclass(slots=True)
class _Other:
    heard: float
    number: int = -1
    loads: dict[tuple[str, int], tuple[RankLoad, float]] = field(default_factory=dict)
    prompts: dict[int, ReleaseCallback] = field(default_factory=dict)


class PeerLoad:
    """The routers heard of in the last `expiry` seconds, and the sums of what they told in that time.

    `linger`: how long an ended prompt still counts as cached soon.
    """

    def __init__(self, expiry: float, linger: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.expiry = expiry
        self.on_change: list[Callable[[str, int], None]] = []  # told the worker and rank of what they have in flight
        self._clock = clock
        self._others: dict[str, _Other] = {}
        self._sums: dict[tuple[str, int], PeerTargetLoad] = {}
        self._prompts = SpeculativeHoldings(linger, clock, TOLD_STRIDE)

    def hear(self, message: Message) -> bool:
        """Take in what a router tells. Whether it is new here. Messages that were overtaken count for nothing."""
        if message.kind is Kind.GONE:
            self.forget(message.router)
            return False
        other = self._others.get(message.router)
        new = other is None
        if other is None:
            if len(self._others) >= MAX_ROUTERS:
                return False
            other = self._others[message.router] = _Other(self._clock())
        if message.number <= other.number:
            return False
        other.number, other.heard = message.number, self._clock()
        for load in message.loads:
            if len(other.loads) < MAX_RANKS or (load.worker, load.dp_rank) in other.loads:
                self._set(other, (load.worker, load.dp_rank), load)
        for prompt in message.sent:
            self._hold(other, prompt)
        gone = list(takewhile(lambda number: number < message.oldest, other.prompts))
        for number in chain(gone, message.ended):
            if ended := other.prompts.pop(number, None):
                ended(number in message.failed)
        return new

    def of(self, worker: str, dp_rank: int) -> PeerTargetLoad:
        """What others have in flight on a DP rank."""
        return self._sums.get((worker, dp_rank), NOTHING) if self._sums else NOTHING

    def backlog(self, worker: str, dp_rank: int) -> float:
        """Seconds until the prefills of others are expected to be done there, at the most."""
        now = self._clock()
        known = (other.loads.get((worker, dp_rank)) for other in self._others.values())
        return sum(max(each[0].backlog - (now - each[1]), 0.0) for each in known if each)

    def in_flight(self, worker: str, ranks: Iterable[int]) -> Counter[int]:
        """How many requests of others each of these ranks of a worker has."""
        return Counter({rank: self.of(worker, rank).requests for rank in ranks})

    def overlaps(self, hashes: array[int]) -> dict[Target, int]:
        """How many tokens of a prompt, given by the hash of each chunk, others have in flight, by target."""
        return self._prompts.overlaps(hashes)

    def forget_prompts(self, target: Target) -> None:
        """A target's cache was reset."""
        self._prompts.forget(target)

    def routers(self) -> list[str]:
        """Those heard of."""
        return list(self._others)

    def expire(self) -> None:
        """Forget the routers that are silent, and loads that are not told any more."""
        oldest = self._clock() - self.expiry
        for router in [name for name, other in self._others.items() if other.heard < oldest]:
            self.forget(router)
        for other in self._others.values():
            for rank in [rank for rank, (_, told_at) in other.loads.items() if told_at < oldest]:
                self._set(other, rank, None)

    def forget(self, router: str) -> None:
        """A router is gone, and what it had in flight."""
        other = self._others.pop(router, None)
        if other is None:
            return
        for rank in list(other.loads):
            self._set(other, rank, None)
        for ended in other.prompts.values():
            ended()

    def _set(self, other: _Other, rank: tuple[str, int], load: RankLoad | None) -> None:
        before = other.loads.pop(rank, None)
        total = self._sums.setdefault(rank, PeerTargetLoad())
        if before is not None:
            _add(total, before[0], -1)
        if load is not None and (load.requests or load.context):
            other.loads[rank] = (load, self._clock())
            _add(total, load, 1)
        elif total == NOTHING:
            del self._sums[rank]
        for told in self.on_change:
            told(*rank)

    def _hold(self, other: _Other, prompt: SentPrompt) -> None:
        if len(other.prompts) >= MAX_PROMPTS or len(prompt.prefixes) % 8 or len(prompt.prefixes) > 8 * MAX_TOLD:
            return
        target = Target(prompt.worker, prompt.dp_rank, prompt.model)
        other.prompts[prompt.number] = self._prompts.hold(target, array("Q", prompt.prefixes))


def _add(total: PeerTargetLoad, load: RankLoad, sign: int) -> None:
    total.requests += sign * load.requests
    total.pending += sign * load.pending
    total.context += sign * load.context
    total.waiting += sign * load.waiting
    total.streamed += sign * load.streamed
