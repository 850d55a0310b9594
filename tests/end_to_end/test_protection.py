"""Refused requests: unknown keys, paths of operators, and ambiguous HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import trustme
from aiohttp import web
from router_under_test import Reply, RouterUnderTest, router, serving
from running_app import running_app
from scripted_worker import MODEL, Exchange, ScriptedWorker
from typer.testing import CliRunner

from kvrouter import cli
from router.app.app import running_router
from router.auth import hashed_key
from router.server.http_server import HttpServer
from router.settings import ConfigError, Settings, load_settings
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": list(range(100))}
TOKEN = "admin"
TENANTS = {
    "a": {"keys": [hashed_key("key-a"), hashed_key("key-a2")]},
    "b": {"keys": [hashed_key("key-b")], "models": ["other"]},
    "slow": {"keys": [hashed_key("key-slow")], "requests_per_second": 0.01},
}


def guarded(*workers: str, isolate: bool = False, **sections: Any) -> Any:
    tenants = {"named": TENANTS, "isolate": isolate}
    return router(*workers, server={"token": TOKEN}, tenants=tenants, **sections)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def routed(worker: ScriptedWorker) -> AsyncIterator[RouterUnderTest]:
    async with guarded(worker.url) as routed:
        yield routed


# Keys


@pytest.mark.parametrize("headers", [bearer("key-a"), bearer("key-a2"), {"x-api-key": "key-a"}])
async def test_tenant_key_allows_inference_and_is_not_forwarded(
    worker: ScriptedWorker, routed: RouterUnderTest, headers: dict[str, str]
) -> None:
    assert (await routed.call(PATH, BODY, headers=headers)).status == 200
    assert json.loads(worker.last.body) == BODY
    assert not {"authorization", "x-api-key"} & {name for name, _ in worker.last.headers}


@pytest.mark.parametrize("headers", [{}, bearer("other"), bearer(""), bearer(hashed_key("key-a")), {"x-api-key": "é"}])
async def test_requests_without_valid_key_are_401(routed: RouterUnderTest, headers: dict[str, str]) -> None:
    for path in (PATH, "/v1/models", "/match", "/dump", "/workers", "/docs", "/any"):
        reply = await routed.call(path, headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert (reply.error["type"], reply.headers["www-authenticate"]) == ("authentication_error", "Bearer")


async def test_monitoring_routes_need_no_key(routed: RouterUnderTest) -> None:
    assert [(await routed.call(path)).status for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]


async def test_operator_routes_are_closed_to_tenants(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    for path in ("/match", "/query", "/dump", "/workers", "/register", "/reset_prefix_cache", "/v1/lora", "/x"):
        reply = await routed.call(path, {}, headers=bearer("key-a"))
        unknown = path in ("/v1/lora", "/x")
        assert (reply.status, reply.error["type"]) == (
            (404, "not_found_error") if unknown else (403, "permission_error")
        )
        assert (await routed.call(path, {}, headers=bearer(TOKEN))).status not in (401, 403)
    assert all(not exchange.header("authorization") for exchange in worker.exchanges)


async def test_models_and_rates_are_limited_per_tenant(routed: RouterUnderTest) -> None:
    reply = await routed.call(PATH, BODY, headers=bearer("key-b"))
    assert (reply.status, reply.error["code"]) == (403, "model_not_allowed")
    assert (await routed.call(PATH, BODY, headers=bearer("key-slow"))).status == 200
    reply = await routed.call(PATH, BODY, headers=bearer("key-slow"))
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (429, "rate_limit_exceeded", "100")
    assert (await routed.call(PATH, BODY, headers=bearer("key-a"))).status == 200
    assert await routed.metric("kvrouter_tenant_requests_total", tenant="slow") == 2
    assert await routed.metric("kvrouter_tenant_requests_total", tenant="slow", status="429") == 1


async def test_tenant_sees_only_its_models(routed: RouterUnderTest) -> None:
    for key, names in (("key-a", [MODEL]), ("key-b", []), (TOKEN, [MODEL])):
        listed = (await routed.call("/v1/models", headers=bearer(key))).json()
        assert [card["id"] for card in listed["data"]] == names
        assert (await routed.call(f"/v1/models/{MODEL}", headers=bearer(key))).status == (200 if names else 404)


async def test_openai_client_raises_typed_errors(routed: RouterUnderTest) -> None:
    client = routed.openai
    with pytest.raises(openai.AuthenticationError):
        await client.completions.create(model=MODEL, prompt="x")
    with pytest.raises(openai.PermissionDeniedError):
        await client.with_options(api_key="key-b").completions.create(model=MODEL, prompt="x")
    await client.with_options(api_key="key-slow").completions.create(model=MODEL, prompt="x")
    with pytest.raises(openai.RateLimitError):
        await client.with_options(api_key="key-slow").completions.create(model=MODEL, prompt="x")


async def test_credentials_are_forwarded_without_tenants(worker: ScriptedWorker) -> None:
    async with router(worker.url) as routed:
        await routed.call(PATH, BODY, headers=bearer("the-workers"))
        assert worker.last.header("authorization") == [b"Bearer the-workers"]


@pytest.mark.parametrize(
    "text",
    [
        f"tenants: {{named: {{a: {{keys: [{hashed_key('x')}]}}}}}}",
        "{server: {token: t}, tenants: {named: {a: {keys: [in-clear]}}}}",
        "{server: {token: t}, tenants: {named: {a: {keys: []}}}}",
        "{{server: {{token: t}}, tenants: {{named: {{a: {{keys: [{0}]}}, b: {{keys: [{0}]}}}}}}}}".format(
            hashed_key("x")
        ),
    ],
)
def test_ineffective_tenant_settings_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="tenants"):
        load_settings(tmp_path / "config.yaml")


# Caches


@pytest.mark.parametrize("isolate", [False, True])
async def test_isolated_tenants_share_no_cache(isolate: bool) -> None:
    fast = SimulatedWorkerSettings(base_step_s=0.001, prefill_s_per_token=0.0, model=MODEL)
    async with running(fast) as url, guarded(url, isolate=isolate) as routed:

        async def ask(key: str, **more: Any) -> Reply:
            reply = await routed.call(PATH, BODY | {"max_tokens": 2} | more, headers=bearer(key))
            assert reply.status == 200, reply.body
            return reply

        assert (await ask("key-a")).cached == 0
        own, other = await ask("key-a2"), await ask("key-slow")
        assert (own.overlap, own.cached) == (96, 96)
        assert (other.overlap, other.cached) == ((0, 0) if isolate else (96, 96))
        assert (await ask("key-a", cache_salt="x")).cached == 0
        assert (await ask("key-a", cache_salt="x")).cached == 96


async def test_endpoints_without_salt_are_closed_to_isolated_tenants(worker: ScriptedWorker) -> None:
    async with guarded(worker.url, isolate=True) as routed:
        reply = await routed.call("/v1/messages", {"model": MODEL}, headers=bearer("key-a"))
        assert reply.status == 403


INFERENCE = [
    *("/generate", "/inference/v1/generate", "/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score"),
    *("/score", "/classify", "/v1/classify", "/pooling", "/v1/pooling", "/v1/moderations", "/v1/images/generations"),
    *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"),
    *("/v1/images/variations", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/chat/completions"),
]


@pytest.mark.parametrize("path", INFERENCE)
async def test_tenant_key_opens_every_route_of_inference(
    worker: ScriptedWorker, routed: RouterUnderTest, path: str
) -> None:
    body = {"model": MODEL, "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    assert (await routed.call(path, body, headers=bearer("key-a"))).status == 200
    assert worker.last.target == path
    refused = await routed.call(path, body, headers=bearer("key-b"))
    assert (refused.status, refused.error["type"]) == (403, "permission_error")


async def test_more_routes_are_open_to_tenants_unless_they_are_isolated(worker: ScriptedWorker) -> None:
    proxy = {"more_routes": ["POST /v1/files", "GET /v1/files/{id}", "POST /v1/load_lora_adapter"]}
    for isolate, status in ((False, 200), (True, 403)):
        async with guarded(worker.url, isolate=isolate, proxy=proxy) as routed:
            assert (await routed.call("/v1/files", {}, headers=bearer("key-a"))).status == status
            assert (await routed.call("/v1/files/a", headers=bearer("key-a"))).status == status
            for method, path in (("DELETE", "/v1/files/a"), ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/batches")):
                assert (await routed.call(path, b"", method, headers=bearer("key-a"))).status == 403


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/rerank", {"results": [], "usage": {"total_tokens": 200}}),
        ("/v1/embeddings", {"data": [], "usage": {"prompt_tokens": 200, "total_tokens": 200}}),
        ("/v1/images/generations", {"data": [], "usage": {"input_tokens": 100, "output_tokens": 100}}),
        ("/generate", {"text": "x", "meta_info": {"prompt_tokens": 1, "completion_tokens": 200}}),
    ],
)
async def test_budgets_count_the_tokens_that_answers_report(
    worker: ScriptedWorker, path: str, answer: dict[str, Any]
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(json.dumps(answer).encode())

    worker.script = script
    named = {"a": {"keys": [hashed_key("key-a")], "tokens_per_minute": 100}}
    async with router(worker.url, server={"token": TOKEN}, tenants={"named": named}) as routed:
        body = {"model": MODEL, "text": "x", "input": "x"}
        statuses = [(await routed.call(path, body, headers=bearer("key-a"))).status for _ in range(2)]
    assert statuses == [200, 429]


async def test_budget_counts_streams_of_generate(worker: ScriptedWorker) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        for tokens in (1, 200):
            meta = {"text": "x", "meta_info": {"prompt_tokens": 1, "completion_tokens": tokens}}
            await exchange.chunk(b"data: " + json.dumps(meta).encode() + b"\n\n")
        await exchange.chunk(b"")

    worker.script = script
    named = {"a": {"keys": [hashed_key("key-a")], "tokens_per_minute": 100}}
    async with router(worker.url, server={"token": TOKEN}, tenants={"named": named}) as routed:
        body = {"text": "x", "stream": True}
        statuses = [(await routed.call("/generate", body, headers=bearer("key-a"))).status for _ in range(2)]
    assert statuses == [200, 429]


async def test_salted_messages_are_isolated_by_tenant() -> None:
    body = {"model": "simulated", "max_tokens": 2, "messages": [{"role": "user", "content": "a few words " * 20}]}
    tenants = {"named": TENANTS, "isolate": True, "salted_messages": True}
    async with (
        running(SimulatedWorkerSettings(base_step_s=0.001)) as worker,
        router(worker, server={"token": TOKEN}, tenants=tenants) as routed,
    ):

        async def cached(key: str) -> int:
            reply = await routed.call("/v1/messages", body, headers=bearer(key))
            assert reply.status == 200, reply.body
            return int(reply.json()["usage"]["cache_read_input_tokens"])

        assert await cached("key-a") == 0
        assert await cached("key-a") > 0
        assert await cached("key-slow") == 0


# TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[trustme.CA, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    files = {name: folder / f"{name}.pem" for name in ("ca", "certificate", "key")}
    issued = ca.issue_cert("127.0.0.1", "localhost")
    ca.cert_pem.write_to_path(str(files["ca"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(files["certificate"]), append=True)
    return ca, files


async def test_tls_is_used_for_clients_and_workers(
    worker: ScriptedWorker, authority: tuple[trustme.CA, dict[str, Path]]
) -> None:
    ca, files = authority
    inside = Settings(workers=[{"url": worker.url}])  # type: ignore[list-item]
    context = ssl.create_default_context()
    ca.configure_trust(context)
    async with (
        running_router(inside) as app,
        serving(HttpServer(app, 1, files["certificate"], files["key"])) as url,
    ):
        secure = url.replace("http://", "https://")
        async with (
            aiohttp.ClientSession() as session,
            session.post(secure + PATH, json=BODY, ssl=context) as response,
        ):
            assert response.status == 200
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files["certificate"], files["key"])
    engine = web.Application()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    engine.router.add_route("*", "/v1/{path:.*}", answer)
    async with running_app(engine, tls) as secure:
        async with router(secure, upstream={"ca": files["ca"]}) as outside:
            assert (await outside.call(PATH, BODY)).status == 200
        async with router(secure, upstream={"verify": False}) as outside:
            assert (await outside.call(PATH, BODY)).status == 200
        async with router(secure) as outside:
            assert (await outside.call(PATH, BODY)).status == 503
            (found,) = await outside.findings()
            assert "certificate" in found["detail"].lower()


async def test_client_certificate_is_sent_to_worker(authority: tuple[trustme.CA, dict[str, Path]]) -> None:
    ca, files = authority
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["certificate"], files["key"])
    context.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(context)
    app = web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    app.router.add_get("/v1/models", models)
    async with running_app(app, context) as url:
        own = {"ca": files["ca"], "certificate": files["certificate"], "key": files["key"]}
        async with router(url, upstream=own) as routed:
            assert (await routed.call("/ready")).status == 200
        async with router(url, upstream={"ca": files["ca"]}) as routed:
            assert (await routed.call("/ready")).status == 503


# The command


def test_command_hashes_and_creates_keys() -> None:
    command = CliRunner()
    assert command.invoke(cli.app, ["hash-key", "key-a"]).stdout.strip() == hashed_key("key-a")
    assert command.invoke(cli.app, ["hash-key", "-"], input="key-a\n").stdout.strip() == hashed_key("key-a")
    made = command.invoke(cli.app, ["hash-key"])
    assert made.stdout.strip() == hashed_key(made.stderr.split()[1])
