"""The engine of one DP rank: continuous batching over a paged prefix cache, with time in place of a GPU.

    submit ──▶ waiting ──▶ running ──▶ finished      each step: running sequences first, then waiting ones, within the
                  ▲           │                      token budget and the maximal number of sequences; without free
                  └─ preempted ┘                     blocks, the latest running sequence returns to waiting. A waiting
                                                     one runs only if all its tokens fit; its answer is not reserved

    submit with a handover ──▶ … ──▶ finished ──▶ held ──▶ released        its KV is sent to another worker
    hold ──▶ adopt ──▶ running                                              its KV was received from another worker

Everything runs on one event loop, and yields to other tasks only during a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from simulator.worker.cache import CachedSequence, PagedPrefixCache
from simulator.worker.host_tier import HostTier
from simulator.worker.settings import SimulatedWorkerSettings
from worker.reporter import Reporter

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
SleepMode: TypeAlias = Literal["abort", "wait", "keep"]


class QueueFullError(RuntimeError):
    """A full queue of an engine."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of an answer, at least one, and the reason of its end."""

    tokens: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Output:
    """One generated token; the last one has a finish reason.

    - `failure`: the reason of a failure. An aborted request has one more output, without a token.
    - `kv_transfer_params`: the address of its KV for another worker, in vLLM's form.
    """

    token: int | None
    cached_tokens: int
    finish_reason: FinishReason | None = None
    failure: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Handover(Protocol):
    """The transfer of a request's KV to another worker. After the engine, its blocks are held until `release`."""

    def computed(self, generation: Generation) -> None:
        """Handle a step that computed more of the prompt, up to `num_computed`."""

    def finished(self, generation: Generation) -> None:
        """Handle the engine's end of the request, with its `finish_reason`."""


ComputeKv: TypeAlias = Callable[[CachedSequence, int, int], None]
"""A function that computes the KV of a sequence's tokens between two positions, in its blocks."""


@dataclass(slots=True)
class EngineStats:
    """Totals of an engine's tokens, requests and steps."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0  # computed tokens, also those after a preemption
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


class Generation:
    """A request in the engine."""

    def __init__(
        self,
        engine: SimulatedEngine,
        sequence: CachedSequence,
        answer: Answer,
        deliver: Callable[[Output], None],
        handover: Handover | None = None,
    ) -> None:
        self.sequence = sequence
        self.prompt_length = len(sequence.tokens)
        self.handover = handover
        self.num_computed = 0  # leading tokens of the sequence with computed KV
        self.num_generated = 0
        self.cached_tokens: int | None = None  # cached tokens of the prompt; None until first scheduled
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._answer = answer
        self._deliver = deliver

    @property
    def is_decoding(self) -> bool:
        """True if only the KV of the last generated token is missing."""
        return self.num_generated > 0 and self.num_computed == len(self.sequence.tokens) - 1

    def cancel(self) -> None:
        """Abort the request and free its blocks, unless it has finished."""
        if self.finish_reason is None:
            self._engine.finish(self, "abort")
            self._deliver(Output(None, self.cached_tokens or 0, "abort"))

    def next_token(self) -> FinishReason | None:
        """Generate and deliver a token. If it is the last one, return the reason."""
        token = self._answer.tokens[self.num_generated]
        self.num_generated += 1
        self.sequence.tokens.append(token)
        reason = self._answer.finish_reason if self.num_generated == len(self._answer.tokens) else None
        self._deliver(Output(token, self.cached_tokens or 0, reason))
        return reason


class SimulatedEngine:
    """A scheduler of one DP rank's requests, which reports its cache. Cancellation ends its loop, `run`."""

    def __init__(
        self, settings: SimulatedWorkerSettings, reporter: Reporter, compute_kv: ComputeKv | None = None
    ) -> None:
        self.cache = PagedPrefixCache(settings.num_blocks, settings.block_size)
        self.host: HostTier | None = None
        if settings.host_blocks:
            self.host = HostTier(self.cache, settings.host_blocks, settings.pull_s_per_token)
        self.stats = EngineStats()
        self.arriving = 0  # requests whose KV other workers compute; they wait too
        self.freed = asyncio.Event()  # set when blocks are freed, and then replaced
        self._compute_kv = compute_kv
        self._held: list[CachedSequence] = []
        self._settings = settings
        self._reporter = reporter
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._work = asyncio.Event()
        self._idle = asyncio.Event()  # set while no request is computed
        self.sleep_level: int | None = None  # while the engine sleeps

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self.arriving

    @property
    def queued_tokens(self) -> int:
        """The prompt tokens of all requests without a first token. Cached and computed ones count, as in vLLM."""
        return sum(each.prompt_length for each in [*self._waiting, *self._running] if not each.num_generated)

    def check_room(self) -> None:
        """Check the requests and their prompt tokens. Raises QueueFullError if either is maximal."""
        settings = self._settings
        if settings.max_queued_tokens is not None and self.queued_tokens >= settings.max_queued_tokens:
            raise QueueFullError(f"prompts of {self.queued_tokens} tokens have no first token yet")
        if self.num_running + self.num_waiting >= settings.max_num_seqs + settings.max_waiting:
            raise QueueFullError(f"{self.num_running} requests are running and {self.num_waiting} waiting")

    def submit(
        self,
        prompt: list[int],
        answer: Answer,
        deliver: Callable[[Output], None],
        adapter: str | None = None,
        cache_salt: str | None = None,
        handover: Handover | None = None,
    ) -> Generation:
        """Add a request, whose outputs `deliver` receives. Raises QueueFullError, and ValueError if it cannot fit."""
        settings = self._settings
        if not prompt or len(prompt) + len(answer.tokens) > settings.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt)} and an answer of {len(answer.tokens)} tokens: "
                f"both are needed and max_model_len is {settings.max_model_len}"
            )
        self.check_room()
        generation = Generation(self, CachedSequence(list(prompt), adapter, cache_salt), answer, deliver, handover)
        self._waiting.append(generation)
        self._work.set()
        return generation

    def hold(self, sequence: CachedSequence) -> bool:
        """Allocate the blocks for all tokens of a sequence that another worker will fill, its cached prefix first.

        Return False if they do not fit. The sequence keeps its blocks until `adopt` or `release`.
        """
        if len(self._running) + len(self._held) >= self._settings.max_num_seqs:
            return False
        if not self.cache.allocate(sequence, len(sequence.tokens)):
            return False
        self._held.append(sequence)
        self._publish()
        return True

    def adopt(
        self, sequence: CachedSequence, answer: Answer, deliver: Callable[[Output], None], cached_tokens: int
    ) -> Generation:
        """Continue a held sequence whose KV is complete, and deliver the first token at once."""
        self._held.remove(sequence)
        generation = Generation(self, sequence, answer, deliver)
        generation.num_computed = generation.prompt_length
        generation.cached_tokens = cached_tokens
        self._running.append(generation)
        if self._settings.prefix_caching:
            self.cache.store(sequence, generation.prompt_length)
            if self.host is not None:
                self.host.store(sequence, 0, generation.prompt_length)
        self._generate(generation)
        self._publish()
        self._work.set()
        return generation

    def release(self, sequence: CachedSequence) -> None:
        """Free a held sequence's blocks, which are no longer read or written."""
        self._held.remove(sequence)
        self._free(sequence)

    def finish(self, generation: Generation, reason: FinishReason) -> None:
        """Remove a request. Its computed blocks stay cached."""
        (self._running if generation in self._running else self._waiting).remove(generation)
        generation.finish_reason = reason
        self.stats.finished[reason] += 1
        if generation.handover is None:
            self._free(generation.sequence)
        else:
            self._held.append(generation.sequence)
            generation.handover.finished(generation)

    def reset_prefix_cache(self) -> bool:
        """Drop the cache and publish that at once. Return False while requests are running."""
        done = self.cache.reset()
        if done and self.host is not None:
            self.host.clear()
        self._publish()
        return done

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Stop computing until `wake`, from level 1 on with an empty cache. `mode` applies to current requests."""
        if mode == "abort":
            for generation in [*self._running, *self._waiting]:
                generation.cancel()
        while mode == "wait" and (self._running or self._waiting):
            self._idle.clear()
            await self._idle.wait()
        self.sleep_level = level
        if level >= 1:
            self.reset_prefix_cache()

    def wake(self) -> None:
        """Resume computing."""
        self.sleep_level = None
        self._work.set()

    def check_integrity(self) -> None:
        """Check that the cache and the running requests agree. Raises AssertionError."""
        self.cache.check_integrity([*(generation.sequence for generation in self._running), *self._held])
        assert not any(generation.sequence.blocks for generation in self._waiting)

    async def run(self) -> None:
        """Run until cancelled. Remaining requests are then aborted."""
        try:
            while True:
                while self.sleep_level is not None or not (self._running or self._waiting):
                    self._idle.set()
                    self._work.clear()
                    await self._work.wait()
                await self._step()
        finally:
            for generation in [*self._running, *self._waiting]:
                generation.cancel()

    async def _step(self) -> None:
        started = asyncio.get_running_loop().time()
        scheduled = self._schedule()
        decoding = sum(generation.is_decoding for generation, _ in scheduled)
        prefilled = sum(count for generation, count in scheduled if not generation.is_decoding)
        self.stats.steps += 1
        self.stats.prefilled_tokens += prefilled
        settings = self._settings
        takes = settings.base_step_s + settings.prefill_s_per_token * prefilled
        takes += settings.decode_s_per_sequence * decoding
        await asyncio.sleep(started + takes - asyncio.get_running_loop().time())
        self._publish()
        for generation, count in scheduled:
            if generation.finish_reason is not None:
                continue  # cancelled during the step
            generation.num_computed += count
            if generation.handover is not None:
                generation.handover.computed(generation)
            if generation.num_computed == len(generation.sequence.tokens):  # otherwise the prompt is not complete
                self._generate(generation)

    def _generate(self, generation: Generation) -> None:
        if generation.num_generated == 0:
            self.stats.prompt_tokens += generation.prompt_length
        self.stats.generation_tokens += 1
        reason = generation.next_token()
        if reason is not None:
            self.finish(generation, reason)

    def _schedule(self) -> list[tuple[Generation, int]]:
        """Choose the requests of the next step, and the number of tokens of each."""
        budget = self._settings.max_num_batched_tokens
        scheduled: list[tuple[Generation, int]] = []
        preempted = False
        position = 0
        while position < len(self._running) and budget:
            generation = self._running[position]
            count = min(budget, len(generation.sequence.tokens) - generation.num_computed)
            if not self._compute(generation, count):
                preempted = True
                self._preempt_latest()  # possibly this generation; then the loop ends
                continue
            scheduled.append((generation, count))
            budget -= count
            position += 1
        while self._waiting and budget and not preempted and len(self._running) < self._settings.max_num_seqs:
            generation = self._waiting[0]
            cached = in_memory = self.cache.hit(generation.sequence)
            if self.host is not None:
                cached = max(cached, self.host.hit(generation.sequence))
            count = min(budget, len(generation.sequence.tokens) - cached)
            generation.num_computed = cached
            if not self._compute(generation, count, cached - in_memory, must_fit=len(generation.sequence.tokens)):
                break
            if generation.cached_tokens is None:
                generation.cached_tokens = cached
                self.stats.prefix_queries += len(generation.sequence.tokens)
                self.stats.prefix_hits += cached
            self._running.append(self._waiting.popleft())
            scheduled.append((generation, count))
            budget -= count
        return scheduled

    def _compute(self, generation: Generation, count: int, loaded: int = 0, must_fit: int = 0) -> bool:
        """Allocate blocks for the next `count` tokens, shared from now on. Return False if they do not fit.

        `must_fit`: the first tokens of the sequence that must fit, although they are not all allocated now.
        `loaded`: the tokens before them that are loaded from the host tier.
        """
        end = generation.num_computed + count
        # The blocks of a handover are allocated at once, so that it is never preempted.
        needed = end if generation.handover is None else max(end, generation.prompt_length)
        if not self.cache.allocate(generation.sequence, needed, must_fit):
            return False
        if self._compute_kv is not None:
            self._compute_kv(generation.sequence, generation.num_computed - loaded, end)
        if self._settings.prefix_caching:
            self.cache.store(generation.sequence, end)
            if self.host is not None:
                self.host.store(generation.sequence, generation.num_computed, end)
        return True

    def _preempt_latest(self) -> None:
        latest = max(place for place, each in enumerate(self._running) if each.handover is None)
        generation = self._running.pop(latest)
        self._free(generation.sequence)
        generation.num_computed = 0
        self._waiting.appendleft(generation)
        self.stats.preemptions += 1

    def _free(self, sequence: CachedSequence) -> None:
        self.cache.free(sequence)
        self.freed.set()
        self.freed = asyncio.Event()

    def _publish(self) -> None:
        self._reporter.report(self.cache.take_events())
        if self.host is not None:
            self._reporter.report(self.host.take_events())
        self._reporter.step()
