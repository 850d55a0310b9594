"""Every method with every target and credential: only the listed routes reach a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import pytest
from envoy_client import EnvoyStream, Mode
from grpc_call import channel_to
from picker_under_test import picker
from router_under_test import RouterUnderTest, router
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_worker

from router.auth import hashed_key

ENVOY_METHODS = ["GET", "POST", "DELETE", "SLEEP"]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "SLEEP"]
TOKEN = "admin"
CREDENTIALS = {"nobody": "", "tenant": "key-a", "operator": TOKEN}
TENANTS = {"named": {"a": {"keys": [hashed_key("key-a")]}}, "isolate": True}
BODY = json.dumps({"model": MODEL, "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]})

# What an operator has passed on: these methods, HEAD where there is GET, and OPTIONS.
INFERENCE = ["/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/chat/completions?a=%2e%2e"]
PASSED = {
    **{target: ["POST"] for target in INFERENCE},
    "/v1/rerank": ["POST"],  # engines read no salt there: it is closed to tenants that are kept apart
    "/v1/files": ["GET", "POST"],
    "/v1/files/a": ["GET", "POST", "DELETE"],
    "/version": ["GET"],
}
# Engines' own, or what is in another form than a path of ours and still a path: any method, by an operator.
UNKNOWN = [
    *(
        "/collective_rpc",
        "/get_weights_by_name",
        "/shutdown",
        "/v1/completions/",
        "/V1/completions",
        "/v1/completions;x",
    ),
    *("/v1/completions;..", "/v1/completions%20", "/v1/completions%3F", "/health/", "/v1/files/a%20b", "/workers/x/y"),
]
ANY_METHOD = ["GET", "POST", "PUT", "PATCH", "DELETE"]
OWN = ["/", "/health", "/v1/models", "/v1/models/a%2Fb", "/workers", "/workers/x", "/match"]
REFUSED = [
    *("/v1/models/../../sleep", "/v1/models/..", "/v1/./completions", "/v1/completions/.", "/v1/completions;/../"),
    *("/v1/models/%2e%2e/%2e%2e/sleep", "/v1/models/%2E%2e/sleep", "/v1/models/.%2E/sleep", "/v1/models/%2E%2E/sleep"),
    *("/v1/models/..%2f..%2fsleep", "/v1/models/..%2F..%2Fsleep", "/v1/models/x/../../../shutdown"),
    *("/v1//completions", "//v1/completions", "//r/v1/completions", "/v1/completions//"),
    *("/v1\\completions", "\\v1\\completions", "/v1%5ccompletions", "/v1%5Ccompletions", "/..\\sleep"),
    *("/v1/completions%00", "/v1/completions\0", "/v1/completions%01", "/v1/models/%7F", "/v1/models/a%0D%0Ab"),
    *("/%68ealth", "/v1/completion%73", "/v1%2Fcompletions", "/%53leep", "/v1/models/%252e%252e/sleep", "/%", "/%zz"),
    *("/v1/models/\xff", "/v1/models/%FF", "/v1/models/%c3%A9", "/v1/models/%C0%AE%C0%AE/sleep", "/%E0%80%AFsleep"),
    *("/v1/completions#x", "/v1/completions?a#x", "/v1/completions?\\", "/v1/completions\t", "/v1/comp letions"),
    *("http://r/v1/completions", "http://evil.example/sleep", "r:80", "*", "v1/completions", "/v1/completions|"),
]


def expected(caller: str, behind_envoy: bool = False) -> set[tuple[str, str]]:
    """Return the methods and targets that may reach a worker. Behind Envoy, any method may."""
    if caller == "nobody":
        return set()
    if caller == "tenant":
        return {("POST", target) for target in INFERENCE}
    listed = {(method, target) for target, methods in PASSED.items() for method in [*methods, "OPTIONS"]}
    listed |= {("HEAD", target) for method, target in listed if method == "GET"}
    methods = METHODS if behind_envoy else [*ANY_METHOD, "HEAD", "OPTIONS"]
    return listed | {(method, target) for target in UNKNOWN for method in methods}


class KeptConnection:
    """A connection that is kept as long as the router keeps it. One request after the other."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._writer: asyncio.StreamWriter | None = None

    async def status(self, method: str, target: str, key: str) -> int:
        """The status that a request is answered with."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        head = f"{method} {target} HTTP/1.1\r\nHost: r\r\n{authorization}Content-Length: {len(BODY)}\r\n\r\n"
        self._writer.write((head + BODY).encode("latin-1"))
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if method != "HEAD":
            length = answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await self._reader.readexactly(int(length or 0))
        if b"\r\nconnection: close" in answer:
            await self.close()
        return int(answer[9:12])

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@asynccontextmanager
async def guarded() -> AsyncIterator[tuple[RouterUnderTest, ScriptedWorker]]:
    async with scripted_worker() as worker:
        server = {"token": TOKEN}
        async with router(worker.url, server=server, tenants=TENANTS) as routed:
            yield routed, worker


async def test_router_forwards_exactly_the_listed_routes() -> None:
    async with guarded() as (routed, worker):
        for caller, key in CREDENTIALS.items():
            kept = KeptConnection(routed.url)
            allowed = expected(caller)
            worker.exchanges.clear()
            for target in (*REFUSED, *OWN, *PASSED, *UNKNOWN):
                for method in METHODS:
                    status = await kept.status(method, target, key)
                    if (method, target) in allowed:
                        assert status == 200, (caller, method, target)
                    elif target in REFUSED:
                        assert status == 400, (caller, method, target)
                    else:
                        assert status < 500, (caller, method, target)
            await kept.close()
            seen = [(exchange.method, exchange.target) for exchange in worker.exchanges]
            assert len(seen) == len(set(seen))
            assert set(seen) == allowed


async def test_picker_routes_exactly_the_listed_routes() -> None:
    """The picker answers refused requests itself, and leaves all others unchanged."""

    async def asked(method: str, target: str, key: str, passes: bool) -> int:
        """The status of an answer of the picker's own; 0 where it names a worker."""
        stream = EnvoyStream(channel, Mode.FULL_DUPLEX_STREAMED)
        credential = [("authorization", f"Bearer {key}")] if key else []
        await stream.head(target, ("content-type", "application/json"), *credential, method=method)
        if passes:
            await stream.body(BODY.encode())
        async with asyncio.timeout(60):
            heard = await stream.receive()
            if passes and heard.HasField("request_headers"):
                await stream.receive()  # its body
        await stream.finish()
        return heard.immediate_response.status.code if heard.HasField("immediate_response") else 0

    async with scripted_worker() as worker:
        server = {"token": TOKEN}
        async with picker(worker.url, server=server, tenants=TENANTS) as (_, port), channel_to(port) as channel:
            for (caller, key), target in product(CREDENTIALS.items(), (*REFUSED, *PASSED, *UNKNOWN)):
                allowed = expected(caller, behind_envoy=True)
                statuses = await asyncio.gather(
                    *(asked(method, target, key, (method, target) in allowed) for method in ENVOY_METHODS)
                )
                for method, status in zip(ENVOY_METHODS, statuses, strict=True):
                    if (method, target) in allowed:
                        assert status == 0, (caller, method, target)
                    else:
                        assert status == 400 if target in REFUSED else status in (401, 403, 404, 405), (
                            caller,
                            method,
                            target,
                        )


REQUEST = {"model": "m", "prompt": "x"}
PAGE = "https://chat.example.com"


async def served(exchange: Exchange) -> None:
    await exchange.answer(json.dumps({"target": exchange.target}).encode())


@pytest.mark.parametrize("root_path", ["/llm", "/a/b/"])
async def test_root_path_is_removed_from_paths(root_path: str) -> None:
    server = {"root_path": root_path}
    async with scripted_worker(served) as worker, router(worker.url, server=server) as routed:
        root = root_path.rstrip("/")
        for _ in range(3):  # also of a head that is known
            for path in ("/v1/completions", "/v1/completions?a=b", "/v1/embeddings"):
                assert (await routed.call(root + path, REQUEST)).json() == {"target": path}
                assert (await routed.call(path, REQUEST)).json() == {"target": path}
        assert (await routed.call(f"{root}/v1/models")).json()["data"][0]["id"] == "m"
        assert (await routed.call(f"{root}/health")).status == 200
        assert (await routed.call(f"{root}/ui")).status == 200
        assert (await routed.call(f"{root}x/v1/models")).status == 404
        assert (await routed.call(f"{root}/%2e%2e/v1/models")).status == 400


async def preflight(routed: RouterUnderTest, origin: str, path: str = "/v1/chat/completions") -> Any:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return await routed.call(path, method="OPTIONS", headers=headers)


KEY = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"


async def test_listed_origins_are_allowed() -> None:
    server = {"cors_origins": [PAGE], "token": "t"}
    tenants = {"named": {"a": {"keys": [KEY]}}}
    async with scripted_worker(served) as worker, router(worker.url, server=server, tenants=tenants) as routed:
        reply = await preflight(routed, PAGE)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
        headers = {"origin": PAGE, "authorization": "Bearer secret"}
        for path in ("/v1/completions", "/v1/models"):
            for _ in range(2):
                reply = await routed.call(path, REQUEST if path != "/v1/models" else None, headers=headers)
                assert reply.status == 200
                assert reply.headers["access-control-allow-origin"] == PAGE
                assert "x-kvrouter-worker" in reply.headers["access-control-expose-headers"]
        refused = await routed.call("/v1/completions", REQUEST, headers={"origin": PAGE})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        other = "https://elsewhere.example.com"
        assert (await preflight(routed, other)).status == 400
        reply = await routed.call("/v1/completions", REQUEST, headers=headers | {"origin": other})
        assert "access-control-allow-origin" not in reply.headers
        # What changes the service stays closed to pages.
        reply = await routed.call(
            "/workers", {"url": worker.url}, headers={"origin": PAGE, "authorization": "Bearer t"}
        )
        assert (reply.status, reply.error["code"]) == (403, "cross_site")


async def test_cors_headers_are_absent_without_origins() -> None:
    async with scripted_worker(served) as worker, router(worker.url) as routed:
        reply = await routed.call("/v1/completions", REQUEST, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers
