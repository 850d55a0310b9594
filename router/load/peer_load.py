"""The load that other routers have in flight, according to their messages."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, takewhile

from indexer import Target
from router.cache_state.in_flight_prefixes import LINGER_SECONDS, InFlightPrefixes, ReleaseCallback
from router.load.load_messages import MAX_SHARED, SHARED_STRIDE, Kind, Message, RankLoad, SentPrompt

# Limits of peer routers, and of the DP ranks and prompts of one peer.
MAX_ROUTERS = 1024
MAX_RANKS = 65_536
MAX_PROMPTS = 16_384
# Limits for all peers together.
MAX_ALL_RANKS = 1 << 20
MAX_ALL_PROMPTS = 1 << 17
# Seconds after which a peer is silent: its load expires. Loads are sent again three times in them.
EXPIRY_SECONDS = 3.0


@dataclass(slots=True)
class PeerTargetLoad:
    """The load that all other routers together have in flight on a DP rank."""

    requests: int = 0
    pending: int = 0
    context: int = 0
    waiting: int = 0
    streamed: int = 0
    live: int = 0
    memory: int = 0
    prefill: int = 0


NOTHING = PeerTargetLoad()


@dataclass(slots=True)
class _Peer:
    received_at: float
    number: int = -1
    loads: dict[tuple[str, int], tuple[RankLoad, float]] = field(default_factory=dict)
    prompts: dict[int, ReleaseCallback] = field(default_factory=dict)


class PeerLoad:
    """The peers of the last `expiry` seconds, the sums of their loads, and their `prompts` in flight.

    - `on_change`: called with a rank whose load changed.
    - `on_session`: called with a prompt of a session that another router sent.
    """

    def __init__(
        self,
        expiry: float = EXPIRY_SECONDS,
        linger: float = LINGER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the loads of no peers. An ended prompt still counts as cached soon for `linger` seconds."""
        self.expiry = expiry
        self.on_change: list[Callable[[str, int], None]] = []
        self.on_session: list[Callable[[SentPrompt], None]] = []
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._sums: dict[tuple[str, int], PeerTargetLoad] = {}
        self.prompts = InFlightPrefixes(linger, clock, SHARED_STRIDE)
        self._ranks = self._held = 0  # the DP ranks and prompts of all peers

    def apply(self, message: Message) -> bool:
        """Apply a peer's message, and return whether the peer is new. Messages that arrive out of order are ignored."""
        if message.kind is Kind.GONE:
            self.forget(message.router)
            return False
        peer = self._peers.get(message.router)
        new = peer is None
        if peer is None:
            if len(self._peers) >= MAX_ROUTERS:
                return False
            peer = self._peers[message.router] = _Peer(self._clock())
        if message.number <= peer.number:
            return False
        peer.number, peer.received_at = message.number, self._clock()
        for load in message.loads:
            has_room = len(peer.loads) < MAX_RANKS and self._ranks < MAX_ALL_RANKS
            if has_room or (load.worker, load.dp_rank) in peer.loads:
                self._set(peer, (load.worker, load.dp_rank), load)
        for prompt in message.sent:
            self._hold(peer, prompt)
        ended = list(takewhile(lambda number: number < message.oldest, peer.prompts))
        failed = set(message.failed)
        for number in chain(ended, message.ended):
            self._release(peer, number, number in failed)
        return new

    def of(self, worker: str, dp_rank: int) -> PeerTargetLoad:
        """Return the load that other routers have in flight on a DP rank."""
        return self._sums.get((worker, dp_rank), NOTHING) if self._sums else NOTHING

    def live_tokens(self, worker: str, dp_rank: int) -> int:
        """Return the tokens that live sessions of other routers need on a DP rank."""
        return self.of(worker, dp_rank).live

    def backlog(self, worker: str, dp_rank: int) -> float:
        """Return the seconds until the prefills of other routers on a DP rank are expected to be done."""
        now = self._clock()
        known = (peer.loads.get((worker, dp_rank)) for peer in self._peers.values())
        return sum(max(each[0].backlog - (now - each[1]), 0.0) for each in known if each)

    def in_flight(self, worker: str, ranks: Iterable[int]) -> Counter[int]:
        """Return the requests of other routers by DP rank, for `ranks` of a worker."""
        return Counter({rank: self.of(worker, rank).requests for rank in ranks})

    def overlaps(self, hashes: array[int]) -> dict[Target, int]:
        """Return the tokens of a prompt that other routers have in flight, by target. `hashes`: its chunk hashes."""
        return self.prompts.overlaps(hashes)

    def forget_prompts(self, target: Target) -> None:
        """Forget the prompts of a target whose cache was reset."""
        self.prompts.forget(target)

    def routers(self) -> list[str]:
        """Return the ids of the known peers."""
        return list(self._peers)

    def expire(self) -> None:
        """Forget silent peers, and loads that were not repeated for `expiry` seconds."""
        oldest = self._clock() - self.expiry
        for router in [name for name, peer in self._peers.items() if peer.received_at < oldest]:
            self.forget(router)
        for peer in self._peers.values():
            for rank in [rank for rank, (_, received_at) in peer.loads.items() if received_at < oldest]:
                self._set(peer, rank, None)

    def forget(self, router: str) -> None:
        """Forget a router and everything that it had in flight."""
        peer = self._peers.pop(router, None)
        if peer is None:
            return
        for rank in list(peer.loads):
            self._set(peer, rank, None)
        for number in list(peer.prompts):
            self._release(peer, number)

    def _set(self, peer: _Peer, rank: tuple[str, int], load: RankLoad | None) -> None:
        before = peer.loads.pop(rank, None)
        total = self._sums.setdefault(rank, PeerTargetLoad())
        if before is not None:
            self._ranks -= 1
            _add(total, before[0], -1)
        if load is not None and (load.requests or load.context or load.live):
            self._ranks += 1
            peer.loads[rank] = (load, self._clock())
            _add(total, load, 1)
        elif total == NOTHING:
            del self._sums[rank]
        for on_change in self.on_change:
            on_change(*rank)

    def _hold(self, peer: _Peer, prompt: SentPrompt) -> None:
        self._release(peer, prompt.number)  # if it was reported before
        if len(prompt.prefixes) % 8 or len(prompt.prefixes) > 8 * MAX_SHARED:
            return
        for on_session in self.on_session if prompt.session else ():
            on_session(prompt)
        if len(peer.prompts) >= MAX_PROMPTS or self._held >= MAX_ALL_PROMPTS:
            return
        target = Target(prompt.worker, prompt.dp_rank, prompt.model)
        peer.prompts[prompt.number] = self.prompts.hold(target, array("Q", prompt.prefixes))
        self._held += 1

    def _release(self, peer: _Peer, number: int, failed: bool = False) -> None:
        ended = peer.prompts.pop(number, None)
        if ended is not None:
            self._held -= 1
            ended(failed)


def _add(total: PeerTargetLoad, load: RankLoad, sign: int) -> None:
    total.requests += sign * load.requests
    total.pending += sign * load.pending
    total.context += sign * load.context
    total.waiting += sign * load.waiting
    total.streamed += sign * load.streamed
    total.live += sign * load.live
    total.prefill += sign * load.prefill
    total.memory += sign * (load.context if load.memory is None else load.memory)
