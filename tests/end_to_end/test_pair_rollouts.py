"""Rollouts of prefill and decode workers: no request is lost, and no pair has two revisions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}
LABEL = "disaggregatedset.x-k8s.io/revision"
METRICS = b'vllm:num_requests_running{engine="0"} 0.0\n'
QUICK = {"probe_interval": 0.2, "metrics_interval": 0.1}
ANSWER = b'{"choices": [{"index": 0, "text": "x"}]}'


class Rollout:
    """A fleet whose decode workers refuse the KV of another revision, as vLLM's handshake does."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.running: dict[tuple[str, str], ScriptedWorker] = {}  # by role and revision
        self.pairs: set[tuple[str, str]] = set()
        self.mixed = 0

    async def start(self, role: str, revision: str) -> dict[str, Any]:
        """Start a worker, and return it as in the router's settings."""

        async def prefill(exchange: Exchange) -> None:
            await exchange.answer(
                b'{"choices": [], "kv_transfer_params": {"remote_engine_id": "%b"}}' % revision.encode()
            )

        async def decode(exchange: Exchange) -> None:
            prefilled = json.loads(exchange.body).get("kv_transfer_params", {}).get("remote_engine_id")
            if prefilled is not None:
                self.pairs.add((prefilled, revision))
            if prefilled not in (None, revision):
                self.mixed += 1
                await exchange.answer(b'{"error": {"message": "NIXL compatibility hash mismatch"}}', "500 Error")
                return
            await exchange.answer(ANSWER)

        worker = await self._stack.enter_async_context(scripted_worker(prefill if role == "prefill" else decode))
        worker.metrics = METRICS
        self.running[role, revision] = worker
        return {"url": worker.url, "role": role, "labels": {LABEL: revision}, "name": f"{role}-{revision}"}


@asynccontextmanager
async def rollout(*first: tuple[str, str], **settings: Any) -> AsyncIterator[tuple[Rollout, RouterUnderTest]]:
    async with AsyncExitStack() as stack:
        fleet = Rollout(stack)
        known = [await fleet.start(*each) for each in first]
        rules = {"backend": "nixl", "decode_computes": False, **settings}
        async with router(workers=known, disaggregation=rules, fleet=QUICK) as routed:
            await until(routed.health, lambda health: health["workers_up"] == len(known))
            yield fleet, routed


async def add(fleet: Rollout, routed: RouterUnderTest, role: str, revision: str) -> None:
    before = (await routed.health())["workers_up"]
    assert (await routed.call("/workers", await fleet.start(role, revision))).status < 300
    await until(routed.health, lambda health: health["workers_up"] > before)


async def drain(fleet: Rollout, routed: RouterUnderTest, role: str, revision: str) -> None:
    reply = await routed.call("/workers/drain", {"url": fleet.running[role, revision].url})
    assert reply.status < 300


@pytest.mark.parametrize("mode", ["preferred", "strict"])
@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
async def test_rollout_loses_no_request_and_pairs_no_two_revisions(order: tuple[str, str], mode: str) -> None:
    old = [("prefill", "a"), ("decode", "a")]
    async with rollout(*old, revisions=mode) as (fleet, routed):
        statuses: list[int] = []
        goes_on = True

        async def load(client: int) -> None:
            number = 0
            while goes_on:
                headers = {"x-session-id": f"{client}-{number}"}
                statuses.append((await routed.call(PATH, BODY, headers=headers)).status)
                number += 1

        clients = [asyncio.create_task(load(client)) for client in range(4)]
        await until(lambda: len(statuses) > 20)
        for role in order:
            await add(fleet, routed, role, "b")
        await until(lambda: fleet.pairs == {("a", "a"), ("b", "b")})
        for role in order:
            await drain(fleet, routed, role, "a")
        seen = len(statuses)
        await until(lambda: len(statuses) > seen + 20)
        goes_on = False
        await asyncio.gather(*clients)
        assert set(statuses) == {200}
        assert fleet.mixed == 0
        assert fleet.pairs == {("a", "a"), ("b", "b")}
        assert await routed.metric("kvrouter_pairs_excluded_total", reason="revision") > 0


async def test_explain_names_the_revision_and_what_it_leaves_out() -> None:
    async with rollout(*[(role, revision) for role in ("prefill", "decode") for revision in "ab"]) as (_, routed):
        reply = (await routed.call("/explain", {"path": PATH, "request": BODY})).json()
        drawn = reply["disaggregation"]["revision"]
        other = "b" if drawn == "a" else "a"
        assert reply["disaggregation"]["other_revisions"] == [f"decode-{other}", f"prefill-{other}"]


async def test_strict_pairs_wait_for_their_revision() -> None:
    async with rollout(("prefill", "a"), ("decode", "b"), revisions="strict") as (fleet, routed):
        await routed.call(PATH, BODY)
        assert fleet.pairs == set()


async def test_pair_that_fails_to_connect_is_barred_and_no_request_is_lost() -> None:
    async with rollout(("prefill", "a"), ("decode", "a"), ("decode", "b"), revisions="off") as (fleet, routed):
        statuses = {(await routed.call(PATH, BODY)).status for _ in range(20)}
        assert statuses == {200}
        assert fleet.mixed == 1
        assert await routed.metric("kvrouter_pairs_barred") == 1
        explained = (await routed.call("/explain", {"path": PATH, "request": BODY})).json()["disaggregation"]
        assert explained["barred"] == [["prefill-a", "decode-b"]]
