"""A router in front of simulated workers, used as its clients use it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import aiohttp
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from router_under_test import Reply, RouterUnderTest, router, until
from scripted_worker import Exchange, scripted_worker
from simulated_workers import simulated_workers

from kvevents import BlockStored, EventBatch
from worker import ZmqEventPublisher

MODEL, ADAPTER, BLOCK = "simulated", "poet", 16
NO_IN_FLIGHT_PREFIXES = {"linger": 0}

numbers = count()


@pytest.fixture(scope="module")
async def workers() -> AsyncIterator[list[str]]:
    async with simulated_workers(2, adapters=(ADAPTER,)) as urls:
        yield urls


@pytest.fixture(scope="module")
async def routed(workers: list[str]) -> AsyncIterator[RouterUnderTest]:
    """A router that predicts from the workers' events alone."""
    async with router(*workers, constants=NO_IN_FLIGHT_PREFIXES) as routed:
        await routed.until_live()
        yield routed


def text(words: int) -> str:
    """Return a text of about `words` words that shares no prefix with other texts of these tests."""
    number = next(numbers)
    return f"{number} begins. " + " ".join(f"word {number} {place}" for place in range(words // 3))


async def match(routed: RouterUnderTest, **question: Any) -> dict[str, Any]:
    reply = await routed.call("/match", {"model": MODEL} | question)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.json()
    return answer


async def until_held(routed: RouterUnderTest, reply: Reply, **prompt: Any) -> int:
    """Wait until the index has a prompt's worker as its holder, and return the reusable tokens."""

    async def held() -> bool:
        answer = await match(routed, **prompt)
        best = answer["matches"][0]
        full = (answer["tokens"] - 1) // BLOCK * BLOCK
        return (best["worker"], best["matched_tokens"]) == (reply.worker, full)

    await until(held)
    answer = await match(routed, **prompt)
    tokens: int = answer["matches"][0]["matched_tokens"]
    return tokens


async def until_answer_held(routed: RouterUnderTest, reply: Reply, messages: list[dict[str, Any]]) -> None:
    """Wait for the events of what was generated, too."""
    computed = reply.json()["usage"]["total_tokens"] - 1  # of its last token there is no KV state

    async def held() -> bool:
        best = (await match(routed, messages=messages))["matches"][0]
        return bool(best["matched_tokens"] >= computed // BLOCK * BLOCK)

    await until(held)


async def complete(routed: RouterUnderTest, prompt: Any, **options: Any) -> Reply:
    reply = await routed.call("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 4} | options)
    assert reply.status == 200, reply.body
    return reply


async def chat(routed: RouterUnderTest, messages: list[dict[str, Any]], **options: Any) -> Reply:
    body = {"model": MODEL, "messages": messages, "max_tokens": 20} | options
    reply = await routed.call("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    return reply


# The OpenAI client


async def test_openai_client_receives_completion(routed: RouterUnderTest, workers: list[str]) -> None:
    raw = await routed.openai.completions.with_raw_response.create(model=MODEL, prompt=text(30), max_tokens=8)
    completion = raw.parse()
    assert completion.choices[0].text
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 8
    assert raw.headers["x-kvrouter-worker"] in workers
    assert raw.headers["x-kvrouter-overlap-tokens"] == "0"


async def test_openai_client_receives_chat(routed: RouterUnderTest) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text(30)}]
    answer = await routed.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"


async def test_streams_equal_whole_responses(routed: RouterUnderTest) -> None:
    prompt = text(30)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    whole = await routed.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=8)
    whole_chat = await routed.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    pieces = await routed.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=8, stream=True)
    assert "".join([piece.choices[0].text async for piece in pieces]) == whole.choices[0].text
    pieces_chat = await routed.openai.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    words, usage = [], None
    async for piece in pieces_chat:
        words += [choice.delta.content or "" for choice in piece.choices]
        usage = piece.usage or usage
    assert "".join(words) == whole_chat.choices[0].message.content
    assert usage is not None
    assert whole_chat.usage is not None
    assert usage.prompt_tokens == whole_chat.usage.prompt_tokens


async def test_models_of_workers_are_listed(routed: RouterUnderTest) -> None:
    models = {model.id: model async for model in await routed.openai.models.list()}
    assert set(models) == {MODEL, ADAPTER}
    assert all(isinstance(model.created, int) for model in models.values())
    cards = {card["id"]: card for card in (await routed.call("/v1/models")).json()["data"]}
    assert (cards[MODEL]["parent"], cards[ADAPTER]["parent"]) == (None, MODEL)


# Prefixes


async def test_predicted_overlap_equals_worker_report(routed: RouterUnderTest) -> None:
    prompt = text(300)
    first = await complete(routed, prompt)
    assert (first.overlap, first.cached) == (0, 0)
    held = await until_held(routed, first, prompt=prompt)
    longer = await complete(routed, prompt + " and " + text(30))
    assert longer.worker == first.worker
    assert longer.overlap == longer.cached
    assert held - BLOCK <= longer.cached <= held + BLOCK


async def test_conversation_stays_with_its_worker(routed: RouterUnderTest) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(200)}]
    replies: list[Reply] = []
    for _ in range(4):
        messages.append({"role": "user", "content": text(20)})
        reply = await chat(routed, messages)
        replies.append(reply)
        await until_held(routed, reply, messages=messages)
        messages.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})
        await until_answer_held(routed, reply, messages)
    assert len({reply.worker for reply in replies}) == 1
    assert [reply.overlap for reply in replies] == [reply.cached for reply in replies]
    prompts = [reply.json()["usage"]["prompt_tokens"] for reply in replies]
    assert all(reply.cached > before for reply, before in zip(replies[1:], prompts, strict=False))


async def test_unrelated_prompts_are_spread(routed: RouterUnderTest, workers: list[str]) -> None:
    replies = await asyncio.gather(*(complete(routed, text(100)) for _ in range(16)))
    assert {reply.worker for reply in replies} == set(workers)


async def test_token_ids_match_the_same_text(routed: RouterUnderTest) -> None:
    prompt = text(100)
    token_ids = (await routed.call("/tokenize", {"model": MODEL, "prompt": prompt})).json()["tokens"]
    first = await complete(routed, token_ids)
    held = await until_held(routed, first, token_ids=token_ids)
    second = await complete(routed, prompt)
    assert (second.worker, second.overlap, second.cached) == (first.worker, held, held)


async def test_batch_is_sent_together_and_overlaps_add_up(routed: RouterUnderTest) -> None:
    prompts = [text(100), text(50), text(70)]
    first = await complete(routed, prompts)
    held = [await until_held(routed, first, prompt=prompt) for prompt in prompts]
    second = await complete(routed, prompts)
    assert (second.worker, second.overlap, second.cached) == (first.worker, sum(held), sum(held))


async def test_adapter_shares_no_blocks_with_model(routed: RouterUnderTest) -> None:
    prompt = text(200)
    plain = await complete(routed, prompt)
    await until_held(routed, plain, prompt=prompt)
    first = await complete(routed, prompt, model=ADAPTER)
    assert (first.overlap, first.cached) == (0, 0)
    held = await until_held(routed, first, prompt=prompt, model=ADAPTER)
    second = await complete(routed, prompt, model=ADAPTER)
    assert (second.worker, second.overlap, second.cached) == (first.worker, held, held)


async def test_match_accepts_adapter_as_model_or_field(routed: RouterUnderTest) -> None:
    prompt = text(100)
    answered = await complete(routed, prompt, model=ADAPTER)
    held = await until_held(routed, answered, prompt=prompt, model=ADAPTER)
    for named, matched in (({"model": ADAPTER}, held), ({"model": MODEL, "lora_name": ADAPTER}, held), ({}, 0)):
        answer = await match(routed, prompt=prompt, **named)
        assert (answer["model"], answer["matches"][0]["matched_tokens"]) == (MODEL, matched)


async def test_cache_salt_separates_prompts(routed: RouterUnderTest) -> None:
    prompt = text(200)
    plain = await complete(routed, prompt)
    await until_held(routed, plain, prompt=prompt)
    first = await complete(routed, prompt, cache_salt="pepper")
    assert (first.overlap, first.cached) == (0, 0)
    held = await until_held(routed, first, prompt=prompt, cache_salt="pepper")
    second = await complete(routed, prompt, cache_salt="pepper")
    assert (second.worker, second.overlap, second.cached) == (first.worker, held, held)
    assert (await complete(routed, prompt, cache_salt="salt")).cached == 0


# Prompts in flight


async def burst(workers: list[str], shared: int, own: int, prompts: int = 8, **proxy: Any) -> Counter[str]:
    """Send prompts with a common start at once, and return the number of prompts per worker."""
    async with router(*workers, proxy=proxy) as routed:
        await routed.until_live()
        start = text(shared)
        replies = await asyncio.gather(*(complete(routed, start + text(own)) for _ in range(prompts)))
        await routed.until_released()
        return Counter(reply.worker for reply in replies)


@pytest.fixture(scope="module")
async def slow_workers() -> AsyncIterator[list[str]]:
    """Their prefills outlast the sending of a burst."""
    async with simulated_workers(2, prefill_s_per_token=0.0002, base_step_s=0.001) as urls:
        yield urls


async def test_prompts_sent_at_once_follow_shared_prefix(slow_workers: list[str]) -> None:
    """Few prompts do not pay for a second copy."""
    assert list((await burst(slow_workers, shared=1500, own=6, prompts=3)).values()) == [3]


async def test_many_prompts_sent_at_once_use_a_second_copy_of_shared_prefix(slow_workers: list[str]) -> None:
    assert set(await burst(slow_workers, shared=1500, own=6)) == set(slow_workers)


async def test_prompts_sent_at_once_are_spread_if_own_parts_are_longer(slow_workers: list[str]) -> None:
    spread = await burst(slow_workers, shared=60, own=600)
    assert set(spread) == set(slow_workers)
    assert min(spread.values()) >= 2


@pytest.mark.parametrize("tokens", [127, 128, 200])
async def test_full_blocks_of_finished_prompt_are_predicted(tokens: int) -> None:
    """The workers publish no events."""
    async with simulated_workers(2, kv_events=None, block_size=64) as silent, router(*silent) as routed:
        token_ids = list(range(1000, 1000 + tokens))
        first = await complete(routed, token_ids)
        second = await complete(routed, token_ids)
        assert second.worker == first.worker
        assert second.overlap == second.cached == (tokens - 1) // 64 * 64


@pytest.mark.parametrize("apart", [{"model": ADAPTER}, {"cache_salt": "pepper"}])
async def test_in_flight_prefixes_are_separated_by_adapter_and_salt(apart: dict[str, str]) -> None:
    async with simulated_workers(1, kv_events=None, adapters=(ADAPTER,)) as silent, router(*silent) as routed:
        prompt = text(100)
        await complete(routed, prompt)
        other = await complete(routed, prompt, **apart)
        assert (other.overlap, other.cached) == (0, 0)
        again = await complete(routed, prompt, **apart)
        assert again.overlap == again.cached > 0


async def test_concurrent_short_prompts_have_no_overlap(routed: RouterUnderTest) -> None:
    replies = await asyncio.gather(*(complete(routed, "hi") for _ in range(20)))
    assert {reply.overlap for reply in replies} == {0}


# Ranks


@pytest.fixture(scope="module")
async def ranked() -> AsyncIterator[RouterUnderTest]:
    """A router in front of one worker with two DP ranks."""
    async with simulated_workers(1, dp_size=2) as urls, router(*urls, constants=NO_IN_FLIGHT_PREFIXES) as routed:
        await routed.until_live()
        yield routed


async def test_prompt_returns_to_its_rank(ranked: RouterUnderTest) -> None:
    prompts = [text(100) for _ in range(8)]
    replies = await asyncio.gather(*(complete(ranked, prompt) for prompt in prompts))
    ranks = [reply.headers["x-kvrouter-dp-rank"] for reply in replies]
    assert set(ranks) == {"0", "1"}
    for prompt, first, rank in zip(prompts, replies, ranks, strict=True):
        held = await until_held(ranked, first, prompt=prompt)
        best, other = (await match(ranked, prompt=prompt))["matches"]
        assert (str(best["dp_rank"]), other["matched_tokens"]) == (rank, 0)
        again = await complete(ranked, prompt)
        assert (again.headers["x-kvrouter-dp-rank"], again.overlap, again.cached) == (rank, held, held)


# What the router does not route


async def ask_worker(url: str, path: str, body: Any = None) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, url + path, json=body) as response:
            return response.status, await response.read()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": MODEL, "prompt": "What holds the cache?"}),
        ("/detokenize", {"model": MODEL, "tokens": [100, 200]}),
        ("/version", None),
        ("/v1/images/generations", {"model": MODEL, "prompt": "x"}),
    ],
)
async def test_other_paths_are_forwarded(routed: RouterUnderTest, workers: list[str], path: str, body: Any) -> None:
    reply = await routed.call(path, body)
    assert (reply.status, reply.body) == await ask_worker(workers[0], path, body)
    assert reply.worker in workers


# The index


async def test_match_accepts_text_messages_and_token_ids(routed: RouterUnderTest) -> None:
    prompt, messages = text(100), [{"role": "user", "content": text(100)}]
    for form, tokenized, answered in (
        ({"prompt": prompt}, {"prompt": prompt}, await complete(routed, prompt)),
        ({"messages": messages}, {"messages": messages}, await chat(routed, messages)),
    ):
        await until_held(routed, answered, **form)
        token_ids = (await routed.call("/tokenize", {"model": MODEL} | tokenized)).json()["tokens"]
        answer = await match(routed, **form)
        assert answer == await match(routed, token_ids=token_ids)
        assert (answer["model"], answer["tokens"]) == (MODEL, len(token_ids))
        best, other = answer["matches"]
        assert best["worker"] == answered.worker
        assert best["tiers"] == {"gpu": best["matched_tokens"], "cpu": 0, "disk": 0, "unknown": 0}
        assert other["matched_tokens"] == 0


async def test_reset_empties_caches_and_index(workers: list[str]) -> None:
    async with router(*workers) as routed:
        await routed.until_live()
        prompts = [text(100) for _ in range(8)]
        replies = await asyncio.gather(*(complete(routed, prompt) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            await until_held(routed, reply, prompt=prompt)
        reset = await routed.call("/reset_prefix_cache", method="POST")
        assert [(each["url"], each["answer"]) for each in reset.json()["workers"]] == [
            (url, {"success": True}) for url in workers
        ]
        assert [rank["blocks"]["gpu"] for worker in await routed.workers() for rank in worker["ranks"]] == [0, 0]
        again = await complete(routed, prompts[0])
        assert (again.overlap, again.cached) == (0, 0)


@pytest.mark.parametrize(("status", "left"), [("200 OK", 0), ("404 Not Found", 32)])
async def test_reset_clears_index_if_worker_agrees(status: str, left: int) -> None:
    """The index is cleared by the response, because this worker publishes no event of the reset."""

    async def script(exchange: Exchange) -> None:
        await exchange.answer(status=status)

    token_ids = list(range(33))
    stored = BlockStored(block_hashes=[1, 2], parent_block_hash=None, token_ids=token_ids[:32], block_size=BLOCK)
    publisher = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", bind=True)
    try:
        publisher.publish(EventBatch(time.time(), [stored]))
        streams = [{"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}]
        async with (
            scripted_worker(script) as worker,
            router(workers=[{"url": worker.url, "streams": streams}]) as routed,
        ):

            async def matched() -> int:
                (match_,) = (await match(routed, model="m", token_ids=token_ids))["matches"]
                tokens: int = match_["matched_tokens"]
                return tokens

            await until(matched, lambda matched: matched == 32)
            reset = await routed.call("/reset_prefix_cache", method="POST")
            assert [each["status"] for each in reset.json()["workers"]] == [int(status[:3])]
            assert await matched() == left
    finally:
        await asyncio.to_thread(publisher.shutdown)


async def test_reset_reports_unreachable_workers(workers: list[str]) -> None:
    async with simulated_workers(1) as gone:
        pass
    async with router(workers[0], *gone) as routed:
        reset = await routed.call("/reset_prefix_cache", method="POST")
        assert reset.status == 207
        reached, missed = reset.json()["workers"]
        assert (reached["status"], missed["status"]) == (200, 0)
        assert "connect" in missed["message"].lower()


# What operators see


async def test_workers_report_lists_ranks(routed: RouterUnderTest, workers: list[str]) -> None:
    report = {worker["worker"]: worker for worker in await routed.workers()}
    assert set(report) == set(workers)
    for worker in report.values():
        assert (worker["model"], worker["up"], worker["problem"]) == (MODEL, True, None)
        (rank,) = worker["ranks"]
        assert (rank["dp_rank"], rank["state"], rank["engine"]) == (0, "live", "vLLM")
        assert rank["load"] == {"requests": 0, "pending": 0, "context": 0}
        assert rank["block_sizes"] == [BLOCK]


async def test_unreachable_worker_is_reported(workers: list[str]) -> None:
    async with simulated_workers(1) as gone:
        pass
    async with router(workers[0], *gone) as routed:
        silent = next(worker for worker in await routed.workers() if worker["worker"] == gone[0])
        assert (silent["up"], silent["ranks"]) == (False, [])
        assert gone[0] in silent["problem"]
        health = await routed.health()
        assert (health["status"], health["workers"], health["workers_up"]) == ("degraded", 2, 1)
        assert await routed.metric("kvrouter_worker_up", worker=gone[0]) == 0
        assert await routed.metric("kvrouter_worker_up", worker=workers[0]) == 1


async def test_router_without_worker_runs_and_reports() -> None:
    async with simulated_workers(1) as gone:
        pass
    async with router(*gone) as routed:
        health = await routed.call("/health")
        assert (health.status, health.json()["status"]) == (200, "no worker answers")
        with pytest.raises(openai.InternalServerError, match="No worker has answered yet"):
            await routed.openai.completions.create(model=MODEL, prompt="x")
        assert (await routed.call("/version")).status == 503


async def test_routing_is_counted_in_metrics(workers: list[str]) -> None:
    async with router(*workers, constants=NO_IN_FLIGHT_PREFIXES) as routed:
        await routed.until_live()
        prompt = text(100)
        first = await complete(routed, prompt)
        held = await until_held(routed, first, prompt=prompt)
        second = await complete(routed, prompt)
        tokens = second.json()["usage"]["prompt_tokens"]
        await routed.call("/v1/completions", {"model": "nobody", "prompt": "x"})
        name = {"model": MODEL}
        answered = {"worker": first.worker, "status": "200"} | name
        assert await routed.metric("kvrouter_requests_total", **answered) == 2
        assert await routed.metric("kvrouter_prompt_tokens_total", **name) == 2 * tokens
        assert await routed.metric("kvrouter_overlap_tokens_total", **name) == held
        assert await routed.metric("kvrouter_time_to_first_byte_seconds_count", **name) == 2
        assert await routed.metric("kvrouter_requests_refused_total", status="404") == 1
        assert await routed.metric("kvrouter_requests_in_flight") == 0
        assert await routed.metric("kvrouter_prefill_tokens_in_flight") == 0
        assert await routed.metric("kvrouter_worker_up") == 2
        assert await routed.metric("kvrouter_index_blocks", worker=first.worker, tier="gpu") >= held / BLOCK
        assert await routed.metric("kvrouter_stream_state", state="live") == 2
