"""One engine: a paged prefix cache that evicts leaves first, chunked prefill, and continuous batches.

An engine computes from event to event, and `next_event` is the time of its next one. It combines all steps without
prefill up to the next end of a request. A new request ends that combination early.

A request reserves the blocks of its prompt and its answer when it is admitted, and waits while they do not fit. A full
block can be reused once it is computed. Blocks of ended requests stay until their memory is needed. The least recently
used are evicted first, and the last blocks of a request before its first.

A prefill worker computes a prompt and keeps its blocks until a decode worker has fetched them. A decode worker reserves
memory first, fetches the blocks that it lacks, and computes the last token of the prompt, as vLLM does with NIXL.

Rates are computed from hardware figures at the efficiencies that engines reach: 2 FLOP a parameter at half of the peak,
attention at 0.4 of the peak, and memory at 0.7 of the bandwidth.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from typing import NamedTuple

from router.policies.rates import CHUNK, Rates
from simulator.fleet.sources import WorkerSources
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest


@dataclass(frozen=True, slots=True)
class Profile:
    """An engine: its rates, the tokens that its KV cache holds, and the most requests that it runs at once."""

    name: str
    rates: Rates
    kv_tokens: int
    max_requests: int = 256


LLAMA_70B = Profile("70B on 8 H100", Rates(0.012, 4.2e-5, 8e-10, 1.8e-8), 1_200_000)
LLAMA_8B = Profile("8B on 1 H100", Rates(0.009, 3.6e-5, 1.3e-9, 5.6e-8), 400_000)


class BlockCache:
    """The blocks of an engine: named ones, which prompts can reuse by id, and unnamed ones, which are only counted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.unnamed = 0
        self._used: dict[int, int] = {}  # references by id
        self._idle: OrderedDict[int, None] = OrderedDict()  # used by no request; the first is evicted first
        self.removed: list[int] = []  # since `take_removed`

    @property
    def in_use(self) -> int:
        """The number of blocks that cannot be evicted."""
        return len(self._used) + self.unnamed

    def __contains__(self, block: object) -> bool:
        """Return whether the cache holds a block."""
        return block in self._used or block in self._idle

    def matched(self, ids: tuple[int, ...]) -> int:
        """Return how many leading blocks of a prompt the cache holds."""
        for place, block in enumerate(ids):
            if block not in self._used and block not in self._idle:
                return place
        return len(ids)

    def acquire(self, ids: tuple[int, ...], others: int) -> bool:
        """Use held blocks, and `others` unnamed ones. Return False, and change nothing, if they do not fit."""
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
        """Name a block that was computed. Return False if the cache holds a block of this id already."""
        if block in self._used or block in self._idle:
            return False
        self.unnamed -= 1
        self._used[block] = 1
        return True

    def release(self, ids: list[int], others: int) -> None:
        """Stop using named blocks, given in their order, and `others` unnamed ones."""
        self.unnamed -= others
        for block in reversed(ids):
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
                self._idle[block] = None

    def take_removed(self) -> list[int]:
        """Return the ids of the blocks that were evicted since the last call."""
        removed, self.removed = self.removed, []
        return removed


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request in an engine.

    - `done`: the tokens of its prompt that are cached or computed.
    - `cached`: the tokens of its prompt that the cache held when it was admitted.
    - `held`: the named blocks that it uses.
    - `named`: the number of its leading blocks that are computed.
    - `loaded`: the tokens that were loaded from the pool or a peer.
    - `peer`: the worker that it pulls from, if any.
    - `prefill_only`: whether a decode worker fetches its prompt, and answers it.
    - `fetched`: where a decode worker fetches its prompt from; None if it computes the prompt.
    """

    request: TracedRequest
    done: int = 0
    cached: int = 0
    held: list[int] = field(default_factory=list)
    unnamed: int = 0
    named: int = 0
    loaded: int = 0
    peer: WorkerSources | None = None
    prefill_only: bool = False
    fetched: Handover | None = None


@dataclass(frozen=True, slots=True)
class Handover:
    """A computed prompt that a decode worker fetches.

    - `computed`: the request at the prefill worker, which holds its memory until it is released.
    - `transfer`: returns when a transfer of a number of tokens ends that begins at a time.
    """

    computed: EngineRequest
    transfer: Callable[[int, float], float]


class StoredBlocks(NamedTuple):
    """Consecutive blocks that an engine stored. `parent`: the block before them; None at the start of a prompt."""

    parent: int | None
    blocks: list[int]


@dataclass(slots=True)
class Progress:
    """The first bytes, the ended requests, and the stored and removed blocks of one event.

    - `fetched`: the prompts that were fetched from prefill workers.
    """

    begun: list[EngineRequest] = field(default_factory=list)
    ended: list[EngineRequest] = field(default_factory=list)
    stored: list[StoredBlocks] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    host_stored: list[StoredBlocks] = field(default_factory=list)
    host_removed: list[int] = field(default_factory=list)
    fetched: list[Handover] = field(default_factory=list)


class Engine:
    """An engine that receives requests by `submit` and computes when `advance` is called at `next_event`.

    - `sources`: where it loads blocks from; None for nowhere.
    """

    def __init__(self, profile: Profile, kv_tokens: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.sources: WorkerSources | None = None
        self._rates = profile.rates
        self._max_requests = profile.max_requests
        self._block_tokens = block_tokens
        self.cache = BlockCache(kv_tokens // block_tokens)
        self.next_event = inf
        self._waiting: deque[EngineRequest] = deque()
        self._loading: list[tuple[float, int, EngineRequest]] = []  # heap of (end of its load, number, request)
        self._prefilling: deque[EngineRequest] = deque()
        self._decoding: list[tuple[int, int, EngineRequest]] = []  # heap of (step at which it ends, number, sequence)
        self._context = 0
        self._steps = 0  # taken so far
        self._numbers = 0
        self._started = 0.0
        self._planned = 0  # steps until `next_event`
        self._chunks: list[tuple[EngineRequest, int]] = []  # computed in the step under way

    @property
    def kv_usage(self) -> float:
        """The share of the cache that running requests use."""
        return self.cache.in_use / self.cache.capacity

    @property
    def waiting(self) -> int:
        """The number of requests that have no memory yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of requests that have memory."""
        return len(self._loading) + len(self._prefilling) + len(self._decoding)

    def submit(
        self,
        request: TracedRequest,
        now: float,
        peer: WorkerSources | None = None,
        prefill_only: bool = False,
        fetched: Handover | None = None,
    ) -> None:
        """Receive a request.

        - `peer`: the worker to pull its prefix from, if any.
        - `prefill_only`, `fetched`: as in `EngineRequest`.
        """
        self._waiting.append(EngineRequest(request, peer=peer, prefill_only=prefill_only, fetched=fetched))
        self._wake(now)

    def release(self, computed: EngineRequest, now: float) -> None:
        """Release the memory of a prompt that was computed here and that a decode worker has fetched."""
        self.cache.release(computed.held, computed.unnamed)
        if self._waiting:
            self._wake(now)

    def _wake(self, now: float) -> None:
        """Let waiting requests be admitted at `now`, or after the step under way."""
        if not self._planned:  # nothing to compute: it is idle, or waits for a load
            self.next_event = now
        elif self._planned > 1:
            self._end_at(now)

    def _end_at(self, now: float) -> None:
        """Stop a combined run of steps after the step that is running at `now`."""
        steps = self._steps_by(now - self._started)
        if steps < self._planned:
            self._planned = steps
            self.next_event = self._started + self._seconds(steps)

    def advance(self) -> Progress:
        """End the steps that lead to `next_event`, and begin the next ones. Return what happened."""
        now = self.next_event
        progress = Progress()
        self._finish_steps(progress)
        while self._loading and self._loading[0][0] <= now:
            self._loaded(heappop(self._loading)[2], progress)
        self._admit(now)
        progress.removed = self.cache.take_removed()
        if self.sources is not None and self.sources.host is not None:
            progress.host_removed, self.sources.host.removed = self.sources.host.removed, []
        self._begin(now)
        return progress

    def _loaded(self, sequence: EngineRequest, progress: Progress) -> None:
        """Compute the rest of a prompt whose load has ended."""
        self._store(sequence, sequence.request.blocks, sequence.done // self._block_tokens, progress)
        self._prefilling.append(sequence)
        if sequence.fetched is not None:
            progress.fetched.append(sequence.fetched)

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
            if sequence.prefill_only:
                continue
            self._context += sequence.request.input_tokens + 1
            self._numbers += 1
            ends = self._steps + sequence.request.output_tokens - 1
            if ends <= self._steps:
                self._end(sequence, progress)
            else:
                heappush(self._decoding, (ends, self._numbers, sequence))
        self._chunks = []

    def _store(self, sequence: EngineRequest, ids: tuple[int, ...], count: int, progress: Progress) -> None:
        count = min(count, len(ids))
        run: list[int] | None = None
        for place in range(sequence.named, count):
            block = ids[place]
            if not self.cache.name(block):
                run = None
                continue
            sequence.unnamed -= 1
            sequence.held.append(block)
            if run is None:
                run = []
                progress.stored.append(StoredBlocks(ids[place - 1] if place else None, run))
            run.append(block)
        if self.sources is not None and count > sequence.named:
            in_host = set(self.sources.store(ids[sequence.named : count]))
            progress.host_stored += _runs(ids, sequence.named, count, in_host)
        sequence.named = max(sequence.named, count)

    def _end(self, sequence: EngineRequest, progress: Progress) -> None:
        request = sequence.request
        self._context -= request.input_tokens + request.output_tokens
        self._store(sequence, request.finished, len(request.finished), progress)
        self.cache.release(sequence.held, sequence.unnamed)
        progress.ended.append(sequence)

    def _admit(self, now: float) -> None:
        while self._waiting and self.running < self._max_requests:
            sequence = self._waiting[0]
            request = sequence.request
            reusable = request.blocks[: (request.input_tokens - 1) // self._block_tokens]
            matched = self.cache.matched(reusable)
            tokens = request.input_tokens + (1 if sequence.prefill_only else request.output_tokens)
            total = min(ceil(tokens / self._block_tokens), self.cache.capacity)
            if not self.cache.acquire(request.blocks[:matched], total - matched):
                return
            self._waiting.popleft()
            sequence.done = sequence.cached = matched * self._block_tokens
            sequence.held = list(request.blocks[:matched])
            sequence.named, sequence.unnamed = matched, total - matched
            if sequence.fetched is not None:
                self._fetch(sequence, sequence.fetched, now)
                continue
            if self.sources is not None:
                load = self.sources.load(reusable[matched:], sequence.peer, now)
                if load.blocks:
                    sequence.done = sequence.cached = (matched + load.blocks) * self._block_tokens
                    sequence.loaded = load.outside * self._block_tokens
                    self._numbers += 1
                    heappush(self._loading, (load.ready, self._numbers, sequence))
                    continue
            self._prefilling.append(sequence)

    def _fetch(self, sequence: EngineRequest, handover: Handover, now: float) -> None:
        """Begin to fetch the tokens of a prompt that the cache lacks. The last one is computed."""
        lacking = sequence.request.input_tokens - 1 - sequence.cached
        sequence.loaded, sequence.done = lacking, sequence.request.input_tokens - 1
        ready = handover.transfer(lacking, now) if lacking else now
        self._numbers += 1
        heappush(self._loading, (ready, self._numbers, sequence))

    def _begin(self, now: float) -> None:
        self._started = now
        if not self._prefilling:
            loaded_at = self._loading[0][0] if self._loading else inf
            if not self._decoding:
                self.next_event = loaded_at
                return
            self._planned = self._decoding[0][0] - self._steps
            self.next_event = now + self._seconds(self._planned)
            if loaded_at < self.next_event and self._planned > 1:
                self._end_at(loaded_at)
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
        n = len(self._decoding)
        once = self._rates.step + self._rates.token * n + self._rates.context_token * self._context
        return steps * once + self._rates.context_token * n * steps * (steps - 1) / 2

    def _steps_by(self, seconds: float) -> int:
        """Return how many steps without prefill have begun after `seconds`: at least one."""
        n = len(self._decoding)
        once = self._rates.step + self._rates.token * n + self._rates.context_token * self._context
        growth = self._rates.context_token * n / 2  # seconds = (once - growth) · k + growth · k²
        if growth <= 0:
            return max(ceil(seconds / once), 1)
        linear = once - growth
        return max(ceil((sqrt(linear**2 + 4 * growth * seconds) - linear) / (2 * growth)), 1)


def _runs(ids: Sequence[int], start: int, end: int, blocks: set[int]) -> Iterator[StoredBlocks]:
    """Yield the runs of `blocks` among the blocks of a prompt from `start` to `end`."""
    run: list[int] = []
    for place in range(start, end):
        if ids[place] not in blocks:
            run = []
            continue
        if not run:
            yield StoredBlocks(ids[place - 1] if place else None, run)
        run.append(ids[place])
