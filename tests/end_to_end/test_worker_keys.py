"""Workers that want an API key, and workers that have names: what they are shown, and what others see of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from router_under_test import QUICK, RouterUnderTest, router, until
from running_app import running_app
from simulated_pairs import STYLES, simulated_pairs
from structlog.testing import capture_logs

from kvrouter.tools.doctor.run import examine
from router.auth import hashed_key
from router.observability.advice import ADVICE
from router.settings import Settings
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

KEY = "sk-worker-secret"
OTHER_KEY = "sk-another-secret"
TOKEN = "operators-token"
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TENANTS = {
    "server": {"token": TOKEN},
    "tenants": {"named": {"a": {"keys": [hashed_key("tenants-key")]}}},
}


class KeyedWorker:
    """A worker that refuses everything without its key, and remembers what it was shown with what."""

    def __init__(self, expected: str = f"Bearer {KEY}") -> None:
        self.expected = expected
        self.shown: list[tuple[str, str | None]] = []
        self.url = ""

    @property
    def asked(self) -> set[str]:
        """The paths that were requested with the right key."""
        return {path for path, shown in self.shown if shown == self.expected}

    async def answer(self, request: web.Request) -> web.Response:
        shown = request.headers.get("authorization")
        self.shown.append((request.path, shown))
        if shown != self.expected:
            return web.json_response({"error": "Unauthorized"}, status=401)
        match request.path:
            case "/v1/models":
                return web.json_response({"data": [{"id": "m"}]})
            case "/kv_event_sources":
                return web.json_response({})
            case "/tokenize":
                return web.json_response({"tokens": [1, 2, 3], "count": 3})
            case path if path.endswith("/render"):
                return web.json_response({"token_ids": [1, 2, 3]})
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})


@asynccontextmanager
async def keyed_worker(expected: str = f"Bearer {KEY}") -> AsyncIterator[KeyedWorker]:
    """Run a worker that expects this Authorization header."""
    worker = KeyedWorker(expected)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", worker.answer)
    async with running_app(app) as worker.url:
        yield worker


async def everything_shown(routed: RouterUnderTest, headers: dict[str, str] | None = None) -> str:
    """Return the responses of all routes that show workers."""
    texts = []
    for path in ("/health", "/metrics", "/workers", "/dump", "/openapi.json"):
        reply = await routed.call(path, headers=headers)
        texts.append(reply.body.decode() + str(reply.headers))
    for path, body in (
        ("/match", CHAT),
        ("/explain", {"request": CHAT}),
        (CHAT_PATH, CHAT),
        ("/workers/drain", {"url": "http://nobody:of-interest@127.0.0.1:1"}),
    ):
        reply = await routed.call(path, body, headers=headers)
        texts.append(reply.body.decode() + str(reply.headers))
    async with routed.request("/live", headers=headers) as live:
        texts.append((await live.content.readline()).decode())
        texts.append((await live.content.readline()).decode())
    return "\n".join(texts)


# Keys


async def test_worker_key_is_sent_with_every_request() -> None:
    async with (
        keyed_worker() as worker,
        router(workers=[{"url": worker.url, "api_key": KEY}]) as routed,
    ):
        assert (await routed.call(CHAT_PATH, CHAT)).status == 200
        wanted = {"/v1/models", "/kv_event_sources", "/metrics", "/v1/chat/completions/render", "/v1/chat/completions"}

        await until(lambda: wanted <= worker.asked)
        assert (await routed.call("/reset_prefix_cache", {})).status == 200
        assert all(shown == worker.expected for _, shown in worker.shown)


async def test_worker_key_overrides_fleet_key() -> None:
    async with (
        keyed_worker() as first,
        keyed_worker(f"Bearer {OTHER_KEY}") as second,
        router(
            workers=[{"url": first.url}, {"url": second.url, "api_key": OTHER_KEY}], fleet={**QUICK, "api_key": KEY}
        ) as routed,
    ):
        await routed.until_up(2)
        assert (await routed.call(CHAT_PATH, CHAT)).status == 200


def from_file(folder: Path) -> dict[str, Any]:
    (folder / "key").write_text(f"{KEY}\n")
    return {"api_key_file": str(folder / "key")}


def from_environment(_: Path) -> dict[str, Any]:
    os.environ["KVROUTER_TEST_KEY"] = KEY
    return {"api_key_env": "KVROUTER_TEST_KEY"}


@pytest.mark.parametrize("given", [from_file, from_environment])
@pytest.mark.parametrize("for_all", [True, False])
async def test_keys_are_read_from_files_and_environment(
    given: Callable[[Path], dict[str, Any]], for_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVROUTER_TEST_KEY", "to be put back")
    key = given(tmp_path)
    async with keyed_worker() as worker:
        worker_key, fleet_key = ({}, key) if for_all else (key, {})
        async with router(workers=[{"url": worker.url, **worker_key}], fleet={**QUICK, **fleet_key}) as routed:
            await routed.until_up()


async def test_changed_key_file_is_read_again(tmp_path: Path) -> None:
    key = from_file(tmp_path)
    async with keyed_worker() as worker, router(workers=[{"url": worker.url, **key}]) as routed:
        assert (await routed.call(CHAT_PATH, CHAT)).status == 200
        worker.expected = f"Bearer {OTHER_KEY}"
        (tmp_path / "key").write_text(OTHER_KEY)

        await until(lambda: routed.call(CHAT_PATH, CHAT), lambda reply: reply.status == 200)


@pytest.mark.parametrize(
    ("user_info", "expected"),
    [("user:pass@", "Basic dXNlcjpwYXNz"), (f"{KEY}@", f"Bearer {KEY}"), (f":{KEY}@", f"Bearer {KEY}")],
)
async def test_user_info_in_url_is_a_hidden_key(user_info: str, expected: str) -> None:
    async with keyed_worker(expected) as worker:
        given = worker.url.replace("http://", f"http://{user_info}")
        with capture_logs() as logs:
            async with router(given) as routed:
                reply = await routed.call(CHAT_PATH, CHAT)
                assert (reply.status, reply.worker) == (200, worker.url)
                shown = await everything_shown(routed)
                assert (await routed.call("/workers/drain", {"url": given})).json()["worker"] == worker.url
        for secret in ("user", "pass@", KEY, "dXNlcjpwYXNz"):
            assert f"//{secret}" not in shown + repr(logs)
        assert KEY not in shown + repr(logs)
        assert "dXNlcjpwYXNz" not in shown + repr(logs)
        assert "pass@" not in shown + repr(logs)


async def test_client_key_is_forwarded_without_tenants() -> None:
    async with (
        keyed_worker() as worker,
        router(workers=[{"url": worker.url, "api_key": KEY}]) as routed,
    ):
        for own, status in ((f"Bearer {KEY}", 200), ("Bearer of-a-stranger", 401)):
            for number in range(2):
                reply = await routed.call(CHAT_PATH, CHAT, headers={"authorization": own})
                assert reply.status == status
                sent = [shown for path, shown in worker.shown if path == CHAT_PATH and shown != worker.expected]
                assert sent == ([] if status == 200 else [own] * (number + 1))


async def test_tenant_keys_and_admin_token_are_not_forwarded() -> None:
    server = TENANTS["server"]
    async with (
        keyed_worker() as worker,
        router(workers=[{"url": worker.url, "api_key": KEY}], **TENANTS | {"server": server}) as routed,
    ):
        for own in ({"authorization": "Bearer tenants-key"}, {"x-api-key": "tenants-key"}):
            assert (await routed.call(CHAT_PATH, CHAT, headers=own)).status == 200
        as_operator = {"authorization": f"Bearer {TOKEN}"}
        assert (await routed.call("/v1/files", headers=as_operator)).status == 200
        assert all(shown == worker.expected for _, shown in worker.shown)
        assert (await routed.call(CHAT_PATH, CHAT)).status == 401


@pytest.mark.parametrize(
    ("host", "keys", "own", "status"),
    [
        ("127.0.0.1", "auto", None, 200),
        ("0.0.0.0", "auto", None, 401),
        ("0.0.0.0", "auto", f"Bearer {KEY}", 200),
        ("0.0.0.0", "always", None, 200),
        ("0.0.0.0", "always", "Bearer EMPTY", 200),
        ("127.0.0.1", "never", None, 401),
    ],
)
async def test_worker_keys_setting_controls_keys_off_loopback(
    host: str, keys: str, own: str | None, status: int
) -> None:
    with capture_logs() as logs:
        stack = AsyncExitStack()
        worker = await stack.enter_async_context(keyed_worker())
        known = [{"url": worker.url, "api_key": KEY}]
        sections = {"server": {"host": host}, "proxy": {"worker_keys": keys}}
        routed = await stack.enter_async_context(router(workers=known, **sections))
    withheld = keys == "never" or (host == "0.0.0.0" and keys == "auto")
    assert ("proxy.worker_keys" in {line.get("setting") for line in logs}) is withheld
    async with stack:
        await routed.until_up()
        headers = {"authorization": own} if own else {}
        assert (await routed.call(CHAT_PATH, CHAT, headers=headers)).status == status


async def test_fleet_key_is_sent_to_added_workers_only_with_token() -> None:
    fleet = {**QUICK, "api_key": KEY}
    for server in ({}, {"token": TOKEN}):
        async with keyed_worker() as worker, router(fleet=fleet, server=server) as routed:
            operator = {"authorization": f"Bearer {TOKEN}"}
            assert (await routed.call("/workers", {"url": worker.url}, headers=operator)).status == 201

            await until(lambda: worker.shown)
            assert all(shown == (worker.expected if server else None) for _, shown in worker.shown)


async def test_added_worker_may_have_key_but_no_key_file(tmp_path: Path) -> None:
    async with keyed_worker() as worker, router() as routed:
        for more in (from_file(tmp_path), {"api_key_env": "HOME"}):
            refused = await routed.call("/workers", {"url": worker.url, **more})
            assert (refused.status, refused.error["param"]) == (400, next(iter(more)))
        added = await routed.call("/workers", {"url": worker.url, "api_key": KEY})
        assert added.status == 201
        await routed.until_up()
        assert KEY not in added.body.decode() + await everything_shown(routed)


@pytest.mark.parametrize("style", STYLES)
async def test_key_is_sent_with_prefill_and_decode(style: str) -> None:
    async with (
        simulated_pairs(style, api_key=KEY) as pairs,
        router(
            workers=pairs.known, fleet={**QUICK, "api_key": KEY}, disaggregation={"decode_computes": False}
        ) as routed,
    ):
        await routed.until_up(2)
        body = {"model": "simulated", "prompt": "a b c d e f g h", "max_tokens": 2}
        reply = await routed.call("/v1/completions", body)
        assert reply.status == 200, reply.body
        assert reply.headers["x-kvrouter-prefill-worker"] == pairs.prefills[0]


async def test_refused_key_is_a_finding_and_one_log_line() -> None:
    for given in ({}, {"api_key": OTHER_KEY}):
        with capture_logs() as logs:
            async with keyed_worker() as worker, router(workers=[{"url": worker.url, **given}]) as routed:
                found = await routed.findings()
        keys = [each for each in found if each["finding"] == "worker_key"]
        assert [(each["worker"], "fleet.api_key" in each["detail"]) for each in keys] == [(worker.url, True)]
        lines = [line for line in logs if line["event"] == "worker refuses the router's API key"]
        assert len(lines) == 1
        assert "workers[].api_key" in lines[0]["reason"]
        assert OTHER_KEY not in repr(logs) + json.dumps(found)


async def test_finding_ends_once_worker_accepts_key() -> None:
    async with (
        keyed_worker(f"Bearer {OTHER_KEY}") as worker,
        router(workers=[{"url": worker.url, "api_key": KEY}]) as routed,
    ):
        assert (await routed.call(CHAT_PATH, CHAT)).status == 503
        worker.expected = f"Bearer {KEY}"
        await routed.until_up()

        async def clean() -> bool:
            found = await routed.findings()
            return not [each for each in found if each["finding"] == "worker_key"]

        await until(clean)


@pytest.mark.parametrize("where", ["workers", "fleet", "option"])
async def test_doctor_uses_keys_of_settings_and_option(where: str) -> None:
    async with running(SimulatedWorkerSettings(api_key=KEY)) as url:
        worker = {"url": url, **({"api_key": KEY} if where == "workers" else {})}
        settings = Settings(workers=[worker], fleet={"api_key": KEY} if where == "fleet" else {})
        examined = await examine(settings, KEY if where == "option" else None, 4.0)
        assert [each.cause for each in examined[0].findings] == []


async def test_doctor_reports_missing_or_wrong_key() -> None:
    async with running(SimulatedWorkerSettings(api_key=KEY)) as url:
        for given in ({}, {"api_key": OTHER_KEY}):
            (examined,) = await examine(Settings(workers=[{"url": url, **given}]), None, 4.0)
            assert [each.cause for each in examined.findings] == ["worker_key"]
            assert "api_key" in examined.findings[0].evidence + ADVICE["worker_key"].action


@pytest.mark.parametrize(("style", "refused"), [(None, {"/v1/models"}), ("sglang", {"/v1/models", "/server_info"})])
async def test_simulated_worker_needs_key_like_its_engine(style: Any, refused: set[str]) -> None:
    settings = SimulatedWorkerSettings(api_key=KEY, disaggregation=style)
    assert KEY not in repr(settings)
    async with running(settings) as url, aiohttp.ClientSession() as session:

        async def status(path: str, **headers: str) -> int:
            async with session.get(url + path, headers=headers) as response:
                return response.status

        paths = ("/health", "/metrics", "/v1/models", *(["/server_info"] if style else []))
        assert {path for path in paths if await status(path) == 401} == refused
        assert await status("/v1/models", authorization=f"Bearer {KEY}") == 200
        assert await status("/v1/models", authorization=f"Bearer {OTHER_KEY}") == 401


# Names


async def test_worker_name_is_shown_everywhere() -> None:
    async with running(SimulatedWorkerSettings(model="m")) as url:
        with capture_logs() as logs:
            async with router(workers=[{"url": url, "name": "gpu-a"}]) as routed:
                await routed.until_up()
                reply = await routed.call(CHAT_PATH, CHAT)
                assert reply.worker == "gpu-a"
                matches = (await routed.call("/match", CHAT)).json()["matches"]
                assert [match["worker"] for match in matches] == ["gpu-a"]
                explained = (await routed.call("/explain", {"request": CHAT})).json()
                assert explained["choice"]["worker"] == explained["candidates"][0]["worker"] == "gpu-a"
                (shown,) = await routed.workers()
                assert (shown["worker"], shown["url"]) == ("gpu-a", url)
                assert await routed.metric("kvrouter_worker_up", worker="gpu-a") == 1
                assert await routed.metric("kvrouter_requests_total", worker="gpu-a") == 1
                assert sum([await routed.metric("kvrouter_stream_state", worker="gpu-a")]) == 1
                assert url not in (await routed.call("/metrics")).body.decode()
                async with routed.request("/live") as live:
                    for _ in range(2):
                        line = (await live.content.readline()).decode()
                        assert url not in line
        assert all(line.get("worker") != url for line in logs)


async def test_worker_is_drained_and_removed_by_url_or_name() -> None:
    async with running(SimulatedWorkerSettings(model="m")) as url, router() as routed:
        assert (await routed.call("/workers", {"url": url, "name": "gpu-a"})).json()["worker"] == "gpu-a"
        for which in ({"url": url}, {"name": "gpu-a"}, {"url": "gpu-a"}, {"url": f"{url}/"}):
            assert (await routed.call("/workers/drain", which)).json()["state"].startswith("drain")
            assert (await routed.call("/workers/undrain", which)).json()["worker"] == "gpu-a"
        neither = await routed.call("/workers/drain", {})
        assert (neither.status, neither.error["param"]) == (400, "url")
        assert (await routed.call("/workers?name=gpu-a", method="DELETE")).json()["removed"]


async def test_duplicate_worker_name_is_refused() -> None:
    async with (
        keyed_worker() as first,
        keyed_worker() as second,
        router(workers=[{"url": first.url, "name": "gpu-a"}]) as routed,
    ):
        refused = await routed.call("/workers", {"url": second.url, "name": "gpu-a"})
        assert (refused.status, refused.error["param"]) == (409, "name")


async def test_requests_are_counted_under_worker_names() -> None:
    async with running(SimulatedWorkerSettings(model="m")) as url:
        workers = [{"url": "http://127.0.0.1:9", "name": "gone"}, {"url": url, "name": "there"}]
        async with router(workers=workers) as routed:
            await routed.until_up()
            found = await routed.findings()
            assert "gone" in {each["worker"] for each in found if each["finding"] == "worker_down"}
            await asyncio.gather(*(routed.call(CHAT_PATH, CHAT) for _ in range(4)))
            assert await routed.metric("kvrouter_requests_total", worker="there") == 4
