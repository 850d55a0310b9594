"""Dynamo's own selection service and the routes below `/selection`: equal answers to the same requests and events."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_under_test import RouterUnderTest, router, until

from benchmarks.ports import free_port, free_ports
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, WireForm
from worker import PublisherConfig, Reporter

pytestmark = pytest.mark.dynamo
PYTHON = Path(__file__).parents[2] / ".bench/dynamo/bin/python"
TOKENS = list(range(64))
WORKER = {"worker_id": 1, "endpoint": "http://127.0.0.1:1", "block_size": 16}
SECOND = WORKER | {"worker_id": 2, "endpoint": "http://127.0.0.1:2"}
HASHES = {"block_hashes": [1, 2, 3, 4], "sequence_hashes": [1, 2, 3, 4], "isl_tokens": 64}
# Fields of answers that only the router has, and errors whose words are those of Rust's decoder.
OWN = ("url", "expiry")
DECODER = ("Failed to ", "Invalid URL", "Worker WorkerWithDpRank")

Answer = tuple[int, Any]


class Both:
    """Sends each request to both services, and compares their answers."""

    def __init__(self, routed: RouterUnderTest, dynamo: str) -> None:
        self._routed = routed
        self._dynamo = dynamo

    async def answers(self, method: str, path: str, body: Any = None) -> tuple[Answer, Answer]:
        """Return the answers of the router and of Dynamo, as they are compared."""
        reply = await self._routed.call(f"/selection{path}", body, method)
        headers = {"content-type": "application/json"}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        session = self._routed.session
        async with session.request(method, f"{self._dynamo}{path}", data=data, headers=headers) as other:
            return _compared(reply.status, reply.body), _compared(other.status, await other.read())

    async def __call__(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        """Return the answer that both give. Fails if they differ."""
        ours, dynamos = await self.answers(method, path, body)
        assert ours == dynamos, f"{method} {path} {body}"
        assert ours[0] == status, f"{method} {path} {body}: {ours}"
        return ours[1]

    async def until(self, path: str, body: Any, wanted: Callable[[Any], bool], step: Callable[[], None]) -> Any:
        """Repeat `step` and a POST until both give the same, wanted answer."""
        deadline = asyncio.get_running_loop().time() + 30
        while True:
            step()
            ours, dynamos = await self.answers("POST", path, body)
            if ours == dynamos and wanted(ours[1]):
                return ours[1]
            assert asyncio.get_running_loop().time() < deadline, (ours, dynamos)
            await asyncio.sleep(0.02)


def _compared(status: int, body: bytes) -> Answer:
    try:
        return status, _plain(json.loads(body))
    except ValueError:  # an error of Dynamo that is no JSON
        return status, {"error": DECODER[0]}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return sorted((_plain(each) for each in value), key=str)
    if not isinstance(value, dict):
        return value
    plain = {name: _plain(each) for name, each in value.items() if name not in OWN}
    if len(str(plain.get("selection_id"))) >= 32:
        plain["selection_id"] = "generated"
    if str(plain.get("error")).startswith(DECODER):
        plain["error"] = DECODER[0]
    return plain


@asynccontextmanager
async def services(**environment: str) -> AsyncIterator[Both]:
    """Start both services. `environment`: variables of Dynamo's."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-m", "dynamo.select_service", "--port", str(port), env=os.environ | {"DYN_LOG": "error"} | environment
    )
    try:
        async with router(rates={"token": 1.0}) as routed:  # no prefill ends at its expected time
            both = Both(routed, f"http://127.0.0.1:{port}")
            async with asyncio.timeout(60):
                while True:
                    try:
                        await both("GET", "/health")
                        break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.05)
            yield both
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    async with services(DYN_ROUTER_USE_KV_EVENTS="false") as both:  # its workers need no streams either
        yield both


@pytest.fixture
async def two(both: Both) -> Both:
    """Both services with two workers."""
    for worker in (WORKER, SECOND):
        await both("POST", "/workers", worker, 201)
    return both


@pytest.fixture
def reporters() -> Iterator[list[tuple[Reporter, str]]]:
    """The publishers of two workers, with their endpoints."""
    made = []
    for port in free_ports(2):
        endpoint = f"tcp://127.0.0.1:{port}"
        config = PublisherConfig(publisher="zmq", endpoint=endpoint, bind=True, wire_form=WireForm.VLLM_MAPS)
        made.append((Reporter.create(config), endpoint))
    yield made
    for reporter, _ in made:
        reporter.shutdown()


async def test_workers_are_described_alike_until_they_are_deleted(both: Both) -> None:
    for path in ("/health", "/workers", "/loads"):
        await both("GET", path)
    await both("GET", "/ready", None, 503)
    await both("POST", "/select", {"token_ids": TOKENS}, 503)
    await both("POST", "/workers", {"worker_id": 1}, 201)
    await both("GET", "/ready", None, 503)
    await both("POST", "/select", {"token_ids": TOKENS}, 503)
    limits = {"max_num_batched_tokens": 8192, "total_kv_blocks": 1000, "taints": ["a"]}
    for worker in (WORKER | limits, SECOND):
        assert (await both("POST", "/workers", worker, 201))["lifecycle"] == "schedulable"
    for path in ("/ready", "/workers", "/workers?model_name=x", "/loads?model_name=x"):
        await both("GET", path)
    await both("PATCH", "/workers/2", {"taints": ["b"]})
    await both("PATCH", "/workers/99", {"block_size": 32}, 404)
    await both("POST", "/workers", WORKER | {"worker_id": 3, "data_parallel_size": 0}, 201)
    await both("POST", "/workers", WORKER | {"worker_id": 4, "model_name": "other"}, 201)
    for body in ({"worker_id": -1}, {"worker_id": "a"}, {}):
        await both("POST", "/workers", body, 422)
    for name in ("2", "3", "4"):
        await both("DELETE", f"/workers/{name}")
    await both("DELETE", "/workers/2", None, 404)
    for method in ("DELETE", "PATCH"):
        await both(method, "/workers/abc", {}, 400)
    await both("GET", "/workers")


async def test_reservations_have_the_same_loads_and_lives(two: Both) -> None:
    second = {"token_ids": TOKENS, "allowed_worker_ids": [2]}
    await two("POST", "/select", second)
    await two("POST", "/select", second | {"selection_id": "s"})
    await two("POST", "/reservations", {"selection_id": "s", "model_name": "x"}, 404)
    await two("POST", "/reservations", {"selection_id": "s"}, 201)
    await two("POST", "/reservations", {"selection_id": "s"}, 404)
    await two("POST", "/reservations", {"selection_id": "unknown"}, 404)
    await two("GET", "/loads")
    await two("POST", "/select_and_reserve", second | {"selection_id": "s"}, 409)
    await two("POST", "/reservations", {"selection_id": "s", "worker_id": 2, "token_ids": TOKENS}, 409)
    first = {"token_ids": TOKENS, "allowed_worker_ids": [1]}
    await two("POST", "/select_and_reserve", first | {"selection_id": "t", "expected_output_tokens": 100})
    await two("GET", "/loads")
    for _ in range(2):
        await two("POST", "/reservations/s/prefill_complete")
    await two("GET", "/loads")
    for body, status in (({}, 200), ({"decay_fraction": 0.5}, 200), ({"decay_fraction": 2}, 400)):
        await two("POST", "/reservations/s/output_block", body, status)
    await two("DELETE", "/reservations/s")
    await two("DELETE", "/reservations/s", None, 404)
    for report in ("prefill_complete", "output_block"):
        await two("POST", f"/reservations/s/{report}", {}, 404)
    await two("POST", "/potential_loads", {"token_ids": list(range(500, 564))})
    await two("POST", "/reservations", {"selection_id": "s", "worker_id": 2, **HASHES}, 201)
    await two("DELETE", "/workers/2")  # ends its reservations
    await two("DELETE", "/reservations/s", None, 404)
    await two("DELETE", "/reservations/t")
    await two("GET", "/loads")


async def test_wrong_requests_have_the_same_statuses_and_errors(two: Both) -> None:
    prompt = {"token_ids": TOKENS}
    for body, status in (
        ({}, 400),
        ({"token_ids": [-1]}, 422),
        ({"token_ids": "a"}, 422),
        (b"{", 400),
        (b"", 400),
        ({"block_hashes": [1, 2], "isl_tokens": 64}, 400),
        (HASHES | {"sequence_hashes": [1]}, 400),
        (prompt | {"model_name": "x"}, 503),
        (prompt | {"routing_group": "x"}, 503),
        (prompt | {"allowed_worker_ids": []}, 503),
        (prompt | {"allowed_worker_ids": [7]}, 503),
        (prompt | {"pinned_worker": {"worker_id": 7, "dp_rank": 0}}, 503),
        (prompt | {"pinned_worker": {"worker_id": 2}}, 422),
        (prompt | {"routing_constraints": {"required_taints": ["none"]}}, 503),
        (prompt | {"session_context": {"session_id": "a", "input_trigger": "bad"}}, 422),
        (prompt | {"expected_output_tokens": -1}, 422),
    ):
        await two("POST", "/select", body, status)
        await two("POST", "/select_and_reserve", body, status)
    fields: dict[str, Any]
    for fields, status in (
        ({}, 400),
        ({"sequence_hashes": [1]}, 400),
        (prompt | {"worker_id": 9}, 404),
        (prompt | {"effective_prefill_tokens": 100}, 400),
    ):
        await two("POST", "/reservations", {"selection_id": "e", "worker_id": 2} | fields, status)
    await two("POST", "/reservations", {}, 422)
    for path in ("/overlap_scores", "/potential_loads"):
        await two("POST", path, prompt | {"model_name": "x"}, 503)
    await two("GET", "/loads")
    rank = {"selection_id": "e", "worker_id": 2, "dp_rank": 4, **prompt}
    for method, path, body, status in (
        ("POST", "/reservations", rank, 404),
        ("GET", "/nope", None, 404),
        ("GET", "/select", None, 405),
        ("PUT", "/workers", {}, 405),
    ):
        assert [answer[0] for answer in await two.answers(method, path, body)] == [status, status]


async def test_overlaps_are_equal_after_the_same_events(reporters: list[tuple[Reporter, str]]) -> None:
    async with services() as both:
        await compare_overlaps(both, reporters)


async def compare_overlaps(both: Both, reporters: list[tuple[Reporter, str]]) -> None:
    for worker, (_, endpoint) in zip((WORKER, SECOND), reporters, strict=True):
        described = worker | {"kv_events_endpoints": {"0": endpoint}}
        assert (await both("POST", "/workers", described, 201))["lifecycle"] == "schedulable"
    (first, _), (second, _) = reporters

    def report(reporter: Reporter, *events: Any) -> None:
        reporter.report(list(events))
        reporter.step()

    def stored() -> None:
        # Repeated, because batches before the subscription are lost.
        report(first, AllBlocksCleared(), BlockStored([1, 2, 3, 4], None, TOKENS, 16))
        report(second, AllBlocksCleared(), BlockStored([1, 2], None, TOKENS[:32], 16))

    def blocks_of(field: str, *wanted: int) -> Callable[[Any], bool]:
        return lambda scores: sorted(each[field] for each in scores["workers"]) == sorted(wanted)

    blocks = partial(blocks_of, "device_blocks")

    # Its last block is not full: of a prompt that is cached whole, engines compute the last block again.
    prompt = {"token_ids": [*TOKENS, 900]}
    await both.until("/overlap_scores", prompt, blocks(4, 2), stored)
    for ids in (TOKENS, TOKENS[:40], [*TOKENS[:32], *range(900, 932)], [7, *TOKENS], list(range(200)), TOKENS[:8]):
        await both("POST", "/overlap_scores", {"token_ids": ids})
    assert (await both("POST", "/select", prompt))["worker_id"] == 1
    for worker in (1, 2):
        answer = await both("POST", "/select", prompt | {"allowed_worker_ids": [worker]})
        assert answer["overlap"]["longest_matched"] == {1: 64, 2: 32}[worker]
    reserved = await both("POST", "/select_and_reserve", prompt | {"selection_id": "r"})
    assert (reserved["worker_id"], reserved["effective_prefill_tokens"]) == (1, 1)
    await both("DELETE", "/reservations/r")
    report(first, BlockRemoved([4, 3]))
    await both.until("/overlap_scores", prompt, blocks(2, 2), lambda: None)
    report(second, BlockStored([3], 2, TOKENS[32:48], 16))
    await both.until("/overlap_scores", prompt, blocks(2, 3), lambda: None)
    assert (await both("POST", "/select", prompt))["worker_id"] == 2
    report(first, BlockStored([3, 4], 2, TOKENS[32:], 16, medium="CPU", extra_keys=[None, None]))
    await both.until("/overlap_scores", prompt, blocks_of("host_pinned_blocks", 4, 3), lambda: None)
    for reporter in (first, second):
        report(reporter, AllBlocksCleared())
    await both.until("/overlap_scores", prompt, blocks(0, 0), lambda: None)


async def test_reservation_that_is_not_released_ends_in_both() -> None:
    async with services(DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS="1", DYN_ROUTER_USE_KV_EVENTS="false") as both:
        await both("POST", "/workers", WORKER, 201)
        asked = {"token_ids": TOKENS, "selection_id": "lost"}
        await both("POST", "/select_and_reserve", asked | {"expiry": 1})
        loads = await both("GET", "/loads")
        assert loads[0]["loads"][0]["active_requests"] == 1

        async def loaded() -> list[int]:
            return [loads[0]["loads"][0]["active_requests"] for _, loads in await both.answers("GET", "/loads")]

        await until(loaded, lambda requests: requests == [0, 0], seconds=150)  # Dynamo looks once a minute
        await both("GET", "/loads")
        await both("DELETE", "/reservations/lost", None, 404)
