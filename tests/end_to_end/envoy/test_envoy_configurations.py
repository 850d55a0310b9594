"""Other configurations of a real Envoy: the cheapest, headers alone, failing open, several pools and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import yaml
from envoy_under_test import CONFIG, envoy, filters, listed_workers, processing
from picker_under_test import picker
from router_under_test import RouterUnderTest, until
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_worker, scripted_workers

from router.picker import server as picker_server

pytest.importorskip("envoy", reason="make test-envoy installs it", exc_type=ImportError)

pytestmark = pytest.mark.envoy

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": "some words"}


def cheapest(_: Any) -> Any:
    """The configuration of deploy/envoy/cheapest.yaml."""
    return yaml.safe_load(CONFIG.with_name("cheapest.yaml").read_text())


async def events(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.chunk(b"data: 1\n\n")
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.chunk(b"")


class Held:
    """A script that streams an event, and ends the stream when it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await self.released.wait()
        await exchange.chunk(b"")


async def check_release(side: RouterUnderTest, through: RouterUnderTest, held: Held) -> None:
    """Assert that a stream holds its load until its end, and counts as answered."""
    async with through.request(PATH, {**BODY, "stream": True}) as response:
        assert response.status == 200
        await response.content.readuntil(b"\n\n")
        assert await side.requests_in_flight() == 1
        held.released.set()
        await response.read()
    await side.until_released()
    assert await side.metric("kvrouter_requests_abandoned_total") == 0


async def test_cheapest_configuration_routes_and_releases(tmp_path: Path) -> None:
    held = Held()
    async with (
        scripted_worker(held) as worker,
        picker(worker.url) as (side, port),
        envoy(port, tmp_path, cheapest) as through,
    ):
        await check_release(side, through, held)
        worker.script = events
        reply = await through.call(PATH, BODY)
        assert (reply.status, reply.worker, reply.body) == (200, worker.url, b"data: 1\n\ndata: [DONE]\n\n")
        assert (await through.call(PATH, {**BODY, "prompt": "word " * 200_000})).status == 200
        assert (await through.call(PATH, b"{nothing")).status == 400
        await worker.stop()
        reply = await through.call(PATH, BODY)
        assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
        await side.until_released()


async def test_cheapest_configuration_skips_unreachable_worker(tmp_path: Path) -> None:
    """Envoy reports no responses in this configuration, but reports connection failures."""
    fleet = {"probe_interval": 60.0, "metrics_interval": 60.0}
    async with (
        scripted_worker() as dead,
        scripted_worker() as alive,
        picker(dead.url, alive.url, fleet=fleet, policy={"name": "round_robin"}) as (side, port),
        envoy(port, tmp_path, cheapest) as through,
    ):
        await dead.stop()
        replies = [await through.call(PATH, BODY) for _ in range(2)]
        assert [reply.error["code"] for reply in replies if reply.status == 503] == ["no_worker_available"]
        await side.until_metric(0, "kvrouter_worker_up", worker=dead.url)
        for _ in range(4):
            assert (await through.call(PATH, BODY)).worker == alive.url
        await side.until_released()


async def test_picker_routes_by_headers_alone(tmp_path: Path) -> None:
    def change(_: Any) -> Any:
        found = cheapest(None)
        filters(found)[0]["typed_config"]["processing_mode"]["request_body_mode"] = "NONE"
        return found

    held = Held()
    async with (
        scripted_worker(held) as worker,
        picker(worker.url, policy={"name": "least_loaded"}, proxy={"engine_fields": "pass"}) as (side, port),
        envoy(port, tmp_path, change) as through,
    ):
        await check_release(side, through, held)
        assert b"some words" in worker.last.body


async def test_load_is_released_without_response_processing(tmp_path: Path) -> None:
    """kgateway configures Envoy like this. The stream stays open until the end of the response."""

    def change(_: Any) -> Any:
        found = cheapest(None)
        skipped = {"response_header_mode": "SKIP", "response_trailer_mode": "SKIP"}
        filters(found)[0]["typed_config"]["processing_mode"] |= skipped
        return found

    held = Held()
    async with (
        scripted_worker(held) as worker,
        picker(worker.url) as (side, port),
        envoy(port, tmp_path, change) as through,
    ):
        await check_release(side, through, held)


async def test_mode_override_skips_response_body(tmp_path: Path) -> None:
    """Answers would be shown; `mode_override` says for each that it need not be."""

    def change(_: Any) -> Any:
        found = cheapest(None)
        config = filters(found)[0]["typed_config"]
        config["allow_mode_override"] = True
        config["processing_mode"] |= {"response_header_mode": "SEND", "response_body_mode": "STREAMED"}
        return found

    held = Held()
    async with (
        scripted_worker(held) as worker,
        picker(worker.url, picker={"read_usage": 0}) as (side, port),
        envoy(port, tmp_path, change) as through,
    ):
        await check_release(side, through, held)


async def test_envoy_that_fails_open_works_without_picker(tmp_path: Path) -> None:
    """Envoy chooses a worker itself if its cluster lists the workers."""
    async with scripted_worker() as worker:
        async with picker(worker.url) as (_, port):
            pass

        def change(found: Any) -> None:
            listed_workers([worker.url.rpartition(":")[2]])(found)
            processing(found)["failure_mode_allow"] = True

        async with envoy(port, tmp_path, change) as through:
            # A filter that streams bodies loses them if it fails, so that only a request without a body is answered.
            assert (await through.call("/version")).status == 200


async def test_inference_pools_use_their_own_picker(tmp_path: Path) -> None:
    async with (
        scripted_workers(*[Exchange.answer] * 2) as workers,
        picker(workers[0].url) as (one, first),
        picker(workers[1].url) as (two, second),
    ):

        def change(_: Any) -> Any:
            found = cheapest(None)
            resources = found["static_resources"]
            other = yaml.safe_load(yaml.safe_dump(resources["clusters"][1]))
            other["name"] = other["load_assignment"]["cluster_name"] = "other-picker"
            address = other["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
            address["socket_address"]["port_value"] = second
            resources["clusters"].append(other)
            manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
            route = manager["route_config"]["virtual_hosts"][0]["routes"][0]
            per_route = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
            service = {"envoy_grpc": {"cluster_name": "other-picker"}}
            manager["route_config"]["virtual_hosts"][0]["routes"].insert(
                0,
                {
                    "match": {"prefix": "/", "headers": [{"name": "pool", "string_match": {"exact": "other"}}]},
                    "route": route["route"],
                    "typed_per_filter_config": {
                        "envoy.filters.http.ext_proc": {"@type": per_route, "overrides": {"grpc_service": service}}
                    },
                },
            )
            return found

        async with envoy(first, tmp_path, change) as through:
            for headers, worker in (({}, workers[0]), ({"pool": "other"}, workers[1])) * 3:
                reply = await through.call(PATH, BODY, headers=headers)
                assert (reply.status, reply.worker) == (200, worker.url)
        for side in (one, two):
            await side.until_released()


async def test_envoy_reaches_picker_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker_server, "LOOK_SECONDS", 0.02)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))

    def write() -> None:
        pair = authority.issue_cert("127.0.0.1")
        pair.cert_chain_pems[0].write_to_path(str(tmp_path / "crt"))
        pair.private_key_pem.write_to_path(str(tmp_path / "key"))

    def change(found: Any) -> None:
        found["static_resources"]["clusters"][1]["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"validation_context": {"trusted_ca": {"filename": str(tmp_path / "ca")}}},
            },
        }

    write()
    section = {"certificate": tmp_path / "crt", "key": tmp_path / "key"}
    async with (
        scripted_worker() as worker,
        picker(worker.url, picker=section) as (side, port),
        envoy(port, tmp_path, change) as through,
    ):
        for _ in range(3):
            assert (await through.call(PATH, BODY)).status == 200
            write()
        await side.until_released()


# Many at once


@pytest.fixture
async def workers() -> AsyncIterator[list[ScriptedWorker]]:
    async with scripted_workers(*[Exchange.answer] * 4) as workers:
        yield workers


@pytest.mark.parametrize("change", [lambda _: None, cheapest], ids=["knows most", "cheapest"])
async def test_many_requests_with_failures_release_all_load(
    workers: list[ScriptedWorker], tmp_path: Path, change: Any
) -> None:
    """Streams, slow bodies, clients that leave early and late, and a picker's answers, all in flight at once."""
    released = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await released.wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.chunk(b"")

    for worker in workers:
        worker.script = script
    async with (
        picker(*(worker.url for worker in workers)) as (side, port),
        envoy(port, tmp_path, change) as through,
    ):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(through.url, connector=connector) as session:
            tasks = [asyncio.create_task(_one_of_many(session, number)) for number in range(300)]
            staying = sum(number % 5 in (0, 1) for number in range(300))
            await until(side.requests_in_flight, lambda count: count == staying)
            released.set()
            await asyncio.gather(*tasks)
        await side.until_released()


async def _one_of_many(session: aiohttp.ClientSession, number: int) -> None:
    kind = number % 5
    asked = {**BODY, "prompt": f"{number} " * 200, "stream": True}
    if kind == 2:
        asked["model"] = "other"
    async with session.post(PATH, json=asked) as response:
        if kind == 2:
            assert response.status == 404
            return
        assert response.status == 200
        await response.content.readuntil(b"\n\n")
        if kind < 2:
            assert await response.read() == b"data: [DONE]\n\n"
