"""Commands to the engines of all workers: pauses, new weights, resets, memory, profiles, and reports."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from router_under_test import QUICK, Reply, RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

from kvevents import BlockStored, EventBatch
from worker.zmq_publisher import ZmqEventPublisher

TOKEN = {"authorization": "Bearer t"}
BODY = {"model": "m", "prompt": "x", "max_tokens": 1}
HELD = 32
TOKEN_IDS = list(range(HELD + 1))
DISCOVERY = ("/v1/models", "/kv_event_sources", "/metrics", "/get_model_info", "/model_info")


class Engine:
    """A worker that speaks as vLLM or SGLang, holds two blocks, and records the commands that it receives."""

    def __init__(self, sglang: bool, publisher: ZmqEventPublisher) -> None:
        self.sglang = sglang
        self.publisher = publisher
        self.commands: list[tuple[str, Any]] = []
        self.requests = 0
        self.replies: dict[str, tuple[str, bytes]] = {}  # status and body, by path
        self.worker: ScriptedWorker

    @property
    def url(self) -> str:
        return self.worker.url

    @property
    def settings(self) -> dict[str, Any]:
        stream = {"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}
        return {"url": self.url, "streams": [stream]}

    async def answer(self, exchange: Exchange) -> None:
        path = exchange.target.partition("?")[0]
        if path == "/server_info" and not exchange.header("content-type"):  # the router's discovery
            await exchange.answer(*((b'{"page_size": 16}',) if self.sglang else (b"", "404 Not Found")))
        elif path == "/kv_event_sources":
            await exchange.answer(b"" if self.sglang else b"{}", "404 Not Found" if self.sglang else "200 OK")
        elif path == "/v1/models":
            await exchange.answer(b'{"data": [{"id": "m"}]}')
        elif path == "/v1/completions":
            self.requests += 1
            await exchange.answer()
        elif path in DISCOVERY or path.endswith(("render", "tokenize")):
            await exchange.answer(status="404 Not Found")
        else:
            status, body = self.replies.get(path, ("200 OK", b'{"success": true}'))
            self.commands.append((exchange.target, json.loads(exchange.body) if exchange.body else None))
            await exchange.answer(body, status)


@asynccontextmanager
async def engine(sglang: bool = False) -> AsyncIterator[Engine]:
    publisher = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", bind=True)
    blocks = BlockStored(block_hashes=[1, 2], parent_block_hash=None, token_ids=TOKEN_IDS[:HELD], block_size=16)
    publisher.publish(EventBatch(time.time(), [blocks]))
    made = Engine(sglang, publisher)
    try:
        async with scripted_worker(made.answer) as made.worker:
            made.worker.answers_discovery = False
            yield made
    finally:
        await asyncio.to_thread(publisher.shutdown)


@pytest.fixture
async def vllm() -> AsyncIterator[Engine]:
    async with engine() as made:
        yield made


@pytest.fixture
async def sglang() -> AsyncIterator[Engine]:
    async with engine(sglang=True) as made:
        yield made


@pytest.fixture
async def routed(vllm: Engine, sglang: Engine) -> AsyncIterator[RouterUnderTest]:
    async with router(workers=[vllm.settings, sglang.settings], server={"token": "t"}) as routed:
        await until(lambda: held(routed), lambda found: found == {vllm.url: HELD, sglang.url: HELD})
        yield routed


async def held(routed: RouterUnderTest) -> dict[str, int]:
    answer = await routed.call("/match", {"model": "m", "token_ids": TOKEN_IDS})
    return {match["worker"]: match["matched_tokens"] for match in answer.json()["matches"]}


async def post(routed: RouterUnderTest, path: str, body: Any = b"") -> Reply:
    return await routed.call(path, body, "POST", headers=TOKEN)


async def states(routed: RouterUnderTest) -> list[str]:
    return [worker["state"] for worker in await routed.workers()]


async def test_paused_workers_receive_nothing_until_they_continue(
    routed: RouterUnderTest, vllm: Engine, sglang: Engine
) -> None:
    paused = await post(routed, f"/pause_generation?worker={vllm.url}", {"mode": "keep"})
    assert paused.status == 200
    assert [(each["url"], each["status"]) for each in paused.json()["workers"]] == [(vllm.url, 200)]
    assert vllm.commands == [("/pause?mode=keep", None)]
    assert await states(routed) == ["paused", "ready"]
    for _ in range(4):
        assert (await routed.call("/v1/completions", BODY)).worker == sglang.url
    assert (await post(routed, "/pause")).status == 200
    assert sglang.commands == [("/pause_generation", {})]
    refused = await routed.call("/v1/completions", BODY)
    assert (refused.status, vllm.requests, sglang.requests) == (503, 0, 4)
    assert (await post(routed, "/continue_generation")).status == 200
    assert (vllm.commands[-1][0], sglang.commands[-1][0]) == ("/resume", "/continue_generation")
    assert await states(routed) == ["ready", "ready"]
    assert (await routed.call("/v1/completions", BODY)).status == 200


async def test_pause_clears_what_vllm_clears(routed: RouterUnderTest, vllm: Engine, sglang: Engine) -> None:
    for query, left in (("mode=keep", HELD), ("clear_cache=false", HELD), ("mode=abort", 0)):
        assert (await post(routed, f"/pause?{query}")).status == 200
        assert (await post(routed, "/resume")).status == 200
        assert await held(routed) == {vllm.url: left, sglang.url: HELD}


@pytest.mark.parametrize(
    ("path", "body", "at_vllm", "at_sglang"),
    [
        (
            "/update_weights_from_disk",
            {"model_path": "/step-2"},
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/step-2"}}),
            ("/update_weights_from_disk", {"model_path": "/step-2"}),
        ),
        (
            "/update_weights_from_distributed",
            {"names": ["w"]},
            ("/update_weights", {"names": ["w"]}),
            ("/update_weights_from_distributed", {"names": ["w"]}),
        ),
        ("/flush_cache", None, ("/reset_prefix_cache", None), ("/flush_cache", {})),
        ("/reset_prefix_cache", None, ("/reset_prefix_cache", None), ("/flush_cache", {})),
    ],
)
async def test_new_weights_and_flushes_leave_nothing_held(
    routed: RouterUnderTest, vllm: Engine, sglang: Engine, path: str, body: Any, at_vllm: Any, at_sglang: Any
) -> None:
    reply = await post(routed, path, body or b"")
    assert reply.status == 200, reply.body
    assert (vllm.commands, sglang.commands) == ([at_vllm], [at_sglang])
    assert await held(routed) == {vllm.url: 0, sglang.url: 0}


async def test_call_that_fails_at_some_workers_is_207_with_each_answer(
    routed: RouterUnderTest, vllm: Engine, sglang: Engine
) -> None:
    sglang.replies["/flush_cache"] = ("200 OK", b'{"success": false, "message": "requests are running"}')
    reply = await post(routed, "/flush_cache")
    assert (reply.status, reply.error["code"]) == (207, "reset_prefix_cache")
    at_vllm, at_sglang = reply.json()["workers"]
    assert at_vllm == {"worker": vllm.url, "url": vllm.url, "status": 200, "message": "", "answer": {"success": True}}
    assert (at_sglang["message"], at_sglang["answer"]["success"]) == ("requests are running", False)
    assert await held(routed) == {vllm.url: 0, sglang.url: HELD}
    for path in ("/pause", "/pause_generation"):
        vllm.replies[path] = sglang.replies[path] = ("500 Internal Server Error", b"no")
    assert (await post(routed, "/pause")).status == 502
    assert await states(routed) == ["ready", "ready"]


async def test_command_that_an_engine_lacks_is_501_there(routed: RouterUnderTest, vllm: Engine, sglang: Engine) -> None:
    reply = await post(routed, "/update_weights_from_tensor", {"flush_cache": False})
    assert (reply.status, [each["status"] for each in reply.json()["workers"]]) == (207, [501, 200])
    assert vllm.commands == []
    assert await held(routed) == {vllm.url: HELD, sglang.url: 0}


async def test_failed_update_may_have_changed_weights(routed: RouterUnderTest, vllm: Engine, sglang: Engine) -> None:
    vllm.replies["/update_weights"] = ("500 Internal Server Error", b"{}")
    sglang.replies["/update_weights_from_distributed"] = ("400 Bad Request", b'{"success": false}')
    reply = await post(routed, "/update_weights", {})
    assert reply.status == 502
    assert reply.error["message"].startswith("2 of 2 workers failed; ")
    assert reply.error["message"].endswith("it answered 500")
    assert await held(routed) == {vllm.url: 0, sglang.url: HELD}


async def test_worker_resumes_when_all_its_memory_is_back(
    routed: RouterUnderTest, vllm: Engine, sglang: Engine
) -> None:
    assert (await post(routed, "/release_memory_occupation")).status == 200
    assert (vllm.commands, sglang.commands) == ([("/sleep?mode=wait", None)], [("/release_memory_occupation", {})])
    assert await states(routed) == ["asleep", "asleep"]
    assert await held(routed) == {vllm.url: 0, sglang.url: 0}
    assert (await post(routed, "/resume_memory_occupation", {"tags": ["weights"]})).status == 200
    assert vllm.commands[-1] == ("/wake_up?tags=weights", None)
    assert sglang.commands[-1] == ("/resume_memory_occupation", {"tags": ["weights"]})
    assert await states(routed) == ["asleep", "asleep"]
    assert (await post(routed, "/wake_up?tags=kv_cache")).status == 200
    assert sglang.commands[-1] == ("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert await states(routed) == ["ready", "ready"]


async def test_released_weights_keep_the_cache(routed: RouterUnderTest, vllm: Engine, sglang: Engine) -> None:
    body = {"tags": ["weights"]}
    assert (await post(routed, f"/release_memory_occupation?worker={sglang.url}", body)).status == 200
    assert await states(routed) == ["ready", "asleep"]
    assert await held(routed) == {vllm.url: HELD, sglang.url: HELD}


async def test_profiles_start_and_stop_on_all_workers(routed: RouterUnderTest, vllm: Engine, sglang: Engine) -> None:
    for path in ("/start_profile", "/stop_profile"):
        assert (await post(routed, path, {"num_steps": 3})).status == 200
    assert sglang.commands == [("/start_profile", {"num_steps": 3}), ("/stop_profile", {"num_steps": 3})]
    assert [path for path, _ in vllm.commands] == ["/start_profile", "/stop_profile"]


async def test_loads_and_server_info_list_each_worker(routed: RouterUnderTest, vllm: Engine, sglang: Engine) -> None:
    vllm.replies["/load"] = ("200 OK", b'{"server_load": 3}')
    sglang.replies |= {"/v1/loads": ("404 Not Found", b""), "/get_load": ("200 OK", b'[{"dp_rank": 0}]')}
    vllm.replies["/server_info"] = ("200 OK", b'{"version": "1"}')
    for path in ("/loads", "/get_loads"):
        reply = await routed.call(path, headers=TOKEN)
        assert reply.status == 200, reply.body
        assert [(each["load"], each["answer"]) for each in reply.json()["workers"]] == [
            (0, {"server_load": 3}),
            (0, [{"dp_rank": 0}]),
        ]
    for path in ("/get_server_info", "/server_info"):
        reply = await routed.call(path, headers=TOKEN)
        assert reply.json()["workers"][0]["answer"] == {"version": "1"}
        assert reply.json()["workers"][1]["answer"] == {"success": True}


async def test_commands_name_workers_or_a_model(routed: RouterUnderTest, vllm: Engine, sglang: Engine) -> None:
    assert (await post(routed, "/start_profile?model=m")).status == 200
    assert len(vllm.commands) == len(sglang.commands) == 1
    for query, status, param in (("worker=x", 404, "workers"), ("model=x", 404, "model"), ("mode=x", 400, "mode")):
        reply = await post(routed, f"/pause?{query}")
        assert (reply.status, reply.error["param"]) == (status, param)
    assert (await post(routed, "/pause", b"[]")).status == 400
    async with router(server={"token": "t"}, fleet=QUICK) as empty:
        assert (await post(empty, "/pause")).status == 503


async def test_commands_need_the_operators_token(routed: RouterUnderTest, vllm: Engine) -> None:
    for path in ("/pause", "/update_weights_from_disk", "/flush_cache", "/start_profile", "/release_memory_occupation"):
        assert (await routed.call(path, {})).status == 401
    for path in ("/loads", "/get_server_info"):
        assert (await routed.call(path)).status == 401
    async with router(vllm.url) as open_to_all:
        assert (await open_to_all.call("/pause", {})).status == 403
        assert (await open_to_all.call("/flush_cache", {})).status == 200


async def test_restarted_worker_is_no_longer_paused(routed: RouterUnderTest, vllm: Engine) -> None:
    assert (await post(routed, f"/pause?worker={vllm.url}")).status == 200
    await vllm.worker.stop()
    await until(lambda: states(routed), lambda found: found == ["down", "ready"])
    await vllm.worker.start()
    await until(lambda: states(routed), lambda found: found[0] in ("warming", "ready"))


async def test_requests_without_a_first_byte_leave_a_paused_worker_that_is_not_ejected(
    vllm: Engine, sglang: Engine
) -> None:
    """A pause that keeps requests makes their worker silent, which is no failure of it."""
    began, may_end = asyncio.Event(), asyncio.Event()
    answer = vllm.answer

    async def slow(exchange: Exchange) -> None:
        if exchange.target == "/v1/completions":
            began.set()
            await may_end.wait()
        await answer(exchange)

    vllm.worker.script = slow
    sections: dict[str, Any] = {"fleet": {**QUICK, "stall_seconds": 0.1}, "constants": {"stall_factor": 1.0}}
    async with router(workers=[vllm.settings, sglang.settings], server={"token": "t"}, **sections) as routed:
        for _ in range(12):  # what a first byte usually takes
            assert (await post(routed, f"/pause?worker={vllm.url}&mode=keep")).status == 200
            assert (await routed.call("/v1/completions", BODY | {"stream": True})).worker == sglang.url
            assert (await post(routed, f"/resume?worker={vllm.url}")).status == 200
        assert (await post(routed, f"/pause?worker={sglang.url}")).status == 200
        asked = asyncio.create_task(routed.call("/v1/completions", BODY | {"stream": True}))
        await began.wait()
        assert (await post(routed, f"/pause?worker={vllm.url}&mode=keep")).status == 200
        assert (await post(routed, f"/resume?worker={sglang.url}")).status == 200
        assert (await asked).worker == sglang.url
        may_end.set()
        assert (await post(routed, f"/resume?worker={vllm.url}")).status == 200
        assert [each["state"] for each in await routed.workers()] == ["ready", "ready"]
