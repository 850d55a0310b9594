"""Requests of clients and tenants beyond their rights: they never reach a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import pytest
import structlog
from router_under_test import RouterUnderTest, raw, router, until
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_worker, scripted_workers

from router.auth import hashed_key
from router.auth.engine_fields import CONTROL_FIELDS, CONTROL_HEADERS

TOKEN = "admin"
KEY = {"authorization": "Bearer key-a"}
ADMIN = {"authorization": f"Bearer {TOKEN}"}
TENANTS = {
    "named": {"a": {"keys": [hashed_key("key-a")]}, "later": {"keys": [hashed_key("key-later")], "priority": 5}},
    "isolate": True,
    "salted_messages": True,
}
COMPLETION = {"model": MODEL, "prompt": [1, 2, 3]}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 1},
    "/v1/responses": {"model": MODEL, "input": "x"},
    "/v1/embeddings": {"model": MODEL, "input": "x"},
}
# Routes of vLLM and SGLang, and unknown ones.
ENGINE_ROUTES = [
    *(("POST", f"/{name}") for name in ("sleep", "wake_up", "pause", "resume", "shutdown")),
    *(("POST", f"/{name}") for name in ("load_lora_adapter", "v1/load_lora_adapter", "v1/unload_lora_adapter")),
    *(("POST", f"/{name}") for name in ("start_profile", "stop_profile", "collective_rpc", "abort_request")),
    *(("POST", f"/{name}") for name in ("update_weights_from_disk", "update_weights", "release_memory_occupation")),
    *(("GET", f"/{name}") for name in ("server_info", "get_server_info", "is_sleeping")),
    ("POST", "/some_new_way_to_stop_an_engine"),
    ("GET", "/v1/secrets"),
]
# Commands that the router sends to engines itself. It says 404 for all others, whose existence it does not know.
OWN_ROUTES = (
    *("/sleep", "/wake_up", "/pause", "/resume", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/start_profile", "/stop_profile", "/abort_request", "/update_weights_from_disk", "/update_weights"),
    *("/release_memory_occupation", "/server_info", "/get_server_info"),
)


@pytest.fixture
async def guarded(worker: ScriptedWorker) -> AsyncIterator[RouterUnderTest]:
    server = {"token": TOKEN}
    async with router(worker.url, server=server, tenants=TENANTS) as routed:
        yield routed


@pytest.fixture
async def plain(worker: ScriptedWorker) -> AsyncIterator[RouterUnderTest]:
    async with router(worker.url) as routed:
        yield routed


def request_bytes(method: str, target: bytes, body: bytes = b"", headers: bytes = b"", host: bytes = b"r") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n%bContent-Length: %d\r\n\r\n%b" % (
        method.encode(),
        target,
        host,
        headers,
        len(body),
        body,
    )


# Paths and methods


TARGETS = [
    b"/v1/models/../../sleep",
    b"/v1/models/%2e%2e/%2e%2e/sleep",
    b"/v1/models/..%2f..%2fsleep",
    b"/v1/models/..%2F..%2Fsleep",
    b"/v1/models/x/../../../shutdown",
    b"/v1/models/./x",
    b"/v1/models/x/.",
    b"/%68ealth",
    b"/v1/models/../chat/completions",
    b"/v1//completions",
    b"//v1/completions",
    b"/v1/completions/../completions",
    b"/v1\\completions",
    b"/v1%5ccompletions",
    b"/v1%5Ccompletions",
    b"/v1/completions%00",
    b"/v1/completion%73",
    b"/v1/models/%252e%252e/sleep",
    b"/v1/models/\xff",
    b"/v1/models/%FF",
    b"/v1/models/%c3%a9",
    b"/v1/completions#x",
    b"/v1/completions?a#x",
    b"/v1/completions?\\",
    b"/v1/models/a%0d%0ab",
]


async def test_non_canonical_target_is_refused(worker: ScriptedWorker, guarded: RouterUnderTest) -> None:
    body = json.dumps(COMPLETION).encode()
    for target in TARGETS:
        for method in ("GET", "POST", "PUT"):
            answer = await raw(guarded, request_bytes(method, target, body, b"Authorization: Bearer key-a\r\n"))
            assert answer.startswith(b"HTTP/1.1 400 "), (method, target)
    assert worker.exchanges == []


async def test_tenant_key_allows_only_its_methods(worker: ScriptedWorker, guarded: RouterUnderTest) -> None:
    paths = (*BODIES, "/v1/models", f"/v1/models/{MODEL}", "/health", "/ready", "/metrics", "/ui")
    methods = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
    for method, path in product(methods, paths):
        reply = await guarded.call(path, BODIES.get(path, {}), method=method, headers=KEY)
        if method == "POST" and path in BODIES:
            assert reply.status == 200
        elif method in ("GET", "HEAD") and path not in BODIES:
            assert reply.status in (200, 503)
        else:
            assert reply.status in (401, 403, 404, 405), (method, path)
            assert method == "HEAD" or reply.error["type"] in ("invalid_request_error", "permission_error")
    assert [(each.method, each.target) for each in worker.exchanges] == [("POST", path) for path in BODIES]


async def test_monitoring_routes_are_never_forwarded(plain: RouterUnderTest, worker: ScriptedWorker) -> None:
    for path in ("/health", "/ready", "/metrics", "/ui", "/workers", "/match"):
        for method in ("PUT", "PATCH", "HEAD", "OPTIONS"):
            reply = await plain.call(path, method=method)
            assert reply.status == (200 if method == "HEAD" and path != "/match" else 405)
            assert not reply.body or method != "HEAD"
    assert worker.exchanges == []


async def test_engine_routes_need_admin_token(worker: ScriptedWorker, plain: RouterUnderTest) -> None:
    for method, path in ENGINE_ROUTES:
        reply = await plain.call(path, {}, method=method)
        status = 403 if path in OWN_ROUTES else 404
        assert (reply.status, "server.token" in reply.error["message"]) == (status, status != 404)
    async with router(worker.url, server={"token": TOKEN}) as routed:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            for method, path in ENGINE_ROUTES:
                reply = await routed.call(path, {}, method=method, headers=headers)
                status = 401 if path in OWN_ROUTES else 404
                assert (reply.status, "server.token" in reply.error["message"]) == (status, status != 404)
        assert worker.exchanges == []
        others = [(method, path) for method, path in ENGINE_ROUTES if path not in OWN_ROUTES]
        for method, path in others:
            assert (await routed.call(path, {}, method=method, headers=ADMIN)).status == 200
    assert set(others) <= {(each.method, each.target) for each in worker.exchanges}
    assert not any(exchange.header("authorization") for exchange in worker.exchanges)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/api/v1/models", "/v1/models"),
        ("/healthz", "/health"),
        ("/metric", "/metrics"),
        ("/wurst", None),
        ("/" + "x" * 5000, None),
    ],
)
async def test_unknown_path_is_answered_with_nearest_public_one(
    plain: RouterUnderTest, asked: str, near: str | None
) -> None:
    reply = await plain.call(asked, {})
    assert reply.status == 404
    assert reply.error["message"] == f"{asked} does not exist here." + (f" Did you mean {near}?" if near else "")


async def test_tenants_are_not_told_routes_that_need_the_token(guarded: RouterUnderTest) -> None:
    message = (await guarded.call("/worker", headers=KEY)).error["message"]
    assert "/workers" not in message
    message = (await guarded.call("/v1/completion", headers=KEY)).error["message"]
    assert message.endswith("Did you mean /v1/completions?")


async def test_unknown_path_is_logged_once_with_what_opens_it(plain: RouterUnderTest) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            await plain.call("/v1/engine/own", {})
    [line] = [each for each in lines if each["event"] == "unknown path"]
    assert line["route"] == "POST /v1/engine/own"
    assert "proxy.more_routes" in line["hint"]


async def test_more_routes_are_forwarded(worker: ScriptedWorker) -> None:
    proxy = {"more_routes": ["POST /v1/mine/{id}"]}
    async with router(worker.url, proxy=proxy) as routed:
        assert (await routed.call("/v1/mine/1", {})).status == 200
        assert (await routed.call("/v1/mine/1")).status == 405
        assert (await routed.call("/v1/mine/1/2", {})).status == 404


async def test_admin_token_is_never_forwarded(worker: ScriptedWorker) -> None:
    async with router(worker.url, server={"token": TOKEN}) as routed:
        assert (await routed.call("/v1/completions", COMPLETION, headers=ADMIN)).status == 200
        assert worker.last.header("authorization") == []
        assert (await routed.call("/v1/completions", COMPLETION, headers=KEY)).status == 200
        assert worker.last.header("authorization") == [b"Bearer key-a"]


# Changes of the router


async def test_changes_off_loopback_need_a_token(worker: ScriptedWorker) -> None:
    async with router(worker.url, server={"host": "0.0.0.0"}) as routed:
        for path in ("/workers", "/workers/drain", "/workers/undrain", "/register", "/unregister"):
            reply = await routed.call(path, {"url": "http://127.0.0.1:1"})
            assert (reply.status, "server.token" in reply.error["message"]) == (403, True)
        assert (await routed.call("/workers?url=http://127.0.0.1:1", method="DELETE")).status == 403
        assert (await routed.call("/reset_prefix_cache", method="POST")).status == 403
        assert (await routed.call("/v1/completions", COMPLETION)).status == 200


async def test_cross_site_requests_change_nothing(plain: RouterUnderTest) -> None:
    evil = {"origin": "http://evil.example"}
    before = len(await plain.workers())
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "text/plain;charset=UTF-8"} | evil,
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/x-www-form-urlencoded"} | evil,
        evil,
        {"origin": "null"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
    ):
        for path in ("/workers", "/register", "/reset_prefix_cache", "/sleep"):
            reply = await plain.call(path, {"url": "http://127.0.0.1:1", "weight": 1000}, headers=headers)
            assert reply.status in (403, 415)
    assert len(await plain.workers()) == before
    host = plain.url.removeprefix("http://").encode()
    for twice in (b"Origin: http://evil.example\r\nOrigin: %b\r\n", b"Origin: %b\r\nOrigin: http://evil.example\r\n"):
        headers = b"Content-Type: application/json\r\n" + twice % plain.url.encode()
        answer = await raw(plain, request_bytes("POST", b"/reset_prefix_cache", b"{}", headers, host))
        assert answer.startswith(b"HTTP/1.1 403 ")
    own = {"origin": plain.url, "sec-fetch-site": "same-origin"}
    assert (await plain.call("/reset_prefix_cache", {}, headers=own)).status == 200


@pytest.mark.parametrize("host", ["evil.example:80", "127.0.0.1.evil.example"])
async def test_unknown_host_is_refused(plain: RouterUnderTest, worker: ScriptedWorker, host: str) -> None:
    for method, path in (("POST", "/workers"), ("GET", "/workers"), ("GET", "/dump"), ("POST", "/match")):
        assert (await plain.call(path, {} if method == "POST" else None, headers={"host": host})).status == 421
    for own in ("localhost", "127.0.0.1:1", "[::1]:1", "router", "router.svc"):
        assert (await plain.call("/workers", headers={"host": own})).status == 200
    async with router(worker.url, server={"allowed_hosts": [host.partition(":")[0]]}) as routed:
        assert (await routed.call("/workers", headers={"host": host})).status == 200


async def test_admin_routes_are_closed_on_client_port(worker: ScriptedWorker) -> None:
    """In one process, both ports lead to the same application, which distinguishes them by the port."""
    async with router(worker.url, server={"admin_port": 1}) as routed:
        for path in ("/metrics", "/workers", "/dump", "/ui"):
            assert (await routed.call(path)).error["code"] == "admin_port"
        for path in ("/health", "/ready", "/v1/models"):
            assert (await routed.call(path)).status == 200
        assert (await routed.call("/v1/completions", COMPLETION)).status == 200


# Engine control fields


def with_field(body: dict[str, Any], name: str, value: str = '{"remote_host": "1.2.3.4"}') -> bytes:
    return json.dumps(body).encode()[:-1] + b', "%b": %b}' % (name.encode(), value.encode())


async def test_engine_fields_of_clients_are_refused_or_stripped(
    worker: ScriptedWorker, guarded: RouterUnderTest, plain: RouterUnderTest
) -> None:
    """Engine control fields of tenants are refused, and those of other clients are stripped."""
    for path in BODIES:
        for name in (*CONTROL_FIELDS, "\\u006bv_transfer_params", "r\\u0069d"):
            inside = with_field(BODIES[path], "vllm_xargs", f'{{"{name}": 1}}')
            for body in (with_field(BODIES[path], name), inside):
                assert (await guarded.call(path, body, headers=KEY)).status == 400, name
                assert worker.exchanges == []
                assert (await plain.call(path, body)).status == 200
                kept = json.loads(worker.exchanges.pop().body)
                assert kept.pop("vllm_xargs", {}) == {}
                assert kept == BODIES[path]
        for header in CONTROL_HEADERS:
            given = {header.decode(): "1"}
            assert (await guarded.call(path, BODIES[path], headers=KEY | given)).status == 400, header
            assert worker.exchanges == []
            assert (await plain.call(path, BODIES[path], headers=given)).status == 200
            assert worker.exchanges.pop().header(header.decode()) == []
    body = with_field(COMPLETION, "rid", '"r"')
    assert (await guarded.call("/v1/completions", body, headers=ADMIN)).status == 200
    assert worker.last.body == body


PROMPT_IDS = [
    '{"input_ids": [1]%s}',
    '{"\\u0069nput_ids": [[1]]%s}',
    '{"prompt_token_ids": [1]%s}',
    '{"prompt_\\u0074oken_ids": []%s}',
    '{"kv_transfer_params": {"prompt_token_ids": [1]}%s}',
    '{"extra_body": {"input_ids": [1]}%s}',
    '{"extra_body": [{"extra_args": {"kv_transfer_params": {"prompt_token_ids": [1]}}}]%s}',
    '{"nvext": {"token_data": [1]}%s}',
    '{"sampling_params": {"input_ids": [1]}%s}',
]
CHAT_PATHS = (*BODIES, "/v1/chat/completions/batch", "/invocations", "/inference/v1/generate", "/mine")


@pytest.mark.parametrize("padding", ["", "y" * 70_000], ids=["short", "long"])
async def test_clients_cannot_replace_the_prompt_by_token_ids(worker: ScriptedWorker, padding: str) -> None:
    """The prompt that the engine computes is the one that was routed. Long bodies have a parser of their own."""
    own_prompt = ("/generate", "/encode")
    fields = COMPLETION | CHAT | {"input": "x", "text": "x", "token_ids": [7], "max_tokens": 1, "x": padding}
    bodies = [(template % f", {json.dumps(fields)[1:-1]}").encode() for template in PROMPT_IDS]
    more = {"more_routes": ["POST /mine"]}
    async with (
        router(worker.url, proxy=more | {"engine_fields": "strip"}) as strips,
        router(worker.url, proxy=more | {"engine_fields": "refuse"}) as refuses,
    ):
        for path in CHAT_PATHS:
            for body in bodies:
                reply = await refuses.call(path, body)
                assert (reply.status, "controls an engine" in reply.error["message"]) == (400, True), (path, body)
        assert worker.exchanges == []
        for number, body in enumerate(bodies):
            for path in (*CHAT_PATHS, *own_prompt):
                assert (await strips.call(path, body)).status == 200, path
                kept = json.loads(worker.exchanges.pop().body)
                assert ("input_ids" in kept) == (path in own_prompt and number < 2), path
                kept.pop("input_ids", None)
                assert not any(name in json.dumps(kept) for name in ("input_ids", "prompt_token_ids", "token_data"))
                assert {name: kept[name] for name in fields} == fields


async def test_engine_fields_are_stripped_or_passed_by_setting(worker: ScriptedWorker) -> None:
    extra = {"vllm_xargs": {"kv_transfer_params": 1, "x": [1]}, "rid": "r", "user": "é", "kv_transfer_params": {"a": 1}}
    headers = {"x-data-parallel-rank": "1", "x-mine": "2"}
    for mode in ("strip", "pass"):
        async with router(worker.url, proxy={"engine_fields": mode}) as routed:
            assert (await routed.call("/v1/completions", COMPLETION | extra, headers=headers)).status == 200
        kept = {"vllm_xargs": {"x": [1]}, "user": "é"} if mode == "strip" else extra
        assert json.loads(worker.last.body) == COMPLETION | kept
        assert worker.last.header("x-data-parallel-rank") == ([] if mode == "strip" else [b"1"])
        assert worker.last.header("x-mine") == [b"2"]


async def test_engine_fields_in_forms_are_refused(worker: ScriptedWorker, plain: RouterUnderTest) -> None:
    def form(name: str) -> bytes:
        return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\nm\r\n--b--\r\n'.encode()

    headers = {"content-type": "multipart/form-data; boundary=b"}
    assert (await plain.call("/v1/audio/transcriptions", form("request_id"), headers=headers)).status == 400
    assert worker.exchanges == []
    assert (await plain.call("/v1/audio/transcriptions", form("model"), headers=headers)).status == 200


FORMS = [
    'form-data; name="x"; name="request_id"',
    "form-data; name=request_id",
    "form-data; name*=utf-8''request%5fid",
    "form-data; name*0=request; name*1=_id",
    'form-data; filename="\\\\"; name="request_id"',
    'form-data;\r\n name="request_id"',
]


@pytest.mark.parametrize("disposition", FORMS)
@pytest.mark.parametrize("before", ["", "\r\n", "preamble\r\n"])
async def test_ambiguous_form_is_refused(
    worker: ScriptedWorker, plain: RouterUnderTest, disposition: str, before: str
) -> None:
    body = f"{before}--b\r\nContent-Disposition: {disposition}\r\n\r\nm\r\n--b--\r\n".encode()
    headers = {"content-type": "multipart/form-data; boundary=b"}
    assert (await plain.call("/v1/audio/transcriptions", body, headers=headers)).status == 400
    assert worker.exchanges == []


async def test_engine_fields_in_other_bodies_are_refused_or_stripped(
    worker: ScriptedWorker, plain: RouterUnderTest
) -> None:
    """On routes with forms and files, engines read JSON in any UTF, and forms like browsers."""
    urlencoded = {"content-type": "application/x-www-form-urlencoded"}
    for body in (b"request_id=1", b"x=1&r%69d=2", b"x=1;rid=2"):
        assert (await plain.call("/v1/files", body, headers=urlencoded)).status == 400
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json;charset=utf-7"):
        for path in ("/v1/files", "/invocations"):
            steering = (await plain.call(path, b'{"rid": 1, "rid": 2}', headers={"content-type": kind})).status
            assert steering in (400, 415), (kind, path)
    assert (await plain.call("/v1/files", b'{"rid": 1, "x": 2}', headers=urlencoded)).status == 200
    assert worker.exchanges.pop().body == b'{"x": 2}'
    for encoding in ("utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"):
        assert (await plain.call("/v1/files", '{"rid": 1}'.encode(encoding))).status == 400
    for body in (b' {"rid": 1, "x": 1, "x": 2}', b'{"rid": 1, "x": NaN}', b'{"rid": 1, "x": "\\ud800"}'):
        assert (await plain.call("/v1/files", body)).status == 400
        assert (await plain.call("/invocations", body)).status == 400
    assert (await plain.call("/v1/completions", COMPLETION, headers={"content-encoding": "gzip"})).status == 415
    assert worker.exchanges == []
    for body in (b"RIFF....WAVEfmt ", b'[{"rid": 1}]', b"\x00\xff" * 100):
        assert (await plain.call("/v1/files", body)).status == 200
        assert worker.exchanges.pop().body == body


def ambiguous(text: str) -> list[bytes]:
    """Bodies that some parsers read as this JSON object, and others as something else or not at all."""
    return [
        text.encode()[:-1] + b', "model": "m"}',
        text.encode()[:-1] + b', "\\u006dodel": "m"}',
        text.encode()[:-1] + b', "x": {"a": 1, "\\u0061": 2}}',
        text.encode()[:-1] + b', "x": NaN}',
        text.encode()[:-1] + b', "x": -Infinity}',
        text.encode()[:-1] + b', "x": "\\ud800"}',
        text.encode()[:-1] + b', "x": "\xff"}',
        text.encode()[:-1] + b', "x": "\xed\xa0\x80"}',
        text.encode() + b"\x00",
        text.encode() + text.encode(),
        b"[]",
        b"",
    ]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
async def test_body_in_another_unicode_encoding_is_forwarded_in_utf8(
    worker: ScriptedWorker, plain: RouterUnderTest, encoding: str
) -> None:
    """Python's `json.loads`, by which vLLM and SGLang read bodies, accepts them; other parsers do not."""
    text = '{"model": "m", "prompt": "漢字 🙂", "rid": 1, "rid": 2}'
    assert (await plain.call("/v1/completions", text.encode(encoding))).status == 400
    text = '{"model": "m", "prompt": "漢字 🙂", "rid": 1}'
    assert (await plain.call("/v1/completions", text.encode(encoding))).status == 200
    assert json.loads(worker.exchanges.pop().body.decode("utf-8")) == {"model": "m", "prompt": "漢字 🙂"}
    assert (await plain.call("/v1/completions", text.encode(encoding)[:-1])).status == 400
    assert worker.exchanges == []


async def test_ambiguous_body_is_refused(
    worker: ScriptedWorker, guarded: RouterUnderTest, plain: RouterUnderTest
) -> None:
    for routed, path in product((guarded, plain), BODIES):
        for body in ambiguous(json.dumps(BODIES[path])):
            assert (await routed.call(path, body, headers=KEY)).status == 400, body
    assert worker.exchanges == []


async def test_non_integer_priority_is_refused(guarded: RouterUnderTest) -> None:
    for priority in ('" -9 "', '"-9"', "-9.0", "[-9]", "true", '"0x1"', "-9e0"):
        reply = await guarded.call("/v1/completions", with_field(COMPLETION, "priority", priority), headers=KEY)
        assert (reply.status, reply.error["param"]) == (400, "priority")


async def test_priority_is_bounded_by_tenant(worker: ScriptedWorker, guarded: RouterUnderTest) -> None:
    headers = {"authorization": "Bearer key-later"}
    for asked, sent in ((0, 5), (-9, 5), (5, 5), (7, 7), (None, None)):
        reply = await guarded.call("/v1/completions", COMPLETION | {"priority": asked}, headers=headers)
        assert (reply.status, json.loads(worker.last.body)["priority"]) == (200, sent)


# Bounds


async def test_sum_of_arriving_bodies_is_bounded(worker: ScriptedWorker) -> None:
    mebibyte = 2**20
    async with router(worker.url, limits={"arriving_bytes": 4 * mebibyte}) as routed:
        address = urlsplit(routed.url)
        opened = [await asyncio.open_connection(address.hostname, address.port) for _ in range(6)]
        head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % (2 * mebibyte)
        for _, writer in opened:
            writer.write(head + b" " * mebibyte)
        refused = [asyncio.create_task(reader.read(12)) for reader, _ in opened]
        done, waiting = await asyncio.wait(refused, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result() for task in done} == {b"HTTP/1.1 503"}
        # Small requests are still accepted.
        assert (await routed.call("/v1/completions", COMPLETION)).status == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for _, writer in opened:
            writer.close()

        async def released() -> bool:
            body = with_field(COMPLETION, "x", json.dumps("x" * 3 * mebibyte))
            return await post(routed, "/v1/completions", body) == 200

        await until(released)


MUCH = [
    ("/v1/completions", b'{"model":"m","prompt":[' + b"[1]," * 200_000 + b"[1]]}"),
    ("/v1/completions", b'{"model":"m","prompt":[' + b'"a",' * 10_000 + b'"a"]}'),
    ("/v1/completions", b'{"model":"m","prompt":[' + b"1," * 2_000_000 + b"1]}"),
    ("/v1/completions", b'{"model":"m","x":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    ("/v1/chat/completions", b'{"model":"m","messages":[' + b"{}," * 20_000 + b"{}]}"),
    ("/v1/chat/completions", b'{"model":"m","messages":[' + b"[]," * 2_000_000 + b"[]]}"),
    ("/v1/responses", b'{"model":"m","input":[' + b"{}," * 20_000 + b"{}]}"),
    ("/v1/messages", b'{"model":"m","messages":[' + b"{}," * 20_000 + b"{}]}"),
    ("/generate", b'{"model":"m","text":[' + b'"a",' * 10_000 + b'"a"]}'),
]


async def post(routed: RouterUnderTest, path: str, body: bytes) -> int:
    """Send a large body; the answer's status."""
    async with routed.session.post(routed.url + path, data=BytesIO(body)) as response:
        await response.read()
        return response.status


async def test_values_of_one_request_are_bounded(worker: ScriptedWorker, plain: RouterUnderTest) -> None:
    for path, body in MUCH:
        assert await post(plain, path, body) in (400, 413)
    assert worker.exchanges == []


async def test_brackets_in_long_text_are_accepted(worker: ScriptedWorker, plain: RouterUnderTest) -> None:
    body = json.dumps({"model": MODEL, "prompt": '[{"a": [1, 2]}, ' * 250_000}).encode()
    assert await post(plain, "/v1/completions", body) == 200
    assert worker.last.body == body


# Retries


def answers(status: str) -> Any:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b"{}", status)

    return script


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/responses", "/v1/embeddings", "/load_lora_adapter"])
@pytest.mark.parametrize("script", [answers("502 Bad Gateway"), answers("503 No"), Exchange.hang_up])
async def test_unsafe_request_is_sent_once(path: str, script: Any) -> None:
    async with scripted_worker(script) as one, scripted_worker(script) as two:
        server = {"token": TOKEN}
        async with router(one.url, two.url, server=server, policy={"name": "round_robin"}) as routed:
            reply = await routed.call(path, BODIES.get(path, {"model": MODEL}), headers=ADMIN)
            assert reply.status in (502, 503)
        assert len(one.exchanges) + len(two.exchanges) == 1


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/completions", "/v1/responses"])
async def test_request_is_retried_if_connection_fails(path: str) -> None:
    async with scripted_worker() as one, scripted_worker() as two:
        async with router(one.url, two.url, policy={"name": "round_robin"}) as routed:
            await one.stop()
            for _ in range(3):
                reply = await routed.call(path, BODIES.get(path, {"model": MODEL}))
                assert (reply.status, reply.worker) == (200, two.url)
        assert len(two.exchanges) == 3


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_unsafe_request_is_not_resent_on_closed_connection(path: str) -> None:
    async def once_then_hang_up(exchange: Exchange) -> None:
        if len(worker.exchanges) == 1:
            await exchange.answer()
        else:
            await exchange.hang_up()

    async with scripted_worker(once_then_hang_up) as worker, router(worker.url) as routed:
        assert (await routed.call("/v1/completions", COMPLETION)).status == 200
        assert (await routed.call(path, {"model": MODEL})).status == 502
        assert len(worker.exchanges) == 2


async def test_request_that_kills_workers_is_sent_to_at_most_two() -> None:
    async with (
        scripted_workers(*[Exchange.hang_up] * 5) as workers,
        router(*(worker.url for worker in workers), proxy={"attempts": 5}) as routed,
    ):
        assert (await routed.call("/v1/completions", COMPLETION)).status == 503
        assert sum(len(worker.exchanges) for worker in workers) == 2


async def test_requests_of_dead_workers_are_retried_without_budget() -> None:
    """Four of eight workers die under waiting requests, which exceeds any budget of retries."""
    waiting = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        if waiting.is_set():
            await exchange.answer()
        else:
            await exchange.until_closed()

    sections = {"proxy": {"retry_share": 0}, "constants": {"retry_minimum": 0}, "policy": {"name": "round_robin"}}
    async with (
        scripted_workers(*[wait] * 8) as workers,
        router(*(worker.url for worker in workers), **sections) as routed,
    ):
        asked = [asyncio.create_task(routed.call("/v1/completions", COMPLETION)) for _ in range(80)]
        await until(lambda: sum(len(worker.exchanges) for worker in workers) == 80)
        waiting.set()
        await asyncio.gather(*(worker.stop() for worker in workers[:4]))  # at once: else some die of two
        lost = [exchange for worker in workers[4:] for exchange in worker.exchanges[:10]]
        await asyncio.gather(*(exchange.answer() for exchange in lost))
        replies = await asyncio.gather(*asked)
    assert [reply.status for reply in replies] == [200] * 80


# Responses of workers


async def test_worker_cannot_set_router_headers(worker: ScriptedWorker, plain: RouterUnderTest) -> None:
    async def script(exchange: Exchange) -> None:
        forged = (
            b"x-kvrouter-worker: evil\r\nX-KvRouter-Attempts: 9\r\nx-kvrouter-new: 1\r\nX_KVRouter_Worker: evil\r\n"
        )
        await exchange.answer(headers=forged)

    worker.script = script
    for path in ("/v1/completions", "/v1/embeddings"):
        for _ in range(2):  # the second head is known already
            reply = await plain.call(path, BODIES[path])
            assert reply.headers.getall("x-kvrouter-worker") == [worker.url]
            ours = {name.lower().replace("_", "-") for name in reply.headers} - {"x-kvrouter-worker"}
            assert not {"x-kvrouter-attempts", "x-kvrouter-new"} & ours
            assert not any("evil" in value for value in reply.headers.values())


# Connections


async def test_ambiguous_transfer_encoding_is_refused(worker: ScriptedWorker, plain: RouterUnderTest) -> None:
    for headers in (
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Host: other\r\nTransfer-Encoding: chunked\r\n",
    ):
        for path in (b"/v1/completions", b"/v1/files", b"/match"):
            head = b"POST %b HTTP/1.1\r\nHost: r\r\nConnection: close\r\n%b\r\n" % (path, headers)
            assert (await raw(plain, head + b"2\r\n{}\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert worker.exchanges == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files", "/health"])
async def test_half_closed_client_receives_response(plain: RouterUnderTest, path: str) -> None:
    method = "GET" if path == "/health" else "POST"
    body = b"" if method == "GET" else json.dumps(COMPLETION).encode()
    answer = await raw(plain, request_bytes(method, path.encode(), body), half_close=True)
    assert b"HTTP/1.1 200 OK\r\n" in answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
async def test_disconnect_closes_worker_connection(worker: ScriptedWorker, path: str) -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.until_closed()
        closed.set()

    worker.script = script
    async with router(worker.url) as routed:
        address = urlsplit(routed.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(request_bytes("POST", path.encode(), json.dumps(COMPLETION).encode()))

        await until(lambda: worker.exchanges)
        writer.close()
        async with asyncio.timeout(60):
            await closed.wait()


async def test_invalid_status_of_worker_is_503(worker: ScriptedWorker) -> None:
    worker.script = answers("999 Odd")
    async with router(worker.url) as routed:
        assert (await routed.call("/v1/completions", COMPLETION)).status == 503
