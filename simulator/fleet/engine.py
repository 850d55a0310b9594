"""One engine: a paged prefix cache whose leaves are evicted first, chunked prefill, continuous batches.

It lives between events: `next_event` says when it has to be called again. Steps without prefill are taken many at once,
up to the next end of a request, and cut short when a request comes.

A request reserves the blocks of its prompt and its answer when it is admitted, or waits for them. Full blocks can be
found by their id once they are computed; those of ended requests stay until their memory is needed, the least recently
used first, and of one request's the last first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf, sqrt

from router.policies.rates import CHUNK
from simulator.fleet.profiles import Profile
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest


class BlockCache:
    """The blocks of an engine: named ones by their id, and others, which only count."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.unnamed = 0
        self._used: dict[int, int] = {}  # references by id
        self._idle: OrderedDict[int, None] = OrderedDict()  # used by no sequence; the first is evicted first
        self.removed: list[int] = []  # since `take_removed`

    @property
    def in_use(self) -> int:
        """Blocks that cannot be evicted."""
        return len(self._used) + self.unnamed

    def matched(self, ids: tuple[int, ...]) -> int:
        """How many leading blocks are there."""
        for place, block in enumerate(ids):
            if block not in self._used and block not in self._idle:
                return place
        return len(ids)

    def acquire(self, ids: tuple[int, ...], others: int) -> bool:
        """Use blocks that are there, and `new` more. False, and nothing changes, if they do not fit."""
        revived = sum(block in self._idle for block in ids)
        if self.in_use + revived + others > self.capacity:
            return False
        for block in ids:
            self._idle.pop(block, None)
            self._used[block] = self._used.get(block, 0) + 1
        self.unnamed += others
        while self.in_use + len(self._idle) > self.capacity:
            self.removed.append(self._idle.popitem(last=False)[0])
        return True

    def name(self, block: int) -> bool:
        """A block that only counted is computed. False when there is one of this id already."""
        if block in self._used or block in self._idle:
            return False
        self.unnamed -= 1
        self._used[block] = 1
        return True

    def release(self, ids: list[int], others: int) -> None:
        """Named blocks in their order and others are not used any more."""
        self.unnamed -= others
        for block in reversed(ids):
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
                self._idle[block] = None

    def take_removed(self) -> list[int]:
        """The ids of the blocks evicted since the last call."""
        removed, self.removed = self.removed, []
        return removed


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in an engine. `done`: tokens of its prompt that are there."""

    request: TracedRequest
    done: int = 0
    cached: int = 0
    held: list[int] = field(default_factory=list)
    unnamed: int = 0
    named: int = 0  # how many of its blocks have been computed and named


@dataclass(slots=True)
class Progress:
    """What happened at an event: first bytes, ends, blocks stored and removed."""

    begun: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


class Engine:
    """Takes requests (`submit`) and computes (`advance` at `next_event`)."""

    def __init__(self, profile: Profile, kv_tokens: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._rates = profile.rates
        self._max_requests = profile.max_requests
        self._block_tokens = block_tokens
        self.cache = BlockCache(kv_tokens // block_tokens)
        self.next_event = inf
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: list[tuple[int, int, Sequence]] = []  # heap of (step at which it ends, number, sequence)
        self._context = 0
        self._steps = 0  # taken so far
        self._numbers = 0
        self._started = 0.0
        self._planned = 0  # steps until `next_event`
        self._chunks: list[tuple[Sequence, int]] = []  # computed in the step under way

    @property
    def kv_usage(self) -> float:
        """The share of the memory that running requests use."""
        return self.cache.in_use / self.cache.capacity

    @property
    def waiting(self) -> int:
        """Requests that have no memory yet."""
        return len(self._waiting)

    def submit(self, request: TracedRequest, now: float) -> None:
        """A request comes."""
        self._waiting.append(Sequence(request))
        if self.next_event == inf:
            self.next_event = now
        elif self._planned > 1:
            steps = self._steps_by(now - self._started)
            if steps < self._planned:
                self._planned = steps
                self.next_event = self._started + self._seconds(steps)

    def advance(self) -> Progress:
        """End what was under way until `next_event`, and begin what comes next."""
        now = self.next_event
        progress = Progress()
        self._finish_steps(progress)
        self._admit()
        progress.removed = self.cache.take_removed()
        self._begin(now)
        return progress

    def _finish_steps(self, progress: Progress) -> None:
        self._steps += self._planned
        self._context += len(self._decoding) * self._planned
        self._planned = 0
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._end(heappop(self._decoding)[2], progress)
        for sequence, tokens in self._chunks:
            sequence.done += tokens
            self._store(sequence, sequence.request.blocks, sequence.done // self._block_tokens, progress)
            if sequence.done < sequence.request.input_tokens:
                continue
            self._prefilling.popleft()
            progress.begun.append(sequence)
            self._context += sequence.request.input_tokens + 1
            self._numbers += 1
            ends = self._steps + sequence.request.output_tokens - 1
            if ends <= self._steps:
                self._end(sequence, progress)
            else:
                heappush(self._decoding, (ends, self._numbers, sequence))
        self._chunks = []

    def _store(self, sequence: Sequence, ids: tuple[int, ...], count: int, progress: Progress) -> None:
        for block in ids[sequence.named : count]:
            if self.cache.name(block):
                sequence.unnamed -= 1
                sequence.held.append(block)
                progress.stored.append(block)
        sequence.named = max(sequence.named, min(count, len(ids)))

    def _end(self, sequence: Sequence, progress: Progress) -> None:
        request = sequence.request
        self._context -= request.input_tokens + request.output_tokens
        self._store(sequence, request.finished, len(request.finished), progress)
        self.cache.release(sequence.held, sequence.unnamed)
        progress.ended.append(sequence)

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._max_requests:
            sequence = self._waiting[0]
            request = sequence.request
            matched = self.cache.matched(request.blocks[: (request.input_tokens - 1) // self._block_tokens])
            total = min(ceil((request.input_tokens + request.output_tokens) / self._block_tokens), self.cache.capacity)
            if not self.cache.acquire(request.blocks[:matched], total - matched):
                return
            self._waiting.popleft()
            sequence.done = sequence.cached = matched * self._block_tokens
            sequence.held = list(request.blocks[:matched])
            sequence.named, sequence.unnamed = matched, total - matched
            self._prefilling.append(sequence)

    def _begin(self, now: float) -> None:
        self._started = now
        if not self._prefilling:
            if not self._decoding:
                self.next_event = inf
                return
            self._planned = self._decoding[0][0] - self._steps
            self.next_event = now + self._seconds(self._planned)
            return
        rates, budget = self._rates, CHUNK - len(self._decoding)
        seconds = self._seconds(1)
        for sequence in self._prefilling:
            if budget <= 0:
                break
            tokens = min(budget, sequence.request.input_tokens - sequence.done)
            budget -= tokens
            seconds += tokens * (rates.token + rates.attention * (sequence.done + tokens / 2))
            self._chunks.append((sequence, tokens))
        self._planned = 1
        self.next_event = now + seconds

    def _seconds(self, steps: int) -> float:
        """How long this many steps take in which only decoding is done."""
        n = len(self._decoding)
        once = self._rates.step + self._rates.token * n + self._rates.context_token * self._context
        return steps * once + self._rates.context_token * n * steps * (steps - 1) / 2

    def _steps_by(self, seconds: float) -> int:
        """How many such steps have begun after this many seconds, at least one."""
        n = len(self._decoding)
        once = self._rates.step + self._rates.token * n + self._rates.context_token * self._context
        growth = self._rates.context_token * n / 2  # seconds = (once - growth) · k + growth · k²
        if growth <= 0:
            return max(ceil(seconds / once), 1)
        linear = once - growth
        return max(ceil((sqrt(linear**2 + 4 * growth * seconds) - linear) / (2 * growth)), 1)
