"""What a router refuses: keys it does not know, paths that are not theirs, and HTTP that can be read in two ways."""

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
from router_under_test import Reply, RouterUnderTest, raw, router, serving
from scripted_worker import MODEL, ScriptedWorker, scripted_worker
from typer.testing import CliRunner

from kvrouter import cli
from router.app.app import running_router
from router.auth import hashed_key
from router.server import head_limiter
from router.server.http_server import HttpServer
from router.settings import ConfigError, Settings, load_settings
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

pytestmark = pytest.mark.anyio

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
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker() as worker:
        yield worker


@pytest.fixture
async def routed(worker: ScriptedWorker) -> AsyncIterator[RouterUnderTest]:
    async with guarded(worker.url) as routed:
        yield routed


# Keys


@pytest.mark.parametrize("headers", [bearer("key-a"), bearer("key-a2"), {"x-api-key": "key-a"}])
async def test_a_key_opens_inference_and_stays_here(
    worker: ScriptedWorker, routed: RouterUnderTest, headers: dict[str, str]
) -> None:
    assert (await routed.call(PATH, BODY, headers=headers)).status == 200
    assert json.loads(worker.last.body) == BODY
    assert not {"authorization", "x-api-key"} & {name for name, _ in worker.last.headers}


@pytest.mark.parametrize("headers", [{}, bearer("other"), bearer(""), bearer(hashed_key("key-a")), {"x-api-key": "é"}])
async def test_without_a_key_there_is_nothing(routed: RouterUnderTest, headers: dict[str, str]) -> None:
    for path in (PATH, "/v1/models", "/match", "/dump", "/workers", "/docs", "/any"):
        reply = await routed.call(path, headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert (reply.error["type"], reply.headers["www-authenticate"]) == ("authentication_error", "Bearer")


async def test_what_watches_the_router_needs_no_key(routed: RouterUnderTest) -> None:
    assert [(await routed.call(path)).status for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]


async def test_a_tenants_key_opens_nothing_else_and_the_admin_token_does(
    worker: ScriptedWorker, routed: RouterUnderTest
) -> None:
    for path in ("/match", "/query", "/dump", "/workers", "/register", "/reset_prefix_cache", "/v1/lora", "/x"):
        reply = await routed.call(path, {}, headers=bearer("key-a"))
        assert (reply.status, reply.error["type"]) == (403, "permission_error")
        assert (await routed.call(path, {}, headers=bearer(TOKEN))).status not in (401, 403)
    assert all(not exchange.header("authorization") for exchange in worker.exchanges)


async def test_models_and_rates_are_a_tenants_own(routed: RouterUnderTest) -> None:
    reply = await routed.call(PATH, BODY, headers=bearer("key-b"))
    assert (reply.status, reply.error["code"]) == (403, "model_not_allowed")
    assert (await routed.call(PATH, BODY, headers=bearer("key-slow"))).status == 200
    reply = await routed.call(PATH, BODY, headers=bearer("key-slow"))
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (429, "rate_limit_exceeded", "100")
    assert (await routed.call(PATH, BODY, headers=bearer("key-a"))).status == 200
    assert await routed.metric("kvrouter_tenant_requests_total", tenant="slow") == 2
    assert await routed.metric("kvrouter_tenant_requests_total", tenant="slow", status="429") == 1


async def test_a_tenant_is_told_of_the_models_it_may_use(routed: RouterUnderTest) -> None:
    for key, names in (("key-a", [MODEL]), ("key-b", []), (TOKEN, [MODEL])):
        listed = (await routed.call("/v1/models", headers=bearer(key))).json()
        assert [card["id"] for card in listed["data"]] == names
        assert (await routed.call(f"/v1/models/{MODEL}", headers=bearer(key))).status == (200 if names else 404)


async def test_the_client_library_knows_the_errors(routed: RouterUnderTest) -> None:
    client = routed.openai
    with pytest.raises(openai.AuthenticationError):
        await client.completions.create(model=MODEL, prompt="x")
    with pytest.raises(openai.PermissionDeniedError):
        await client.with_options(api_key="key-b").completions.create(model=MODEL, prompt="x")
    await client.with_options(api_key="key-slow").completions.create(model=MODEL, prompt="x")
    with pytest.raises(openai.RateLimitError):
        await client.with_options(api_key="key-slow").completions.create(model=MODEL, prompt="x")


async def test_without_tenants_credentials_are_the_workers(worker: ScriptedWorker) -> None:
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
def test_tenants_that_would_protect_nothing_are_refused(tmp_path: Path, text: str) -> None:
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


async def test_endpoints_whose_cache_cannot_be_salted_are_closed_to_isolated_tenants(worker: ScriptedWorker) -> None:
    async with guarded(worker.url, isolate=True) as routed:
        reply = await routed.call("/v1/messages", {"model": MODEL}, headers=bearer("key-a"))
        assert reply.status == 403


async def test_messages_are_open_to_isolated_tenants_where_engines_read_the_salt() -> None:
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


async def test_tls_on_both_sides(worker: ScriptedWorker, authority: tuple[trustme.CA, dict[str, Path]]) -> None:
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
        async with router(secure, upstream={"ca": files["ca"]}) as outside:
            assert (await outside.call(PATH, BODY)).status == 200
        async with router(secure, upstream={"verify": False}) as outside:
            assert (await outside.call(PATH, BODY)).status == 200
        async with router(secure) as outside:
            assert (await outside.call(PATH, BODY)).status == 503
            (found,) = (await outside.call("/health")).json()["findings"]
            assert "certificate" in found["detail"].lower()


async def test_a_worker_may_ask_who_the_router_is(authority: tuple[trustme.CA, dict[str, Path]]) -> None:
    ca, files = authority
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["certificate"], files["key"])
    context.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(context)
    app = web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        own = {"ca": files["ca"], "certificate": files["certificate"], "key": files["key"]}
        async with router(url, upstream=own) as routed:
            assert (await routed.call("/ready")).status == 200
        async with router(url, upstream={"ca": files["ca"]}) as routed:
            assert (await routed.call("/ready")).status == 503
    finally:
        await runner.cleanup()


# HTTP that can be read in two ways


@pytest.fixture(scope="module")
async def plain() -> AsyncIterator[tuple[ScriptedWorker, RouterUnderTest]]:
    async with scripted_worker() as worker, router(worker.url) as routed:
        yield worker, routed


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nConnection: close\r\n"
SMUGGLED = b'{"model":"m","prompt":[1]}'
LENGTH = b"Content-Length: %d\r\n" % len(SMUGGLED)


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + LENGTH + b"Content-Length: 3\r\n\r\n" + SMUGGLED,
        HEAD + LENGTH + LENGTH + b"\r\n" + SMUGGLED,
        HEAD + b"Content-Length: 3, 26\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length: +26\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length: -1\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length: 0x1a\r\n\r\n" + SMUGGLED,
        HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1a\n" + SMUGGLED + b"\r\n0\r\n\r\n",
        HEAD + LENGTH + b"X-A: one\rX-B: two\r\n\r\n" + SMUGGLED,
        HEAD + LENGTH + b"X-A: one\x00two\r\n\r\n" + SMUGGLED,
        HEAD + LENGTH + b"X A: one\r\n\r\n" + SMUGGLED,
        HEAD + LENGTH + b": no name\r\n\r\n" + SMUGGLED,
        HEAD + LENGTH + b"X-A: " + b"a" * 70_000 + b"\r\n\r\n" + SMUGGLED,
        HEAD + LENGTH + b"X-A: one\r\n" * 10_000 + b"\r\n" + SMUGGLED,
        HEAD + b"X-A: " + b"a" * 200_000,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: r\r\n\r\n",
        b"GET http://evil.example/v1/x HTTP/1.1\r\nHost: r\r\n\r\n",
        b"GET http:@evil.example/v1/x HTTP/1.1\r\nHost: r\r\n\r\n",
        b"GET @evil.example/x HTTP/1.1\r\nHost: r\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: r\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: r\r\n\r\n",
        b"GET /x HTTP/1.1 \r\n smuggled\r\n\r\n",
        HEAD.replace(b"1.1", b"2.0") + LENGTH + b"\r\n" + SMUGGLED,
        HEAD.replace(b"1.1", b"0.9") + LENGTH + b"\r\n" + SMUGGLED,
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
    ],
)
async def test_it_is_refused_and_reaches_no_worker(
    plain: tuple[ScriptedWorker, RouterUnderTest], request_bytes: bytes
) -> None:
    worker, unguarded = plain
    worker.exchanges.clear()
    answer = await raw(unguarded, request_bytes)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert worker.exchanges == []


async def test_line_feeds_alone_are_refused_or_forwarded_as_header_ends(
    plain: tuple[ScriptedWorker, RouterUnderTest],
) -> None:
    worker, unguarded = plain
    await raw(unguarded, HEAD + LENGTH + b"X-A: one\nX-B: two\r\n\r\n" + SMUGGLED)
    assert all(b"\n" not in value for exchange in worker.exchanges for _, value in exchange.headers)


async def test_a_target_names_no_other_host(plain: tuple[ScriptedWorker, RouterUnderTest]) -> None:
    worker, unguarded = plain
    worker.exchanges.clear()
    answer = await raw(unguarded, b"GET //evil.example/x HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert worker.exchanges == []


async def test_a_head_that_never_ends_is_not_waited_for(
    plain: tuple[ScriptedWorker, RouterUnderTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, unguarded = plain
    monkeypatch.setattr(head_limiter, "HEAD_SECONDS", 0.2)
    assert await raw(unguarded, b"") == b""
    assert await raw(unguarded, HEAD + b"X-A: on") == b""


# The command


def test_keys_are_hashed_and_made_by_the_command() -> None:
    command = CliRunner()
    assert command.invoke(cli.app, ["hash-key", "key-a"]).stdout.strip() == hashed_key("key-a")
    assert command.invoke(cli.app, ["hash-key", "-"], input="key-a\n").stdout.strip() == hashed_key("key-a")
    made = command.invoke(cli.app, ["hash-key"])
    assert made.stdout.strip() == hashed_key(made.stderr.split()[1])
