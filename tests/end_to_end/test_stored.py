"""Objects stored at one worker (responses, conversations, files, batches) are found there under every policy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from router_under_test import Reply, RouterUnderTest, router, until
from scripted_worker import Exchange, scripted_workers
from simulated_workers import simulated_workers

from router.settings import PolicyName

WORKERS = 4
BLOCK = 16  # of simulated workers


# A policy that reads prompts, one by load, and one by turns.
@pytest.mark.parametrize("policy", [PolicyName.KV_AWARE, PolicyName.LEAST_LOADED, PolicyName.ROUND_ROBIN])
async def test_responses_are_found_under_every_policy(policy: PolicyName) -> None:
    async with simulated_workers(WORKERS) as urls, router(*urls, policy={"name": policy.value}) as routed:
        for _ in range(3):
            first = await routed.openai.responses.with_raw_response.create(
                model="simulated", input="hi", max_output_tokens=2
            )
            name, home = first.parse().id, first.headers["x-kvrouter-worker"]
            for _ in range(WORKERS):
                assert (await routed.openai.responses.retrieve(name)).id == name
                following = await routed.openai.responses.with_raw_response.create(
                    model="simulated", input="And?", previous_response_id=name, max_output_tokens=2
                )
                assert following.headers["x-kvrouter-worker"] == home
        with pytest.raises(openai.NotFoundError):
            await routed.openai.responses.retrieve("resp_none")


async def until_indexed(routed: RouterUnderTest, blocks: int) -> None:
    await until(lambda: routed.metric("kvrouter_index_blocks"), lambda found: found >= blocks)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_continued_responses_are_predicted(stream: bool) -> None:
    async with simulated_workers(2) as urls, router(*urls) as routed:
        await routed.until_live()
        previous, held = None, 0
        for turn in range(4):
            body = {"model": "simulated", "input": f"{turn}. " + "Which prefix is cached? " * 20, "stream": stream}
            body |= {"instructions": "Be brief.", "max_output_tokens": 40, "previous_response_id": previous}
            reply = await routed.call("/v1/responses", body)
            events = [line[len("data: ") :] for line in reply.body.splitlines() if line.startswith(b"data: {")]
            answer = json.loads(events[-1])["response"] if stream else reply.json()
            usage = answer["usage"]
            assert reply.overlap == usage["input_tokens_details"]["cached_tokens"]
            assert reply.overlap >= held - 2 * BLOCK
            previous, held = answer["id"], usage["input_tokens"]
            await until_indexed(routed, (held + usage["output_tokens"] - 1) // BLOCK)


class Store:
    """A worker that keeps what it is given, and knows nothing of the others'."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.kept: set[str] = set()

    async def answer(self, exchange: Exchange) -> None:
        kind, _, name = exchange.target.removeprefix("/v1/").partition("/")
        if exchange.method == "POST" and not name:
            made = f"{_PREFIXES[kind]}{self.number}x{len(self.kept)}"
            wanted = _named(exchange.body)
            if wanted and wanted not in self.kept:
                await exchange.answer(b'{"error": {"message": "not here"}}', "404 Not Found")
                return
            more = {"output_file_id": f"file-{self.number}out{len(self.kept)}"} if kind == "batches" else {}
            self.kept |= {made, *more.values()}
            await exchange.answer(json.dumps({"object": kind, "id": made, **more}).encode())
            return
        status = "200 OK" if name.partition("/")[0] in self.kept else "404 Not Found"
        await exchange.answer(json.dumps({"id": name}).encode(), status)


_PREFIXES = {
    "files": "file-",
    "batches": "batch_",
    "conversations": "conv_",
    "uploads": "upload_",
    "videos": "video_",
    "vector_stores": "vs_",
    "responses": "resp_",
}


def _named(body: bytes) -> str | None:
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    conversation = fields.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation["id"]
    found = fields.get("input_file_id") or fields.get("previous_response_id") or conversation
    return found if isinstance(found, str) else None


@asynccontextmanager
async def stores(policy: str) -> AsyncIterator[RouterUnderTest]:
    async with (
        scripted_workers(*(Store(number).answer for number in range(WORKERS))) as workers,
        router(*(worker.url for worker in workers), policy={"name": policy}) as routed,
    ):
        yield routed


async def made(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    return str(reply.json()["id"])


@pytest.mark.parametrize("policy", ["kv_aware", "round_robin", "random", "least_loaded"])
async def test_files_batches_and_conversations_are_found_under_every_policy(policy: str) -> None:
    async with stores(policy) as routed:
        for kind in ("files", "conversations", "uploads", "videos", "vector_stores"):
            name = await made(await routed.call(f"/v1/{kind}", {}))
            for _ in range(WORKERS):
                assert (await routed.call(f"/v1/{kind}/{name}")).status == 200
        file = await made(await routed.call("/v1/files", {}))
        for _ in range(WORKERS):
            batch = await routed.call("/v1/batches", {"input_file_id": file, "endpoint": "/v1/completions"})
            name = await made(batch)
            assert (await routed.call(f"/v1/batches/{name}")).status == 200
            assert (await routed.call(f"/v1/files/{batch.json()['output_file_id']}/content")).status == 200


@pytest.mark.parametrize("policy", ["kv_aware", "round_robin", "random", "least_loaded"])
@pytest.mark.parametrize("whole", [True, False])
async def test_response_is_sent_to_worker_of_its_conversation(policy: str, whole: bool) -> None:
    async with stores(policy) as routed:
        for _ in range(WORKERS):
            name = await made(await routed.call("/v1/conversations", {}))
            body = {"model": "m", "input": "hi", "conversation": {"id": name} if whole else name}
            for _ in range(WORKERS):
                assert (await routed.call("/v1/responses", body)).status == 200
