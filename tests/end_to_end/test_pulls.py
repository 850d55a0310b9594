"""Pulls from peers: what workers receive byte by byte, and what their answers show."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_workers
from simulated_workers import FAST

from benchmarks.ports import free_ports
from kvevents import BlockStored, EventBatch
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from worker import ZmqEventPublisher

BLOCK, IN_MEMORY, IN_HOST_TIER = 32, 50, 40  # blocks of the holder
PROMPT = list(range(1000, 1000 + BLOCK * IN_MEMORY + 5))
PULLED = BLOCK * IN_HOST_TIER
COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 1}).encode()
SOURCE = re.compile(
    rb'"remote_kv_source":\{"kv_request_id":"([0-9a-f-]{36})","remote_host":"([^"]+)","remote_port":(\d+)\}'
)


class Workers:
    """Workers that answer completions. The first one holds the prompt, a part of it in its host tier.

    - `cached`: the cached tokens that answers report.
    - `refusals`: the number of requests to answer with 503.
    """

    def __init__(self) -> None:
        self.cached = PULLED
        self.refusals = 0
        self.scripted: list[ScriptedWorker] = []

    async def answer(self, exchange: Exchange) -> None:
        if self.refusals:
            self.refusals -= 1
            await exchange.answer(status="503 Service Unavailable")
            return
        details = {"cached_tokens": self.cached}
        usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 1, "prompt_tokens_details": details}
        answer = {"choices": [], "usage": usage, "kv_transfer_params": {"remote_block_ids": [1]}}
        await exchange.answer(json.dumps(answer).encode())

    @property
    def received(self) -> list[Exchange]:
        """The requests that all workers received, in no order."""
        return [each for worker in self.scripted for each in worker.exchanges if each.target == COMPLETIONS]


@asynccontextmanager
async def pulling(
    count: int, roles: tuple[str, ...] = (), **sections: Any
) -> AsyncIterator[tuple[Workers, RouterUnderTest]]:
    """Run workers and a router that knows what the first one holds."""
    workers = Workers()
    async with AsyncExitStack() as stack:
        publishers = [ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True) for _ in range(count)]
        for publisher in publishers:
            stack.callback(publisher.shutdown)
        workers.scripted = await stack.enter_async_context(scripted_workers(*[workers.answer] * count))
        known: list[dict[str, Any]] = []
        for number, (worker, publisher) in enumerate(zip(workers.scripted, publishers, strict=True)):
            worker.sources = b"{}"  # as vLLM answers
            streams = [{"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}]
            known.append({"url": worker.url, "name": f"w{number}", "block_size": BLOCK, "streams": streams})
            known[-1] |= {"role": roles[number]} if roles else {}
        known[0]["pull_port"] = 6000
        proxy = {"client_routing": True} | sections.pop("proxy", {})
        routed = await stack.enter_async_context(router(workers=known, proxy=proxy, constants=NOW, **sections))
        await routed.until_live()
        hashes: list[Any] = list(range(1, IN_MEMORY + 1))
        for blocks, medium in ((IN_MEMORY, "GPU"), (IN_HOST_TIER, "CPU")):
            tokens = PROMPT[: blocks * BLOCK]
            event = BlockStored(hashes[:blocks], None, tokens, BLOCK, medium=medium)
            publishers[0].publish(EventBatch(time.time(), [event]))
        await routed.until_metric(IN_HOST_TIER, "kvrouter_index_blocks", tier="cpu")
        yield workers, routed


async def ask(routed: RouterUnderTest, headers: dict[str, str] | None = None, body: bytes = BODY) -> Any:
    reply = await routed.call(COMPLETIONS, body, headers=headers)
    assert reply.status == 200, reply.body
    return reply


TO_SECOND = {"x-smg-target-worker": "w1"}
NOW = {"linger": 0}
P2P: dict[str, Any] = {"pulls": {"protocol": "p2p"}}


async def test_request_names_the_peer_and_its_answer_is_judged() -> None:
    async with pulling(2, **P2P) as (workers, routed):
        explained = await routed.call("/explain", {"request": json.loads(BODY), "path": COMPLETIONS})
        (other,) = [each for each in explained.json()["candidates"] if each["worker"] == "w1"]
        assert other["source"] == {
            "name": "peers",
            "tokens": PULLED,
            "price": 0.25,
            "seconds": pytest.approx(0.005 + 1e-5 * PULLED),
            "peer": {"worker": "w0", "dp_rank": 0},
        }
        matches = (await routed.call("/match", {"model": "m", "token_ids": PROMPT})).json()["matches"]
        assert {each["worker"]: (each["matched_tokens"], each.get("pullable")) for each in matches} == {
            "w0": (BLOCK * IN_MEMORY, None),
            "w1": (0, PULLED),
        }
        ids = set()
        theirs = {"remote_kv_source": {"kv_request_id": "1", "remote_host": "203.0.113.9", "remote_port": 1}}
        for body in (BODY, json.dumps(json.loads(BODY) | {"kv_transfer_params": theirs}).encode()):
            await ask(routed, TO_SECOND, body)
            received = workers.scripted[1].last.body
            found = SOURCE.search(received)
            assert found is not None, received
            ids.add(found[1])
            assert found.groups()[1:] == (b"127.0.0.1", b"6000")
            if body is BODY:
                assert received == BODY[:-1] + b',"kv_transfer_params":{%b}}' % found[0]
            else:
                assert json.loads(received) == json.loads(BODY) | json.loads(b'{"kv_transfer_params":{%b}}' % found[0])
        assert len(ids) == 2
        assert not SOURCE.search((await ask(routed, {"x-smg-target-worker": "w0"}) and workers.scripted[0].last).body)
        await routed.until_metric(2, "kvrouter_pulls_total", result="pulled")
        assert await routed.metric("kvrouter_pulled_tokens_total") == 2 * PULLED
        assert await routed.metric("kvrouter_audit_wrong_tokens_total", worker="w1") == 0
        await routed.until_released()


async def test_failed_pulls_are_counted_and_end_after_three_in_a_row() -> None:
    async with pulling(2, **P2P) as (workers, routed):
        workers.cached = 0
        for number in range(5):
            await ask(routed, TO_SECOND)
            await routed.until_released()
            assert bool(SOURCE.search(workers.scripted[1].last.body)) == (number < 3)
        assert await routed.metric("kvrouter_pulls_total", result="failed") == 3
        assert await routed.metric("kvrouter_pulled_tokens_total") == 0


async def test_retry_pulls_with_a_new_id_also_from_a_draining_worker() -> None:
    async with pulling(3, **P2P) as (workers, routed):
        await routed.call("/workers/drain", {"name": "w0"})
        workers.refusals = 1
        await ask(routed)
        first, second = (SOURCE.search(each.body) for each in workers.received)
        assert first is not None
        assert second is not None
        assert first[1] != second[1]
        assert first[3] == second[3] == b"6000"
        await routed.until_released()


async def test_header_names_the_peer_to_a_sidecar() -> None:
    sections: dict[str, Any] = {"pulls": {"protocol": "sidecar"}, "proxy": {"engine_fields": "pass"}}
    async with pulling(2, **sections) as (workers, routed):
        await ask(routed, TO_SECOND | {"x-kv-cache-source-host-port": "203.0.113.9:1"})
        last = workers.scripted[1].last
        assert last.header("x-kv-cache-source-host-port") == [workers.scripted[0].url.removeprefix("http://").encode()]
        assert last.body == BODY


async def test_nothing_is_pulled_without_the_setting() -> None:
    async with pulling(2) as (workers, routed):
        await ask(routed, TO_SECOND)
        assert workers.scripted[1].last.body == BODY


async def test_prefill_pulls_from_a_decode_worker() -> None:
    apart: dict[str, Any] = {"disaggregation": {"decode_computes": False}} | P2P
    async with pulling(2, ("decode", "prefill"), **apart) as (workers, routed):
        await ask(routed)
        (decode,), (prefill,) = (worker.exchanges for worker in workers.scripted)
        params = json.loads(prefill.body)["kv_transfer_params"]
        assert params["do_remote_decode"] is True
        assert params["remote_kv_source"].keys() == {"kv_request_id", "remote_host", "remote_port"}
        assert params["remote_kv_source"]["remote_port"] == 6000
        assert json.loads(decode.body)["kv_transfer_params"] == {"remote_block_ids": [1]}
        await routed.until_metric(1, "kvrouter_pulls_total", result="unknown")


def streamed_tokens(body: bytes) -> list[int]:
    """Return the token ids of a streamed answer."""
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", ())]


async def test_simulated_prefill_pulls_what_a_decode_worker_generated() -> None:
    async with AsyncExitStack() as stack:
        known: list[dict[str, Any]] = []
        for role, port in zip(("decode", "prefill", "prefill"), free_ports(3), strict=True):
            settings = SimulatedWorkerSettings(
                **FAST, disaggregation="nixl", role=role, host_blocks=400, pull_port=port
            )
            url = await stack.enter_async_context(running(settings))
            known.append({"url": url, "name": f"w{len(known)}", "role": role, "pull_port": port})
        sections: dict[str, Any] = {
            "constants": {"linger": 0},
            "disaggregation": {"decode_computes": False},
        } | P2P
        routed = await stack.enter_async_context(router(workers=known, **sections))
        await routed.until_live()
        prompt = [10 + number % 300 for number in range(1300)]

        def body_of(tokens: list[int]) -> dict[str, Any]:
            asked = {"model": "simulated", "prompt": tokens, "max_tokens": 200, "ignore_eos": True}
            return asked | {"stream": True, "return_token_ids": True}

        async def answer(tokens: list[int]) -> tuple[Any, list[int]]:
            reply = await routed.call(COMPLETIONS, body_of(tokens))
            assert reply.status == 200, reply.body
            assert reply.headers["x-kvrouter-worker"] == "w0"
            return reply, streamed_tokens(reply.body)

        first, generated = await answer(prompt)
        longer = [*prompt, *generated, *range(20, 60)]
        held = (len(prompt) + len(generated) - 1) // 16 * 16

        async def pullable() -> dict[str, int]:
            matches = (await routed.call("/match", {"model": "simulated", "token_ids": longer})).json()["matches"]
            return {each["worker"]: each.get("pullable", 0) for each in matches}

        computed_by = first.headers["x-kvrouter-prefill-worker"]
        (other,) = {"w1", "w2"} - {computed_by}
        await until(pullable, lambda found: found[other] == held)
        await routed.call("/workers/drain", {"name": computed_by})
        second, again = await answer(longer)
        assert second.headers["x-kvrouter-prefill-worker"] == other
        await routed.until_metric(1, "kvrouter_pulls_total", result="unknown")

        async def of_worker(name: str) -> float:
            (url,) = (each["url"] for each in known if each["name"] == name)
            async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
                families = text_string_to_metric_families(await response.text())
                samples = [sample for family in families for sample in family.samples]
            return sum(sample.value for sample in samples if sample.name == "vllm:prefix_cache_hits_total")

        assert await of_worker(other) == held
        alone = await stack.enter_async_context(running(SimulatedWorkerSettings(**FAST)))
        async with (
            aiohttp.ClientSession() as session,
            session.post(alone + COMPLETIONS, json=body_of(longer)) as response,
        ):
            assert streamed_tokens(await response.read()) == again


async def test_simulated_workers_pull_from_each_others_host_tiers() -> None:
    async with AsyncExitStack() as stack:
        known = []
        for port in free_ports(2):
            settings = SimulatedWorkerSettings(**FAST, host_blocks=200, pull_port=port)
            known.append({"url": await stack.enter_async_context(running(settings)), "pull_port": port})
        proxy = {"client_routing": True}
        routed = await stack.enter_async_context(router(workers=known, proxy=proxy, constants={"linger": 0}, **P2P))
        await routed.until_live()
        prompt = [10 + number % 300 for number in range(1300)]
        blocks = (len(prompt) - 1) // 16 * 16
        body = {"model": "simulated", "prompt": prompt, "max_tokens": 2}
        first, second = (each["url"] for each in known)
        answers = [await routed.call(COMPLETIONS, body, headers={"x-smg-target-worker": first})]

        async def source() -> Any:
            candidates = (await routed.call("/explain", {"request": body, "path": COMPLETIONS})).json()["candidates"]
            return next(each["source"] for each in candidates if each["worker"] == second)

        await until(source, lambda found: found is not None and found["tokens"] == blocks)
        answers.append(await routed.call(COMPLETIONS, body, headers={"x-smg-target-worker": second}))
        assert answers[1].headers["x-kvrouter-loadable-tokens"] == str(blocks)
        assert [answer.cached for answer in answers] == [0, blocks]
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        await until(source, lambda found: found is None)  # its events confirm what it pulled
        answers.append(await routed.call(COMPLETIONS, body, headers={"x-smg-target-worker": second}))
        assert answers[2].overlap == answers[2].cached == blocks
        assert await routed.metric("kvrouter_pulls_total", result="pulled") == 1
        assert await routed.metric("kvrouter_audit_wrong_tokens_total") == 0
