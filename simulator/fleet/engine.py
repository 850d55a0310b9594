"""One engine: a paged prefix cache that evicts leaves first, chunked prefill, and continuous batches.

An engine computes from event to event, and `next_event` is the time of its next one. It combines all steps without
prefill up to the next end of a request. A new request ends that combination early.

As in vLLM, a request is admitted while the step has tokens to compute for it, if the blocks of its whole prompt fit.
No block is reserved for its answer. If an answer needs a block and none is free, the request that was admitted last is
preempted: it loses its blocks, waits before all others, and computes its prompt and its answer so far again.

A full block can be reused once it is computed. Blocks of ended and preempted requests stay until their memory is
needed. The least recently used are evicted first, and the last blocks of a request before its first.

A prefill worker computes a prompt and keeps its blocks until a decode worker has fetched them. A decode worker reserves
memory first, fetches the blocks that it lacks, and computes the last token of the prompt, as vLLM does with NIXL.

Rates are computed from hardware figures at the efficiencies that engines reach: 2 FLOP a parameter at half of the peak,
attention at 0.4 of the peak, and memory at 0.7 of the bandwidth.

One file, because admission, growth and preemption work on the same steps and the same memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil, inf, sqrt
from typing import NamedTuple

from router.policies.rates import CHUNK, Rates
from simulator.fleet.block_cache import BlockCache
from simulator.fleet.sources import WorkerSources
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest


@dataclass(frozen=True, slots=True)
class Profile:
    """An engine: its rates, the tokens that its KV cache holds, and the most requests that it runs at once.

    - `max_queued_requests`: the requests, waiting and running, from which it refuses more; None for no limit.
    - `max_queued_tokens`: the same for the prompt tokens of requests without a first token.
    """

    name: str
    rates: Rates
    kv_tokens: int
    max_requests: int = 256
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


LLAMA_70B = Profile("70B on 8 H100", Rates(0.012, 4.2e-5, 8e-10, 1.8e-8), 1_200_000)
LLAMA_8B = Profile("8B on 1 H100", Rates(0.009, 3.6e-5, 1.3e-9, 5.6e-8), 400_000)


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
    - `generated`: the tokens of its answer when its decoding began, or when it was preempted. The engine computes them
      with its prompt then.
    - `decodes_from`: the engine's steps when its decoding began.
    - `begun`: whether its first token was generated.
    - `preempted`: whether it lost its memory once.
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
    generated: int = 0
    decodes_from: int = 0
    begun: bool = False
    preempted: bool = False

    @property
    def to_compute(self) -> int:
        """The tokens that it computes before its next token: its prompt, and its answer so far."""
        return self.request.input_tokens + self.generated

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of its full blocks, as far as it computes them before its next token."""
        return self.request.finished if self.generated else self.request.blocks


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
    - `preemptions`, `recomputed`: how often a request was preempted, and the tokens that were computed again.
    """

    def __init__(self, profile: Profile, kv_tokens: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.sources: WorkerSources | None = None
        self.preemptions = self.recomputed = 0
        self._profile = profile
        self._rates = profile.rates
        self._max_requests = profile.max_requests
        self._block_tokens = block_tokens
        self.cache = BlockCache(kv_tokens // block_tokens)
        self.next_event = inf
        self._waiting: deque[EngineRequest] = deque()
        self._loading: list[tuple[float, int, EngineRequest]] = []  # heap of (end of its load, number, request)
        self._running: dict[EngineRequest, None] = {}  # prefilling and decoding, in the order of admission
        self._prefilling: deque[EngineRequest] = deque()
        self._decoding: list[tuple[int, int, EngineRequest]] = []  # heap of (step at which it ends, number, sequence)
        self._growing = [0] * block_tokens  # decoding sequences by the step, modulo a block, that needs a new block
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
        return len(self._loading) + len(self._running)

    @property
    def full(self) -> bool:
        """True while it refuses requests, because of a limit of its profile."""
        profile = self._profile
        if profile.max_queued_requests is not None and self.running + self.waiting >= profile.max_queued_requests:
            return True
        if profile.max_queued_tokens is None:
            return False
        waiting = [*self._waiting, *self._prefilling, *(sequence for _, _, sequence in self._loading)]
        return sum(each.request.input_tokens for each in waiting if not each.begun) >= profile.max_queued_tokens

    def submit(
        self,
        request: TracedRequest,
        now: float,
        peer: WorkerSources | None = None,
        prefill_only: bool = False,
        fetched: Handover | None = None,
    ) -> None:
        """Receive a request. Raises ValueError if its prompt and its answer exceed the cache.

        - `peer`: the worker to pull its prefix from, if any.
        - `prefill_only`, `fetched`: as in `EngineRequest`.
        """
        if request.input_tokens + request.output_tokens > self.cache.capacity * self._block_tokens:
            raise ValueError(f"{request.input_tokens} + {request.output_tokens} tokens exceed the cache")
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
        if self._reserve_step(progress):
            self._admit(now)
        progress.removed = self.cache.take_removed()
        if self.sources is not None and self.sources.host is not None:
            progress.host_removed, self.sources.host.removed = self.sources.host.removed, []
        self._begin(now)
        return progress

    def _loaded(self, sequence: EngineRequest, progress: Progress) -> None:
        """Compute the rest of a prompt whose load has ended."""
        self._store(sequence, sequence.ids, sequence.done // self._block_tokens, progress)
        self._prefilling.append(sequence)
        self._running[sequence] = None
        if sequence.fetched is not None:
            progress.fetched.append(sequence.fetched)

    def _finish_steps(self, progress: Progress) -> None:
        if self._planned > 1:  # the blocks of the first step were reserved before it
            self.cache.grow(self._blocks_for(self._steps + 2, self._planned - 1))
        self._steps += self._planned
        self._context += len(self._decoding) * self._planned
        self._planned = 0
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._end(heappop(self._decoding)[2], progress)
        for sequence, tokens in self._chunks:
            sequence.done += tokens
            self._store(sequence, sequence.ids, sequence.done // self._block_tokens, progress)
            if sequence.done < sequence.to_compute:
                continue
            self._prefilling.popleft()
            if not sequence.begun:
                progress.begun.append(sequence)
                sequence.begun = True
            if sequence.prefill_only:
                del self._running[sequence]
                continue
            self._begin_decoding(sequence, progress)
        self._chunks = []

    def _begin_decoding(self, sequence: EngineRequest, progress: Progress) -> None:
        """Generate an answer's next token, and the others in the steps that follow."""
        self._context += sequence.to_compute + 1
        self._numbers += 1
        sequence.decodes_from = self._steps
        self._growing[self._growth_step(sequence)] += 1
        ends = self._steps + sequence.request.output_tokens - sequence.generated - 1
        if ends <= self._steps:
            self._end(sequence, progress)
        else:
            heappush(self._decoding, (ends, self._numbers, sequence))

    def _growth_step(self, sequence: EngineRequest) -> int:
        """Return the steps, modulo a block, in which a decoding sequence needs a new block."""
        return (sequence.decodes_from + 1 - sequence.to_compute) % self._block_tokens

    def _blocks_for(self, first: int, steps: int) -> int:
        """Return how many new blocks decoding needs in a number of steps, from the step `first` on."""
        whole, rest = divmod(steps, self._block_tokens)
        parts = (self._growing[step % self._block_tokens] for step in range(first, first + rest))
        return whole * len(self._decoding) + sum(parts)

    def _steps_in_memory(self, most: int) -> int:
        """Return for how many steps, at most `most`, the free blocks suffice. Those of the first are reserved."""
        free, sequences = self.cache.free, len(self._decoding)
        if sequences * ceil(most / self._block_tokens) <= free:
            return most
        whole = free // sequences
        free -= whole * sequences
        steps = 1 + whole * self._block_tokens
        while steps < most and (free := free - self._growing[(self._steps + steps + 1) % self._block_tokens]) >= 0:
            steps += 1
        return min(steps, most)

    def _reserve_step(self, progress: Progress) -> bool:
        """Reserve the blocks that decoding needs in the next step. Return False if it preempted requests for them."""
        preempted = False
        while (blocks := self._blocks_for(self._steps + 1, 1) if self._decoding else 0) > self.cache.free:
            self._preempt(next(reversed(self._running)), progress)
            preempted = True
        self.cache.grow(blocks)
        return not preempted

    def _preempt(self, sequence: EngineRequest, progress: Progress) -> None:
        """Let a running request wait before all others. Its blocks may be evicted."""
        self.preemptions += 1
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
            computed = sequence.done
        else:
            self._decoding = [each for each in self._decoding if each[2] is not sequence]
            heapify(self._decoding)
            computed = self._stop_decoding(sequence)
            sequence.generated = computed + 1 - sequence.request.input_tokens
            self._store(sequence, sequence.ids, computed // self._block_tokens, progress)
        self.recomputed += computed
        self.cache.release(sequence.held, sequence.unnamed)
        sequence.done = sequence.named = sequence.unnamed = 0
        sequence.held, sequence.preempted = [], True
        del self._running[sequence]
        self._waiting.appendleft(sequence)

    def _stop_decoding(self, sequence: EngineRequest) -> int:
        """Add the blocks of an answer's tokens to its own ones. Return its computed tokens and those of its prompt."""
        computed = sequence.to_compute + self._steps - sequence.decodes_from
        self._growing[self._growth_step(sequence)] -= 1
        self._context -= computed + 1
        sequence.unnamed += ceil(computed / self._block_tokens) - ceil(sequence.to_compute / self._block_tokens)
        return computed

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
        self._stop_decoding(sequence)
        del self._running[sequence]
        finished = sequence.request.finished
        self._store(sequence, finished, len(finished), progress)
        self.cache.release(sequence.held, sequence.unnamed)
        progress.ended.append(sequence)

    def _admit(self, now: float) -> None:
        """Start waiting requests while the next step has tokens left for them, and their whole prompts fit."""
        budget = CHUNK - len(self._decoding) - sum(each.to_compute - each.done for each in self._prefilling)
        while self._waiting and budget > 0 and self.running < self._max_requests:
            sequence = self._waiting[0]
            reusable = sequence.ids[: (sequence.to_compute - 1) // self._block_tokens]
            matched = self.cache.matched(reusable)
            total = ceil(sequence.to_compute / self._block_tokens)
            if not self.cache.acquire(reusable[:matched], total - matched):
                return
            self._waiting.popleft()
            sequence.done = matched * self._block_tokens
            if not sequence.preempted:
                sequence.cached = sequence.done
            self.recomputed -= sequence.done if sequence.preempted else 0
            sequence.held = list(reusable[:matched])
            sequence.named, sequence.unnamed = matched, total - matched
            if sequence.fetched is not None and not sequence.preempted:
                self._fetch(sequence, sequence.fetched, now)
                continue
            if self.sources is not None and not sequence.preempted:
                load = self.sources.load(reusable[matched:], sequence.peer, now)
                if load.blocks:
                    sequence.done = sequence.cached = (matched + load.blocks) * self._block_tokens
                    sequence.loaded = load.outside * self._block_tokens
                    self._numbers += 1
                    heappush(self._loading, (load.ready, self._numbers, sequence))
                    continue
            self._prefilling.append(sequence)
            self._running[sequence] = None
            budget -= sequence.to_compute - sequence.done

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
            self._planned = self._steps_in_memory(self._decoding[0][0] - self._steps)
            self.next_event = now + self._seconds(self._planned)
            if loaded_at < self.next_event and self._planned > 1:
                self._end_at(loaded_at)
            return
        rates, budget = self._rates, CHUNK - len(self._decoding)
        seconds = self._seconds(1)
        for sequence in self._prefilling:
            if budget <= 0:
                break
            tokens = min(budget, sequence.to_compute - sequence.done)
            budget -= tokens
            seconds += tokens * (rates.token + rates.attention * (sequence.done + tokens / 2))
            self._chunks.append((sequence, tokens))
        self._planned = 1
        self.next_event = now + seconds

    def _seconds(self, steps: int) -> float:
        n = len(self._decoding)
        once = self._rates.step_seconds(n, self._context)
        return steps * once + self._rates.context_token * n * steps * (steps - 1) / 2

    def _steps_by(self, seconds: float) -> int:
        """Return how many steps without prefill have begun after `seconds`: at least one."""
        n = len(self._decoding)
        once = self._rates.step_seconds(n, self._context)
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
