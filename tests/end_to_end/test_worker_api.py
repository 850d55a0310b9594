"""Adding, draining and removing workers over HTTP, and following the settings file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from router_under_test import QUICK, RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

from benchmarks.ports import free_port
from router.settings import SettingsFile

PATH = "/v1/completions"
BODY = b'{"model": "m", "prompt": "x", "max_tokens": 1}'


async def status(routed: RouterUnderTest, worker: ScriptedWorker) -> dict[str, Any]:
    return next((known for known in await routed.workers() if known["worker"] == worker.url), {})


async def until_state(routed: RouterUnderTest, worker: ScriptedWorker, *states: str | None) -> None:
    await until(lambda: status(routed, worker), lambda status: status.get("state") in states)


async def test_worker_is_added_used_and_removed() -> None:
    async with scripted_worker() as worker, router() as routed:
        assert (await routed.call(PATH, BODY)).status == 503
        added = await routed.call("/workers", {"url": worker.url, "weight": 2, "role": "decode"})
        assert added.status == 201
        assert added.json()["worker"] == worker.url
        await until_state(routed, worker, "warming")
        shown = await status(routed, worker)
        assert (shown["source"], shown["weight"], shown["role"]) == ("api", 2, "decode")
        assert (await routed.call(PATH, BODY)).worker == worker.url
        removed = await routed.call(f"/workers?url={worker.url}", method="DELETE")
        assert removed.json() == {"worker": worker.url, "removed": True, "requests_in_flight": 0}
        assert await routed.workers() == []
        assert (await routed.call(PATH, BODY)).status == 503
        assert await routed.metric("kvrouter_requests_total", worker=worker.url) == 0


async def test_registration_may_wait_until_its_worker_is_routable() -> None:
    async with scripted_worker() as worker, router() as routed:
        added = await routed.call("/workers?wait=30", {"url": worker.url})
        assert (added.status, added.json()["up"]) == (201, True)
        assert (await routed.call(PATH, BODY)).worker == worker.url
        nowhere = f"http://127.0.0.1:{free_port()}"
        late = await routed.call("/workers?wait=0.1", {"url": nowhere})
        assert (late.status, late.error["code"], late.error["param"]) == (503, "worker_not_ready", "wait")
        assert nowhere in [each["worker"] for each in await routed.workers()]
        for wait in ("-1", "3601", "nan", "x"):
            assert (await routed.call(f"/workers?wait={wait}", {"url": worker.url})).status == 400


async def test_trainer_registers_and_removes_its_engine_by_id() -> None:
    async with scripted_worker() as worker, router() as routed:
        added = await routed.call(
            "/workers", {"url": worker.url, "worker_type": "prefill", "bootstrap_port": 9000, "id": "engine-1"}
        )
        assert (added.status, added.json()["id"]) == (201, "engine-1")
        assert (await routed.call("/workers", {"url": worker.url, "worker_type": "decode"})).status == 201
        await until_state(routed, worker, "warming")
        [shown] = (await routed.call("/workers")).json()["workers"]
        assert (shown["url"], shown["role"]) == (worker.url, "decode")
        assert "/" not in shown["id"]
        removed = await routed.call(f"/workers/{shown['id']}", method="DELETE")
        assert removed.json()["removed"] is True
        assert (await routed.call(f"/workers/{shown['id']}", method="DELETE")).status == 404


async def test_engine_is_added_listed_and_removed_by_its_url() -> None:
    async with scripted_worker() as worker, router() as routed:
        added = await routed.call(f"/add_worker?url={worker.url}", method="POST")
        assert (added.status, added.json()) == (200, {"status": "success", "worker_urls": {worker.url: 0}})
        assert (await routed.call("/list_workers")).json() == {"urls": [worker.url]}
        assert (await routed.call("/remove_worker", {"worker_url": worker.url})).status == 200
        assert (await routed.call("/list_workers")).json() == {"urls": []}


async def test_finished_session_is_no_error_and_needs_its_name() -> None:
    async with router() as routed:
        assert (await routed.call("/finish_session?session_id=s", method="POST")).status == 200
        refused = await routed.call("/finish_session", method="POST")
        assert (refused.status, refused.json()["error"]["param"]) == (400, "session_id")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/workers", {"worker_type": "encode"}, "worker_type"),
        ("/workers", {"worker_type": ["prefill"]}, "worker_type"),
        ("/workers", {"worker_type": "prefill", "role": "decode"}, "worker_type"),
        ("/workers", {"id": "a", "name": "b"}, "id"),
        ("/workers", {"id": "a/b"}, "name"),
        ("/add_worker", {"url": ""}, "url"),
        ("/add_worker", {"url": 1}, "url"),
    ],
)
async def test_wrong_field_of_a_trainer_is_named(path: str, body: dict[str, Any], param: str) -> None:
    async with router() as routed:
        refused = await routed.call(path, {"url": "http://127.0.0.1:1"} | body)
        assert (refused.status, refused.json()["error"]["param"]) == (400, param)


async def test_every_model_of_a_worker_is_described() -> None:
    async with scripted_worker() as worker:
        worker.models = ["m", "n"]
        async with router(worker.url) as routed:
            await until(routed.workers, lambda found: len(found) == 2)
            found = await routed.workers()
    assert {known["model"] for known in found} == {"m", "n"}
    assert [(known["worker"], known["url"]) for known in found] == [(worker.url, worker.url)] * 2
    assert all("state" in known for known in found)
    assert all("load" in rank for known in found for rank in known["ranks"])


async def test_worker_added_again_changes_its_settings() -> None:
    async with scripted_worker() as worker, router() as routed:
        for weight in (1, 3):
            assert (await routed.call("/workers", {"url": worker.url, "weight": weight})).status == 201
        assert [known["weight"] for known in await routed.workers()] == [3]


async def test_requests_of_removed_worker_finish() -> None:
    end = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await end.wait()
        await exchange.chunk(b"data: 2\n\n")
        await exchange.chunk(b"")

    async with scripted_worker(script) as worker, router() as routed:
        await routed.call("/workers", {"url": worker.url})
        await until_state(routed, worker, "warming")
        async with routed.request(PATH, BODY) as response:
            removed = await routed.call(f"/workers?url={worker.url}", method="DELETE")
            assert removed.json()["requests_in_flight"] == 1
            end.set()
            assert await response.read() == b"data: 1\n\ndata: 2\n\n"
        assert await routed.workers() == []


async def test_drained_worker_finishes_and_is_used_again() -> None:
    end = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await end.wait()
        await exchange.chunk(b"")

    async with scripted_worker(script) as worker, scripted_worker() as other, router(worker.url) as routed:
        async with routed.request(PATH, BODY) as response:
            drained = await routed.call("/workers/drain", {"url": worker.url})
            assert (drained.json()["state"], drained.json()["requests_in_flight"]) == ("draining", 1)
            assert (await routed.call(PATH, BODY)).status == 503
            await routed.call("/workers", {"url": other.url})
            await until_state(routed, other, "warming")
            assert {(await routed.call(PATH, BODY)).worker for _ in range(4)} == {other.url}
            end.set()
            assert await response.read() == b"data: 1\n\n"
        await until_state(routed, worker, "drained")
        assert await routed.metric("kvrouter_worker_state", worker=worker.url, state="drained") == 1
        assert (await routed.call("/workers/undrain", {"url": worker.url})).json()["state"] == "ready"
        assert (await routed.call(PATH, BODY)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "expected", "param"),
    [
        ("POST", "/workers", {"url": "http://8.8.8.8:80"}, 403, "url"),
        ("POST", "/workers", {"url": "http://169.254.169.254/"}, 403, "url"),
        ("POST", "/workers", {"url": "http://[::ffff:169.254.169.254]/"}, 403, "url"),
        ("POST", "/workers", {"url": "http://127.0.0.1/", "pull_host": "169.254.169.254"}, 403, "pull_host"),
        ("POST", "/workers", {"url": "http://no-such-host.invalid/"}, 403, "url"),
        (
            "POST",
            "/workers",
            {"url": "http://127.0.0.1:1", "streams": [{"endpoint": "tcp://8.8.8.8:1"}]},
            403,
            "streams",
        ),
        ("POST", "/workers", {"url": "http://127.0.0.1:1", "streams": [{"endpoint": "ipc:///x"}]}, 400, "streams"),
        ("POST", "/workers", {"url": "ftp://127.0.0.1"}, 400, "url"),
        ("POST", "/workers", {"url": "http://127.0.0.1:1", "weight": 0}, 400, "weight"),
        ("POST", "/workers", {"url": "http://127.0.0.1:1", "rank": 0}, 400, "rank"),
        ("POST", "/workers", b"{", 400, None),
        ("POST", "/workers/drain", {"url": "http://127.0.0.1:1"}, 404, "url"),
        ("POST", "/workers/drain", {}, 400, "url"),
        ("DELETE", "/workers?url=http://127.0.0.1:1", None, 404, "url"),
    ],
)
async def test_invalid_changes_are_refused(
    empty: RouterUnderTest, method: str, path: str, body: Any, expected: int, param: str | None
) -> None:
    reply = await empty.call(path, body, method)
    assert (reply.status, reply.error["param"]) == (expected, param)
    assert await empty.workers() == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"url": "http://127.0.0.1:1/v1"}, "url: remove /v1 from the URL: the router adds the path of each request"),
        ({"url": "127.0.0.1:8000"}, "url: no scheme: write http://127.0.0.1:8000"),
        ({"url": "http://127.0.0.1:1", "weight": 0}, "weight: expected more than 0 (found 0)"),
        (
            {"url": "http://127.0.0.1:1", "role": "decoder"},
            "role: expected one of both, prefill, decode, encode; did you mean",
        ),
    ],
)
async def test_plain_mistake_gets_plain_answer(empty: RouterUnderTest, body: Any, message: str) -> None:
    assert (await empty.call("/workers", body)).error["message"].startswith(message)


async def test_router_is_refused_as_worker(empty: RouterUnderTest) -> None:
    """A router in front of itself would forward requests in a circle."""
    await empty.call("/workers", {"url": empty.url})
    await until(empty.workers, lambda workers: workers and workers[0]["state"] == "down")
    [worker] = await empty.workers()
    assert "a kvrouter answers there" in worker["problem"]
    await empty.call(f"/workers?url={empty.url}", method="DELETE")


@pytest.fixture(scope="module")
async def empty() -> Any:
    async with router() as routed:
        yield routed


async def test_redirect_of_worker_is_not_followed() -> None:
    async def redirect(exchange: Exchange) -> None:
        await exchange.answer(b"", "307 Temporary Redirect", b"location: " + peer_load.url.encode() + b"/secret\r\n")

    async with scripted_worker() as peer_load, scripted_worker(redirect) as worker, router() as routed:
        worker.answers_discovery = False
        await routed.call("/workers", {"url": worker.url})
        await until_state(routed, worker, "down")
        assert {exchange.target for exchange in worker.exchanges} == {"/v1/models", "/metrics"}
        assert peer_load.exchanges == []


async def test_configured_worker_cannot_be_changed_over_http() -> None:
    async with scripted_worker() as worker, router(worker.url) as routed:
        for reply in (
            await routed.call(f"/workers?url={worker.url}/", method="DELETE"),
            await routed.call("/workers", {"url": worker.url}),
        ):
            assert reply.status == 409
            assert "is from config" in reply.error["message"]
        assert (await routed.call(PATH, BODY)).status == 200


async def test_changes_need_admin_token() -> None:
    async with scripted_worker() as worker, router(server={"token": "secret"}) as routed:
        for method, path in (
            ("POST", "/workers"),
            ("POST", "/workers/drain"),
            ("DELETE", f"/workers?url={worker.url}"),
        ):
            reply = await routed.call(path, {"url": worker.url} if method == "POST" else None, method)
            assert reply.status == 401
        added = await routed.call("/workers", {"url": worker.url}, headers={"authorization": "Bearer secret"})
        assert added.status == 201


async def test_workers_follow_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"

    def write(*workers: ScriptedWorker) -> None:
        replaced = tmp_path / "new"
        replaced.write_text("workers: [" + ", ".join(f'{{url: "{worker.url}"}}' for worker in workers) + "]")
        replaced.rename(path)

    async with scripted_worker() as one, scripted_worker() as two:
        write(one)
        async with router(one.url, file=SettingsFile(path, {"fleet": QUICK})) as routed:
            write(one, two)
            await until_state(routed, two, "warming", "ready")
            path.write_text("workers: [{url: nowhere}]")
            await asyncio.sleep(1.5)  # the file is looked at every second
            assert len(await routed.workers()) == 2
            write(two)
            await until_state(routed, one, None)
            assert (await routed.call(PATH, BODY)).worker == two.url
