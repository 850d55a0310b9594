"""The contents of the workers of a benchmark: prompts of random tokens, and the event batches that announce them.

A few numbers determine everything, so that publisher and client need no communication: `prompt(worker, number)` is
equal in both.

Each worker's stream ends with a marker: a prompt of one block. Once it is found, all earlier events are applied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from kvevents import BlockStored, EngineHash, EventBatch, WireForm, encode_batch

BLOCK_SIZE = 16  # tokens
# Prompts that grow together in small events, as of requests that decode in one engine step.
PROMPTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of `workers` workers with `prompts` prompts each, of `prompt_blocks` blocks.

    Events store `event_blocks` blocks. Events of a single block have batches of 16, one for each of 16 prompts that
    grow together. Larger events have their own batch, prompt after prompt. `first_worker` separates workloads that
    share an index.
    """

    workers: int
    prompts: int
    prompt_blocks: int
    event_blocks: int
    form: WireForm = WireForm.VLLM_MAPS
    first_worker: int = 0

    @property
    def blocks(self) -> int:
        """The blocks of all workers, without markers."""
        return self.workers * self.prompts * self.prompt_blocks

    @property
    def worker_ids(self) -> range:
        return range(self.first_worker, self.first_worker + self.workers)

    def prompt(self, worker: int, number: int) -> list[int]:
        """Return the tokens of a worker's prompt; number -1 is the marker."""
        blocks = 1 if number < 0 else self.prompt_blocks
        return random_tokens(f"prompt {worker} {number}", blocks * BLOCK_SIZE)

    def batches(self, worker: int) -> Iterator[bytes]:
        """Yield the payloads of a worker's stream, in order."""
        at_once = PROMPTS_AT_ONCE if self.event_blocks == 1 else 1
        for first in range(0, self.prompts, at_once):
            chains = [self._events(worker, first + index) for index in range(at_once)]
            for events in zip(*chains, strict=True):
                yield self._encode(list(events))
        yield self._encode(list(self._events(worker, -1)))

    def _events(self, worker: int, number: int) -> Iterator[BlockStored]:
        tokens = self.prompt(worker, number)
        count = len(tokens) // BLOCK_SIZE
        hashes: list[EngineHash] = [*array("Q", Random(f"hashes {worker} {number}").randbytes(8 * count))]
        for start in range(0, count, self.event_blocks):
            end = start + self.event_blocks
            yield BlockStored(
                block_hashes=hashes[start:end],
                parent_block_hash=hashes[start - 1] if start else None,
                token_ids=tokens[start * BLOCK_SIZE : end * BLOCK_SIZE],
                block_size=BLOCK_SIZE,
                medium="GPU",
            )

    def _encode(self, events: list[BlockStored]) -> bytes:
        return encode_batch(EventBatch(0.0, list(events), 0), self.form)


def random_tokens(seed: str, count: int) -> list[int]:
    """Return token IDs below 65536."""
    return array("H", Random(seed).randbytes(2 * count)).tolist()


def ingest_workload(blocks: int, workers: int, event_blocks: int, form: WireForm, first_worker: int = 0) -> Workload:
    """Return a workload of about `blocks` blocks in prompts of at most 512 blocks (8192 tokens)."""
    each = blocks // workers
    prompt_blocks = min(512, each // PROMPTS_AT_ONCE)
    return Workload(workers, each // prompt_blocks, prompt_blocks, event_blocks, form, first_worker)


def query_workload(blocks: int, workers: int, form: WireForm) -> Workload:
    """Return a workload of about `blocks` blocks in prompts of 8192 blocks (131072 tokens)."""
    return Workload(workers, max(1, blocks // workers // 8192), 8192, 64, form)


def probe_workload(events: int, form: WireForm, worker: int) -> Workload:
    """Return a workload of one worker that stores single blocks, each in its own prompt and batch."""
    return Workload(1, events, 1, 64, form, worker)
