"""Hooks before real workers, through proxy and picker: what they change, and what they receive after the answer."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ed25519
from envoy_client import EnvoyStream, set_headers
from grpc_call import channel_to
from picker_under_test import JSON, picker
from router_under_test import RouterUnderTest, router
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_worker
from waiting import until

from kvrouter.hooks import Answer, Refusal, Request
from router.auth import hashed_key

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}


@pytest.fixture(scope="module")
def answers() -> Iterator[list[Answer]]:
    """The answers that a function receives. The module `team_hooks` has the functions of these tests."""
    received: list[Answer] = []

    async def check(request: Request) -> Refusal | None:
        if request.headers.get("x-plan") == "none":
            return Refusal(402, "This plan is over.", "plan")
        request.set_header("x-checked", request.fields.get("user", ""))
        request.remove_header("x-secret")
        request.set_field("max_tokens", 3)
        request.session = "chosen"
        if request.key == "gold-key":
            request.tenant = "gold"
        request.notes["plan"] = request.headers.get("x-plan")
        return None

    module = ModuleType("team_hooks")
    module.__dict__.update(check=check, count=received.append)
    sys.modules["team_hooks"] = module
    yield received
    del sys.modules["team_hooks"]


async def served(exchange: Exchange) -> None:
    if b'"stream"' in exchange.body:
        await exchange.begin_chunks()
        await exchange.chunk(b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n')
        await exchange.chunk(b"data: %b\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode())
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.chunk(b"")
    else:
        await exchange.answer(json.dumps({"choices": [], "usage": USAGE}).encode())


@pytest.fixture(scope="module")
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker(served) as found:
        yield found


HOOKS = {"before": ["team_hooks:check"], "after": ["team_hooks:count"], "deadline": 30.0}
TENANTS = {"named": {"gold": {"keys": []}, "plain": {"keys": [hashed_key("plain-key")]}}}


@pytest.fixture(scope="module")
async def routed(worker: ScriptedWorker, answers: list[Answer]) -> AsyncIterator[RouterUnderTest]:  # noqa: ARG001
    async with router(worker.url, hooks=HOOKS, tenants=TENANTS, server={"token": "operator"}) as found:
        yield found


def test_the_page_has_two_examples() -> None:
    """Run the examples of docs/hooks.md."""
    found = dict(re.findall(r"`(\w+)\.py`[^`]*```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert found.keys() == {"gate", "accounts"}
    gate: dict[str, Any] = {}
    exec(found["gate"], gate)
    request = Request("r", "POST", CHAT, [], b'{"user": "mallory"}')
    assert asyncio.run(gate["check"](request)).status == 403
    request = Request("r", "POST", CHAT, [], b'{"user": "ann"}')
    assert asyncio.run(gate["check"](request)) is None
    assert (request.fields["temperature"], request.headers, request.notes) == (0, {"x-checked": "yes"}, {"user": "ann"})
    accounts: dict[str, Any] = {}
    exec(found["accounts"], accounts)
    assert accounts["tokens"] == {}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def received(answers: list[Answer]) -> Answer:
    await until(lambda: asyncio.sleep(0, len(answers)), lambda count: count > 0)
    return answers.pop()


@pytest.mark.parametrize("streamed", [False, True])
async def test_requests_are_changed_and_answers_reported(
    routed: RouterUnderTest, worker: ScriptedWorker, answers: list[Answer], streamed: bool
) -> None:
    answers.clear()
    headers = bearer("gold-key") | {"x-plan": "pro", "x-secret": "1", "x-request-id": "r-1"}
    reply = await routed.call(CHAT, BODY | {"user": "ann"} | ({"stream": True} if streamed else {}), headers=headers)
    assert reply.status == 200
    assert (b'"usage"' in reply.body) is not streamed  # the router hides what the client did not ask for
    sent = worker.exchanges[-1]
    assert json.loads(sent.body)["max_tokens"] == 3
    assert (sent.header("x-checked"), sent.header("x-secret"), sent.header("x-kvrouter-session-id")) == (
        [b"ann"],
        [],
        [b"chosen"],
    )
    answer = await received(answers)
    assert (answer.id, answer.status, answer.model, answer.worker) == ("r-1", 200, MODEL, reply.worker)
    assert (answer.tenant, answer.session, answer.program) == ("gold", "chosen", "chosen")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 4, 3)
    assert answer.first_byte is not None
    assert 0 < answer.first_byte <= answer.duration
    assert (answer.problem, answer.notes) == (None, {"plan": "pro"})


async def test_refused_requests_reach_no_worker_and_are_reported(
    routed: RouterUnderTest, worker: ScriptedWorker, answers: list[Answer]
) -> None:
    answers.clear()
    before = len(worker.exchanges)
    reply = await routed.call(CHAT, BODY, headers=bearer("gold-key") | {"x-plan": "none"})
    assert (reply.status, reply.error["code"], reply.error["message"]) == (402, "plan", "This plan is over.")
    assert len(worker.exchanges) == before
    answer = await received(answers)
    assert (answer.status, answer.worker, answer.prompt_tokens) == (402, None, None)


async def test_keys_open_nothing_without_a_tenant(routed: RouterUnderTest) -> None:
    for path, body in ((CHAT, BODY), ("/v1/models", None)):
        assert (await routed.call(path, body, headers=bearer("other"))).status == 401
        assert (await routed.call(path, body)).status == 401
        assert (await routed.call(path, body, headers=bearer("gold-key"))).status == 200
        assert (await routed.call(path, body, headers=bearer("plain-key"))).status == 200
    assert (await routed.call("/workers", headers=bearer("gold-key"))).status == 401
    handshake = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13"}
    handshake["sec-websocket-key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    assert (await routed.call("/v1/realtime", headers=handshake | bearer("other"))).status == 401
    assert await routed.metric("kvrouter_hook_calls_total", hook="team_hooks:check", result="ok") > 0


@pytest.mark.usefixtures("answers")
async def test_picker_passes_hooks(worker: ScriptedWorker, answers: list[Answer]) -> None:
    sections: dict[str, Any] = {"hooks": HOOKS, "tenants": TENANTS, "server": {"token": "operator"}}
    async with picker(worker.url, **sections) as (side, port), channel_to(port) as channel:
        await side.until_up()
        stream = EnvoyStream(channel)
        await stream.head(CHAT, JSON, ("authorization", "Bearer gold-key"), ("x-secret", "1"))
        await stream.body(json.dumps(BODY | {"user": "ann"}).encode())
        head = await stream.receive()
        mutation = head.request_headers.response.header_mutation
        assert set_headers(mutation)["x-checked"] == "ann"
        assert "x-secret" in mutation.remove_headers
        body = await stream.receive()
        assert json.loads(body.request_body.response.body_mutation.streamed_response.body)["max_tokens"] == 3
        refused = EnvoyStream(channel)
        await refused.head(CHAT, JSON, ("authorization", "Bearer other"))
        await refused.body(json.dumps(BODY).encode())
        assert (await refused.receive()).immediate_response.status.code == 401
        answers.clear()


async def test_url_checks_keys(worker: ScriptedWorker) -> None:
    asked: list[str] = []

    async def check(request: web.Request) -> web.Response:
        asked.append(request.headers["authorization"])
        return web.Response(status=200 if asked[-1] == "Bearer known" else 401)

    app = web.Application()
    app.router.add_get("/keys", check)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/keys"
    async with router(worker.url, hooks={"key_url": url, "deadline": 30.0}, server={"token": "operator"}) as routed:
        for _ in range(3):
            assert (await routed.call(CHAT, BODY, headers=bearer("known"))).status == 200
        assert worker.exchanges[-1].header("authorization") == []  # the key ends here
        assert (await routed.call(CHAT, BODY, headers=bearer("other"))).status == 401
        assert (await routed.call(CHAT, BODY)).status == 401
        assert (await routed.call("/workers", headers=bearer("known"))).status == 401
        assert (await routed.call(CHAT, BODY, headers=bearer("operator"))).status == 200
        assert asked == ["Bearer known", "Bearer other"]
    await runner.cleanup()


async def test_tokens_of_a_provider_are_keys_of_tenants(worker: ScriptedWorker) -> None:
    jwt = pytest.importorskip("jwt", reason="the extra jwt is not installed")
    private = ed25519.Ed25519PrivateKey.generate()
    public = {"keys": [json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(private.public_key())) | {"kid": "a"}]}

    async def keys(_: web.Request) -> web.Response:
        return web.json_response(public)

    app = web.Application()
    app.router.add_get("/keys", keys)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    tokens = {
        "jwks_url": f"http://127.0.0.1:{runner.addresses[0][1]}/keys",
        "issuer": "provider",
        "audience": "kvrouter",
        "algorithms": ["EdDSA"],
    }

    def headers(tenant: str) -> dict[str, str]:
        claims = {"iss": "provider", "aud": "kvrouter", "exp": time.time() + 60, "tenant": tenant}
        return bearer(jwt.encode(claims, private, "EdDSA", {"kid": "a"}))

    tenants = {"named": {"gold": {"keys": []}, "silver": {"keys": [], "models": ["other"]}}}
    hooks = {"jwt": tokens, "deadline": 30.0}
    async with router(worker.url, hooks=hooks, tenants=tenants, server={"token": "operator"}) as routed:
        assert (await routed.call(CHAT, BODY, headers=headers("gold"))).status == 200
        assert worker.exchanges[-1].header("authorization") == []
        assert (await routed.call(CHAT, BODY, headers=headers("silver"))).status == 403
        assert (await routed.call(CHAT, BODY, headers=headers("bronze"))).status == 401
        assert (await routed.call("/workers", headers=headers("gold"))).status == 401
    await runner.cleanup()
