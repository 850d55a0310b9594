"""The engine's scheduling: batching, waiting, preemption, cancelling, and what its steps cost and report."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import random
from collections.abc import Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.cache import CachedSequence
from simulator.worker.engine import Answer, Generation, Output, QueueFullError, SimulatedEngine
from simulator.worker.kv_transfer.memory import BUFFERS, FirstToken, KvMemory
from worker import EventPublisher, Reporter
from worker.kv_transfer.transfer import open_engine

DEADLINE_S = 60.0
FAST = SimulatedWorkerSettings(
    block_size=4,
    num_blocks=256,
    max_model_len=1024,
    base_step_s=0.0,
    prefill_s_per_token=0.0,
    decode_s_per_sequence=0.0,
    kv_events=None,
)


class Recorder(EventPublisher):
    def __init__(self) -> None:
        self.batches: list[EventBatch] = []

    def publish(self, batch: EventBatch) -> None:
        self.batches.append(batch)

    def shutdown(self) -> None:
        return


class Client:
    """Submits one request and gathers its outputs."""

    def __init__(self, engine: SimulatedEngine, prompt: list[int], answer: list[int], **fields: Any) -> None:
        self.outputs: list[Output] = []
        self.done = asyncio.Event()
        self.first = asyncio.Event()
        self.generation = engine.submit(prompt, Answer(answer, "length"), self.take, **fields)

    def take(self, output: Output) -> None:
        self.outputs.append(output)
        self.first.set()
        if output.finish_reason:
            self.done.set()

    @property
    def tokens(self) -> list[int | None]:
        return [output.token for output in self.outputs]

    @property
    def cached(self) -> int:
        return self.outputs[0].cached_tokens


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE_S))


@asynccontextmanager
async def started(settings: SimulatedWorkerSettings = FAST, publisher: EventPublisher | None = None):
    reporter = Reporter(publisher or Recorder())
    reporter.step()  # it begins with a clear
    engine = SimulatedEngine(settings, reporter)
    loop = asyncio.create_task(engine.run())
    yield engine
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await asyncio.to_thread(reporter.shutdown)
    engine.check_integrity()


def test_request_receives_answer_token_by_token():
    async def scenario() -> None:
        async with started() as engine:
            client = Client(engine, [1, 2, 3], [7, 8, 9])
            await client.done.wait()
            assert client.tokens == [7, 8, 9]
            assert [output.finish_reason for output in client.outputs] == [None, None, "length"]
            assert engine.stats.finished == {"stop": 0, "length": 1, "abort": 0}
            assert (engine.num_running, engine.num_waiting, engine.cache.usage) == (0, 0, 0)

    run(scenario())


def test_long_prompt_is_prefilled_in_chunks():
    async def scenario() -> None:
        async with started(replace(FAST, max_num_batched_tokens=32)) as engine:
            client = Client(engine, list(range(100)), [7])
            await client.done.wait()
            assert engine.stats.steps == 4
            assert engine.stats.prefilled_tokens == 100

    run(scenario())


def test_only_uncached_tokens_are_prefilled():
    async def scenario() -> None:
        async with started() as engine:
            await Client(engine, list(range(100)), [7]).done.wait()
            again = Client(engine, list(range(102)), [7])
            await again.done.wait()
            assert again.cached == 100
            assert engine.stats.prefilled_tokens == 102
            assert (engine.stats.prefix_queries, engine.stats.prefix_hits) == (202, 100)

    run(scenario())


def test_generated_tokens_are_cached_except_last():
    async def scenario() -> None:
        async with started() as engine:
            await Client(engine, list(range(6)), [50, 51, 52]).done.wait()  # KV for 8 tokens: two blocks
            following = Client(engine, [*range(6), 50, 51, 52, 60, 61, 62], [7])
            await following.done.wait()
            assert following.cached == 8

            await Client(engine, list(range(100, 106)), [50, 51]).done.wait()  # KV for 7: one block
            following = Client(engine, [*range(100, 106), 50, 51, 52], [7])
            await following.done.wait()
            assert following.cached == 4

    run(scenario())


def test_requests_beyond_max_num_seqs_wait_in_order():
    async def scenario() -> None:
        async with started(replace(FAST, max_num_seqs=2)) as engine:
            finished: list[int] = []
            clients = [Client(engine, [number], [1] * 20) for number in range(6)]

            async def follow(number: int) -> None:
                await clients[number].first.wait()
                assert engine.num_running <= 2
                await clients[number].done.wait()
                finished.append(number)

            await asyncio.gather(*(follow(number) for number in range(6)))
            assert finished == sorted(finished)

    run(scenario())


def test_full_queue_rejects_request():
    async def scenario() -> None:
        async with started(replace(FAST, max_num_seqs=1, max_waiting=2, base_step_s=0.01)) as engine:
            clients = [Client(engine, [1], [1] * 3) for _ in range(3)]
            with pytest.raises(QueueFullError):
                Client(engine, [1], [1])
            await asyncio.gather(*(client.done.wait() for client in clients))
            await Client(engine, [1], [1]).done.wait()

    run(scenario())


def test_cancelled_request_frees_slot_and_stays_cached():
    async def scenario() -> None:
        async with started(replace(FAST, max_num_seqs=1, base_step_s=0.001)) as engine:
            endless = Client(engine, list(range(8)), [1] * 1000)
            waiting = Client(engine, list(range(9)), [1])
            await endless.first.wait()
            endless.generation.cancel()
            endless.generation.cancel()
            assert endless.outputs[-1].finish_reason == "abort"
            await waiting.done.wait()
            assert waiting.cached == 8
            assert engine.stats.finished == {"stop": 0, "length": 1, "abort": 1}

    run(scenario())


def test_waiting_request_can_be_cancelled():
    async def scenario() -> None:
        async with started(replace(FAST, max_num_seqs=1, base_step_s=0.001)) as engine:
            running = Client(engine, [1], [1] * 5)
            waiting = Client(engine, [2], [1])
            await running.first.wait()
            waiting.generation.cancel()
            assert engine.num_waiting == 0
            await running.done.wait()

    run(scenario())


def test_latest_request_is_preempted_without_free_blocks_and_finishes_later():
    async def scenario() -> None:
        settings = replace(FAST, num_blocks=10, max_model_len=40)
        async with started(settings) as engine:
            clients = [Client(engine, [10 * number + each for each in range(8)], [5] * 24) for number in range(3)]
            await asyncio.gather(*(client.done.wait() for client in clients))
            assert engine.stats.preemptions > 0
            assert all(client.tokens == [5] * 24 for client in clients)
            assert engine.stats.prompt_tokens == 24

    run(scenario())


def test_prompt_is_admitted_only_if_the_whole_of_it_fits():
    async def scenario() -> None:
        settings = replace(FAST, num_blocks=16, max_model_len=64, max_num_batched_tokens=8, base_step_s=0.001)
        async with started(settings) as engine:
            running = Client(engine, [1] * 24, [5] * 20)  # 6 to 11 of 16 blocks
            await running.first.wait()
            waiting = Client(engine, [2] * 44, [6])  # its first chunk would fit
            small = Client(engine, [3] * 4, [7])  # it waits behind, although it would fit
            while len(running.outputs) < 15:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert (engine.num_running, engine.num_waiting) == (1, 2)
            await asyncio.gather(waiting.done.wait(), small.done.wait())
            assert engine.stats.preemptions == 0

    run(scenario())


def test_answers_grow_without_a_reservation_until_the_latest_is_preempted_and_computed_again():
    async def scenario() -> None:
        settings = replace(FAST, num_blocks=8, max_model_len=32, prefix_caching=False)
        async with started(settings) as engine:
            first, second = Client(engine, [1] * 8, [5] * 16), Client(engine, [2] * 8, [6] * 16)  # 6 blocks each
            await asyncio.gather(first.done.wait(), second.done.wait())
            assert engine.stats.preemptions == 1
            assert engine.stats.prefilled_tokens > 16, "it computed tokens of the second twice"
            assert (len(first.tokens), len(second.tokens)) == (16, 16)

    run(scenario())


def test_prompt_tokens_without_a_first_token_are_limited():
    async def scenario() -> None:
        async with started(replace(FAST, max_queued_tokens=10, base_step_s=0.001)) as engine:
            first = Client(engine, [1] * 9, [5])
            second = Client(engine, [1] * 9, [5])  # the limit is not reached yet
            with pytest.raises(QueueFullError, match="18 tokens"):
                Client(engine, [2], [5])
            await asyncio.gather(first.done.wait(), second.done.wait())
            Client(engine, [2], [5])

    run(scenario())


def test_cancelled_engine_aborts_remaining_requests():
    async def scenario() -> None:
        async with started(replace(FAST, max_num_seqs=1, base_step_s=0.001)) as engine:
            clients = [Client(engine, [1], [1] * 1000), Client(engine, [2], [1])]
            await clients[0].first.wait()
        assert [client.outputs[-1].finish_reason for client in clients] == ["abort", "abort"]

    run(scenario())


def test_request_that_never_fits_is_rejected():
    async def scenario() -> None:
        async with started() as engine:
            with pytest.raises(ValueError, match="max_model_len"):
                Client(engine, [1] * 1000, [1] * 25)
            with pytest.raises(ValueError, match="prompt"):
                Client(engine, [], [1])

    run(scenario())


def test_reset_is_published_at_once_and_fails_during_requests():
    async def scenario() -> None:
        recorder = Recorder()
        async with started(replace(FAST, base_step_s=0.001), recorder) as engine:
            client = Client(engine, list(range(8)), [1] * 1000)
            await client.first.wait()
            assert not engine.reset_prefix_cache()
            client.generation.cancel()
            assert engine.reset_prefix_cache()
            assert recorder.batches[-1].events[-1] == AllBlocksCleared()
            again = Client(engine, list(range(8)), [1])
            await again.done.wait()
            assert again.cached == 0

    run(scenario())


def test_step_publishes_batch_before_delivering_tokens():
    async def scenario() -> None:
        recorder = Recorder()
        async with started(FAST, recorder) as engine:
            clients = [Client(engine, [number] * 9, [1]) for number in range(3)]
            await clients[0].first.wait()
            [_, batch] = recorder.batches  # the first batch clears blocks of an earlier process
            assert [event.token_ids for event in batch.events] == [[number] * 8 for number in range(3)]
            assert batch.dp_rank is None

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_events_follow_cache_under_pressure_and_answers_are_complete(seed):
    async def scenario() -> None:
        source = random.Random(seed)
        recorder = Recorder()
        settings = replace(
            FAST, num_blocks=24, max_model_len=96, max_num_seqs=5, max_num_batched_tokens=24, max_waiting=100
        )
        async with started(settings, recorder) as engine:
            clients = []
            for _ in range(60):
                prompt = [source.randrange(2) for _ in range(source.randrange(1, 60))]
                answer = [source.randrange(2) for _ in range(source.randrange(1, 30))]
                adapter = source.choice([None, "poet"])
                clients.append((answer, Client(engine, prompt, answer, adapter=adapter)))
                if source.random() < 0.2:
                    source.choice(clients)[1].generation.cancel()
                for _ in range(source.randrange(4)):
                    await asyncio.sleep(0)
                    engine.check_integrity()
            await asyncio.gather(*(client.done.wait() for _, client in clients))
            for answer, client in clients:
                aborted = client.outputs[-1].finish_reason == "abort"
                assert client.tokens == answer or (aborted and client.tokens[:-1] == answer[: len(client.tokens) - 1])
            believed: dict[Any, int] = {}
            for batch in recorder.batches:
                for event in batch.events:
                    if isinstance(event, BlockStored):
                        for each in event.block_hashes:
                            believed[each] = believed.get(each, 0) + 1
                    elif isinstance(event, BlockRemoved):
                        for each in event.block_hashes:
                            believed[each] -= 1
                            assert believed[each] >= 0
            assert 0 < sum(believed.values()) <= 24

    run(scenario())


def test_cached_prompt_needs_less_time():
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        settings = replace(FAST, num_blocks=600, max_model_len=2400, prefill_s_per_token=0.0005, base_step_s=0.001)
        async with started(settings) as engine:
            took = []
            for _ in range(4):
                begin = clock()
                await Client(engine, list(range(2000)), [1]).done.wait()
                took.append(clock() - begin)
            assert took[0] >= 1.0
            assert min(took[1:]) < took[0]  # one of three, because a busy machine can delay each

    run(scenario())


class Kept:
    """A handover that keeps the blocks until the test releases them."""

    def __init__(self) -> None:
        self.progress: list[int] = []
        self.generation: Generation | None = None

    def computed(self, generation: Generation) -> None:
        self.progress.append(generation.num_computed)

    def finished(self, generation: Generation) -> None:
        self.generation = generation


def test_handover_receives_steps_and_keeps_blocks_until_release():
    async def scenario() -> None:
        async with started(replace(FAST, max_num_batched_tokens=32)) as engine:
            kept = Kept()
            client = Client(engine, list(range(70)), [7], handover=kept)
            await client.done.wait()
            assert kept.progress == [32, 64, 70]
            assert (engine.num_running, engine.num_waiting) == (0, 0)
            assert kept.generation is not None
            assert len(kept.generation.sequence.blocks) == 18
            engine.check_integrity()
            assert not engine.reset_prefix_cache()
            engine.release(kept.generation.sequence)
            assert engine.cache.usage == 0

    run(scenario())


def test_handover_is_never_preempted():
    async def scenario() -> None:
        small = replace(FAST, num_blocks=16, max_model_len=64, max_num_batched_tokens=4, prefix_caching=False)
        async with started(small) as engine:
            growing = Client(engine, [1], [1] * 60)
            await growing.first.wait()
            kept = Kept()
            moved = Client(engine, list(range(40)), [7], handover=kept)  # 10 of 16 blocks, from its first step on
            await moved.done.wait()
            assert kept.progress == sorted(set(kept.progress))  # nothing was computed twice
            assert kept.generation is not None
            engine.release(kept.generation.sequence)
            await growing.done.wait()

    run(scenario())


def test_sequence_with_received_kv_continues_at_once():
    async def scenario() -> None:
        recorder = Recorder()
        async with started(publisher=recorder) as engine:
            sequence = CachedSequence(list(range(9)))
            assert engine.hold(sequence)
            engine.check_integrity()
            outputs: list[Output] = []
            done = asyncio.Event()

            def take(output: Output) -> None:
                outputs.append(output)
                if output.finish_reason:
                    done.set()

            engine.adopt(sequence, Answer([50, 51, 52], "length"), take, cached_tokens=4)
            assert [output.token for output in outputs] == [50]
            await done.wait()
            assert [(output.token, output.cached_tokens) for output in outputs] == [(50, 4), (51, 4), (52, 4)]
            assert engine.stats.prefilled_tokens == 0
            following = Client(engine, list(range(12)), [7])
            await following.done.wait()
            assert following.cached == 8
        stored = [event for batch in recorder.batches for event in batch.events if isinstance(event, BlockStored)]
        assert stored[0].token_ids == list(range(8))

    run(scenario())


def test_sequence_is_held_only_if_all_blocks_fit():
    async def scenario() -> None:
        async with started(replace(FAST, num_blocks=16, max_model_len=64, max_num_seqs=2)) as engine:
            first, second, third = (CachedSequence([start] * 40) for start in (1, 2, 3))
            assert engine.hold(first)
            assert not engine.hold(second)
            freed = engine.freed
            engine.release(first)
            assert freed.is_set()
            assert engine.hold(CachedSequence([4]))
            assert engine.hold(second)
            assert not engine.hold(CachedSequence([5]))  # max_num_seqs
            assert third.blocks == []

    run(scenario())


BLOCK, BLOCKS = 4, 16


def memory(model: str = "m") -> KvMemory:
    engine = open_engine("tcp", host="127.0.0.1")
    made = KvMemory(engine, BLOCKS, BLOCK, 2, model)
    engine.close()
    return made


SHARED = memory()


def sequence(tokens: list[int], adapter: str | None = None, seed: int = 0) -> CachedSequence:
    """Tokens in blocks that lie anywhere."""
    blocks = random.Random(seed).sample(range(BLOCKS), -(-len(tokens) // BLOCK))
    return CachedSequence(tokens, adapter, blocks=blocks)


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=BLOCK * BLOCKS),
    cuts=st.lists(st.integers(0, BLOCK * BLOCKS), max_size=4),
    seed=st.integers(0, 100),
)
def test_kv_bytes_do_not_depend_on_chunks(tokens: list[int], cuts: list[int], seed: int) -> None:
    computed = sequence(tokens, seed=seed)
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {0, len(tokens)})
    for start, end in itertools.pairwise(ends):
        SHARED.compute(computed, start, end)
    assert SHARED.wrong_pages(computed, len(tokens)) == 0


def test_kv_bytes_depend_on_tokens_adapter_and_model() -> None:
    made, tokens = memory(), list(range(10))
    computed = sequence(tokens)
    made.compute(computed, 0, 10)
    other_first = CachedSequence([7, *tokens[1:]], blocks=computed.blocks)
    assert made.wrong_pages(other_first, 10) == 3  # and with it all that follow
    other_last = CachedSequence([*tokens[:-1], 7], blocks=computed.blocks)
    assert made.wrong_pages(other_last, 10) == 1
    assert made.wrong_pages(CachedSequence(tokens, "poet", blocks=computed.blocks), 10) == 3
    args, others = made.args(), memory("other")
    others.compute(computed, 0, 10)
    assert args.kv_data_ptrs != others.args().kv_data_ptrs
    assert page(others, 0, computed.blocks[0]) != page(made, 0, computed.blocks[0])


def test_wrong_byte_is_detected_and_spreads() -> None:
    made, computed = memory(), sequence(list(range(12)))
    made.compute(computed, 0, 8)
    for buffer in range(BUFFERS):
        for block in (0, 1):
            byte = page(made, buffer, computed.blocks[block])
            byte[-1] ^= 1
            assert made.wrong_pages(computed, 8) == 1
            byte[-1] ^= 1
    assert made.wrong_pages(computed, 8) == 0
    page(made, 2, computed.blocks[1])[-1] ^= 1
    made.compute(computed, 8, 12)  # from a wrong token
    assert made.wrong_pages(computed, 12) == 2


def test_first_token_is_read_as_written() -> None:
    made, first = memory(), FirstToken(2**63 - 1, 2**32 - 1, 5, 4)
    made.write_first_token(1, first)
    assert made.read_first_token(1) == first
    assert made.read_first_token(0) == FirstToken(0, 0, 0, 0)


def page(made: KvMemory, buffer: int, block: int) -> ctypes.Array[ctypes.c_uint8]:
    """A page's bytes, in memory itself."""
    args = made.args()
    size = args.kv_item_lens[buffer]
    return (ctypes.c_uint8 * size).from_address(args.kv_data_ptrs[buffer] + block * size)
