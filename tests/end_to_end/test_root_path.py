"""A router behind a path of its own, and pages of other origins that ask it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router
from scripted_worker import Exchange, scripted_worker

BODY = {"model": "m", "prompt": "x"}
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
                assert (await routed.call(root + path, BODY)).json() == {"target": path}
                assert (await routed.call(path, BODY)).json() == {"target": path}
        assert (await routed.call(f"{root}/v1/models")).json()["data"][0]["id"] == "m"
        assert (await routed.call(f"{root}/health")).status == 200
        assert (await routed.call(f"{root}/ui")).status == 200
        assert (await routed.call(f"{root}x/v1/models")).status == 403
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
                reply = await routed.call(path, BODY if path != "/v1/models" else None, headers=headers)
                assert reply.status == 200
                assert reply.headers["access-control-allow-origin"] == PAGE
                assert "x-kvrouter-worker" in reply.headers["access-control-expose-headers"]
        refused = await routed.call("/v1/completions", BODY, headers={"origin": PAGE})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        other = "https://elsewhere.example.com"
        assert (await preflight(routed, other)).status == 400
        reply = await routed.call("/v1/completions", BODY, headers=headers | {"origin": other})
        assert "access-control-allow-origin" not in reply.headers
        # What changes the service stays closed to pages.
        reply = await routed.call(
            "/workers", {"url": worker.url}, headers={"origin": PAGE, "authorization": "Bearer t"}
        )
        assert (reply.status, reply.error["code"]) == (403, "cross_site")


async def test_cors_headers_are_absent_without_origins() -> None:
    async with scripted_worker(served) as worker, router(worker.url) as routed:
        reply = await routed.call("/v1/completions", BODY, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers
