"""The routes of Dynamo's selection service: the answers of ai-dynamo-runtime 1.6.1 to the same requests.

Statuses, fields and messages were recorded from `python -m dynamo.select_service`.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import scripted_worker

TOKENS = list(range(64))
WORKER = {"worker_id": 1, "endpoint": "http://127.0.0.1:1", "block_size": 16}
RECORD = {
    "worker_id": 1,
    "model_name": "default",
    "routing_group": "default",
    "lifecycle": "schedulable",
    "endpoint": "http://127.0.0.1:1",
    "url": "http://127.0.0.1:1",
    "kv_events_endpoint": None,
    "replay_endpoint": None,
    "block_size": 16,
    "data_parallel_start_rank": None,
    "data_parallel_size": None,
    "max_num_batched_tokens": None,
    "total_kv_blocks": None,
    "stable_routing_id": None,
    "is_eagle": None,
    "taints": [],
    "topology_domains": {},
    "kv_transfer_domain": None,
    "kv_transfer_enforcement": None,
    "kv_transfer_preferred_weight": None,
}
IDLE = {"potential_prefill_tokens": 0, "potential_decode_blocks": 0, "active_requests": 0}


class Service:
    """The routes below `/selection`."""

    def __init__(self, routed: RouterUnderTest) -> None:
        self.routed = routed

    async def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        reply = await self.routed.call(f"/selection{path}", body, method)
        return reply.status, reply.json()

    async def load(self, worker: int) -> dict[str, int]:
        _, loads = await self("GET", "/loads")
        return next(load for each in loads for load in each["loads"] if load["worker_id"] == worker)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with router(constants={"rates": {"token": 1.0}}) as routed:  # no prefill ends at its expected time
        yield Service(routed)


@pytest.fixture
async def two(service: Service) -> Service:
    for number in (1, 2):
        status, record = await service("POST", "/workers", WORKER | {"worker_id": number})
        assert (status, record) == (201, RECORD | {"worker_id": number})
    return service


async def test_service_without_workers_is_healthy_and_not_ready(service: Service) -> None:
    assert await service("GET", "/health") == (200, {"status": "ok"})
    assert await service("GET", "/ready") == (503, {"ready": False, "schedulable_workers": 0, "workers": []})
    assert await service("GET", "/workers") == (200, [])
    assert await service("GET", "/loads") == (200, [])
    assert await service("POST", "/select", {"token_ids": TOKENS}) == (
        503,
        {"error": "no schedulable workers are available"},
    )


async def test_incomplete_worker_names_what_it_lacks_and_a_patch_completes_it(service: Service) -> None:
    status, record = await service("POST", "/workers", {"worker_id": 1})
    assert (status, record["lifecycle"]) == (201, "incomplete")
    assert record["not_schedulable_reasons"] == ["endpoint is required", "block_size must be greater than 0"]
    assert (await service("POST", "/select", {"token_ids": TOKENS}))[0] == 503
    assert await service("PATCH", "/workers/1", {"endpoint": "http://127.0.0.1:1", "block_size": 16}) == (200, RECORD)
    assert (await service("GET", "/ready"))[1] == {"ready": True, "schedulable_workers": 1, "workers": [RECORD]}


async def test_every_rank_needs_a_stream_if_one_has_one(service: Service) -> None:
    _, record = await service(
        "POST", "/workers", WORKER | {"data_parallel_size": 2, "kv_events_endpoints": {"0": "tcp://127.0.0.1:5557"}}
    )
    assert record["not_schedulable_reasons"] == ["kv_events endpoint is required for dp_rank 1"]
    _, record = await service("POST", "/workers", WORKER | {"data_parallel_size": 0})
    assert record["not_schedulable_reasons"] == ["data_parallel_size must be greater than 0"]
    _, record = await service("POST", "/workers", WORKER | {"kv_events_endpoint": "nonsense"})
    assert record["lifecycle"] == "incomplete"
    assert "endpoint" in record["not_schedulable_reasons"][0]


async def test_stream_outside_the_allowed_networks_is_not_followed(service: Service) -> None:
    _, record = await service("POST", "/workers", WORKER | {"kv_events_endpoint": "tcp://8.8.8.8:5557"})
    assert record["lifecycle"] == "incomplete"
    assert "allowed_networks" in record["not_schedulable_reasons"][0]


async def test_selection_reserves_nothing(two: Service) -> None:
    status, answer = await two("POST", "/select", {"token_ids": TOKENS})
    assert status == 200
    assert answer | {"worker_id": 1} == {
        "model_name": "default",
        "routing_group": "default",
        "worker_id": 1,
        "dp_rank": 0,
        "endpoint": "http://127.0.0.1:1",
        "url": "http://127.0.0.1:1",
        "block_size": 16,
        "overlap": {"longest_matched": 0, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 0},
        "effective_prefill_tokens": 64,
        "potential_decode_blocks": 4,
    }
    assert [await two.load(worker) for worker in (1, 2)] == [{"worker_id": w, "dp_rank": 0} | IDLE for w in (1, 2)]


async def test_reservation_counts_as_load_until_it_is_freed(two: Service) -> None:
    status, answer = await two(
        "POST", "/select_and_reserve", {"token_ids": TOKENS, "selection_id": "s", "expected_output_tokens": 9}
    )
    assert status == 200
    assert answer["selection_id"] == "s"
    assert answer["sequence_hashes"] == [
        -3136036677815684470,
        -4677586368451018952,
        -6566916317599637088,
        3888788807566526800,
    ]
    assert (answer["isl_tokens"], answer["track_prefill_tokens"], answer["expiry"]) == (64, True, 300)
    assert answer["potential_decode_blocks"] == 4
    worker = answer["worker_id"]
    loaded = {"worker_id": worker, "dp_rank": 0, "potential_decode_blocks": 4, "active_requests": 1}
    assert await two.load(worker) == loaded | {"potential_prefill_tokens": 64}
    for _ in range(2):
        assert await two("POST", "/reservations/s/prefill_complete") == (200, {"status": "ok"})
    assert await two.load(worker) == loaded | {"potential_prefill_tokens": 0}
    for body in (None, {}, {"decay_fraction": 0.5}):
        assert await two("POST", "/reservations/s/output_block", body) == (200, {"status": "ok"})
    assert await two("POST", "/reservations/s/output_block", {"decay_fraction": 2}) == (
        400,
        {"error": "decay_fraction must be between 0.0 and 1.0"},
    )
    assert await two("DELETE", "/reservations/s") == (200, {"status": "ok"})
    assert await two.load(worker) == {"worker_id": worker, "dp_rank": 0} | IDLE
    for method, path in (("DELETE", ""), ("POST", "/prefill_complete"), ("POST", "/output_block")):
        assert await two(method, f"/reservations/s{path}") == (404, {"error": "reservation s not found"})


async def test_id_that_is_held_is_a_conflict(two: Service) -> None:
    assert (await two("POST", "/select_and_reserve", {"token_ids": TOKENS, "selection_id": "s"}))[0] == 200
    held = (409, {"error": "selection s is already reserved or being reserved"})
    assert await two("POST", "/select_and_reserve", {"token_ids": TOKENS, "selection_id": "s"}) == held
    assert await two("POST", "/reservations", {"selection_id": "s", "worker_id": 1, "token_ids": TOKENS}) == held
    assert (await two("POST", "/select", {"token_ids": TOKENS, "selection_id": "s"}))[0] == 200
    assert await two("POST", "/reservations", {"selection_id": "s"}) == held


async def test_selection_is_reserved_by_its_id_once(two: Service) -> None:
    _, selected = await two("POST", "/select", {"token_ids": TOKENS, "selection_id": "s"})
    status, missing = await two("POST", "/reservations", {"selection_id": "s", "model_name": "other"})
    assert status == 404
    assert missing["error"].startswith("no pending selection s for model=other routing_group=default")
    status, reserved = await two("POST", "/reservations", {"selection_id": "s"})
    assert status == 201
    assert reserved == {
        "selection_id": "s",
        "model_name": "default",
        "routing_group": "default",
        "worker_id": selected["worker_id"],
        "dp_rank": 0,
        "endpoint": "http://127.0.0.1:1",
        "url": "http://127.0.0.1:1",
        "expiry": 300,
    }
    load = await two.load(selected["worker_id"])
    assert (load["active_requests"], load["potential_prefill_tokens"]) == (1, 64)
    assert (await two("POST", "/reservations", {"selection_id": "s"}))[0] == 404


async def test_given_worker_is_reserved_with_its_ids_or_their_hashes(two: Service) -> None:
    hashes = {"block_hashes": [1, 2], "sequence_hashes": [1, 2], "isl_tokens": 40}
    for number, prompt in enumerate(({"token_ids": TOKENS}, hashes)):
        status, reserved = await two("POST", "/reservations", {"selection_id": f"{number}", "worker_id": 2, **prompt})
        assert (status, reserved["worker_id"]) == (201, 2)
    assert await two.load(2) == {
        "worker_id": 2,
        "dp_rank": 0,
        "potential_prefill_tokens": 104,
        "potential_decode_blocks": 7,
        "active_requests": 2,
    }


@pytest.mark.parametrize(
    ("fields", "status", "error"),
    [
        ({"worker_id": 9, "token_ids": TOKENS}, 404, "schedulable worker 9 not found"),
        ({"worker_id": 2}, 400, "sequence_hashes is required without token_ids"),
        ({"worker_id": 2, "sequence_hashes": [1]}, 400, "isl_tokens is required without token_ids"),
        ({"worker_id": 2, "dp_rank": 4, "token_ids": TOKENS}, 404, "4"),
        ({"worker_id": 2, "token_ids": TOKENS, "effective_prefill_tokens": 65}, 400, "must not exceed isl_tokens (64)"),
    ],
)
async def test_wrong_reservation_is_refused(two: Service, fields: Any, status: int, error: str) -> None:
    answered = await two("POST", "/reservations", {"selection_id": "e"} | fields)
    assert answered[0] == status
    assert error in answered[1]["error"]
    assert (await two.load(2))["active_requests"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/select", b"{", 400, "Failed to parse the request body as JSON"),
        ("/select", b"", 400, "Failed to parse the request body as JSON"),
        ("/select", {}, 400, "block_hashes is required without token_ids"),
        ("/select", {"token_ids": [-1]}, 422, "Failed to deserialize the JSON body into the target type"),
        ("/select", {"token_ids": "a"}, 422, "token_ids"),
        ("/select", {"block_hashes": [1], "isl_tokens": 9}, 400, "sequence_hashes is required without token_ids"),
        ("/select", {"block_hashes": [1], "sequence_hashes": [], "isl_tokens": 9}, 400, "block_hashes length 1"),
        ("/select", {"token_ids": TOKENS, "model_name": "x"}, 503, "no schedulable workers for model=x"),
        ("/select", {"token_ids": TOKENS, "routing_group": "x"}, 503, "routing_group=x"),
        ("/select", {"token_ids": TOKENS, "allowed_worker_ids": [7]}, 503, "no endpoints available to route work"),
        ("/select", {"token_ids": TOKENS, "allowed_worker_ids": []}, 503, "no endpoints available"),
        ("/select", {"token_ids": TOKENS, "pinned_worker": {"worker_id": 2, "dp_rank": 1}}, 503, "no endpoints"),
        ("/select", {"token_ids": TOKENS, "pinned_worker": {"worker_id": 2}}, 422, "dp_rank"),
        ("/select", {"token_ids": TOKENS, "routing_constraints": {"required_taints": ["a"]}}, 503, "no endpoints"),
        ("/select", {"token_ids": TOKENS, "session_context": {"session_id": "a", "input_trigger": "b"}}, 422, "input"),
        ("/select", {"token_ids": TOKENS, "expected_output_tokens": -1}, 422, "expected_output_tokens"),
        ("/select", {"token_ids": TOKENS, "block_mm_infos": [{}]}, 400, "block_mm_infos"),
        ("/select_and_reserve", {"token_ids": TOKENS, "expiry": 0}, 400, "expiry"),
        ("/select_and_reserve", {"token_ids": TOKENS, "wait": -1}, 400, "wait"),
        ("/select_and_reserve", {"token_ids": TOKENS, "selection_id": ""}, 400, "id"),
        ("/reservations", {}, 422, "selection_id"),
        ("/overlap_scores", {"token_ids": TOKENS, "model_name": "x"}, 503, "no schedulable workers"),
        ("/workers", {"worker_id": -1}, 422, "worker_id"),
        ("/workers", {"worker_id": 2**64}, 422, "worker_id"),
        ("/workers", {}, 422, "worker_id"),
    ],
)
async def test_wrong_request_has_dynamos_status_and_form(
    two: Service, path: str, body: Any, status: int, error: str
) -> None:
    answered = await two("POST", path, body)
    assert answered[0] == status
    assert error in answered[1]["error"]


async def test_choice_keeps_to_the_allowed_the_pinned_and_the_untainted(two: Service) -> None:
    await two("PATCH", "/workers/1", {"taints": ["a", "b"]})
    for fields, worker in (
        ({"allowed_worker_ids": [2, 7]}, 2),
        ({"pinned_worker": {"worker_id": 2, "dp_rank": 0}}, 2),
        ({"routing_constraints": {"required_taints": ["a"]}}, 1),
    ):
        for start in range(4):
            asked = {"token_ids": list(range(start * 100, start * 100 + 64)), "cache_salt": "s", **fields}
            assert (await two("POST", "/select", asked))[1]["worker_id"] == worker


async def test_groups_and_models_share_no_workers(two: Service) -> None:
    await two("POST", "/workers", WORKER | {"worker_id": 3, "routing_group": "g"})
    await two("POST", "/workers", WORKER | {"worker_id": 4, "model_name": "other"})
    for fields, workers in (({}, {1, 2}), ({"routing_group": "g"}, {3}), ({"model_name": "other"}, {4})):
        chosen = set()
        for start in range(8):
            asked = {"token_ids": list(range(start * 100, start * 100 + 64)), **fields}
            chosen.add((await two("POST", "/select_and_reserve", asked))[1]["worker_id"])
        assert chosen == workers
    assert [each["worker_id"] for each in (await two("GET", "/workers?routing_group=g"))[1]] == [3]
    assert [each["model_name"] for each in (await two("GET", "/loads?model_name=other"))[1]] == ["other"]


async def test_session_adapter_and_salt_are_part_of_a_prompt(two: Service) -> None:
    asked = {"token_ids": TOKENS, "lora_name": "l", "cache_salt": "s", "session_context": {"session_id": "q"}}
    _, first = await two("POST", "/select_and_reserve", asked)
    for fields, overlap in (({}, True), ({"lora_name": None}, False), ({"cache_salt": "t"}, False)):
        _, again = await two("POST", "/select", asked | fields | {"allowed_worker_ids": [first["worker_id"]]})
        assert (again["overlap"]["longest_matched"] > 0) is overlap


async def test_potential_loads_add_the_prompt_to_each_worker(two: Service) -> None:
    await two("POST", "/reservations", {"selection_id": "e", "worker_id": 2, "token_ids": [*range(500, 548)]})
    status, loads = await two("POST", "/potential_loads", {"token_ids": TOKENS})
    assert status == 200
    assert {load["worker_id"]: load["potential_prefill_tokens"] for load in loads} == {1: 64, 2: 112}
    assert {load["worker_id"]: load["potential_decode_blocks"] for load in loads} == {1: 4, 2: 7}
    assert {load["worker_id"]: load["active_requests"] for load in loads} == {1: 0, 2: 1}


async def test_removed_worker_ends_its_reservations(two: Service) -> None:
    await two("POST", "/reservations", {"selection_id": "e", "worker_id": 2, "token_ids": TOKENS})
    assert await two("DELETE", "/workers/2") == (200, RECORD | {"worker_id": 2, "lifecycle": "unschedulable"})
    assert await two("DELETE", "/workers/2") == (404, {"error": "worker 2 not found"})
    assert (await two("DELETE", "/workers/x"))[0] == 400
    assert (await two("DELETE", "/reservations/e"))[0] == 404


async def test_reservation_without_reports_expires(two: Service) -> None:
    _, answer = await two("POST", "/select_and_reserve", {"token_ids": TOKENS, "expiry": 0.05})
    assert answer["expiry"] == 0.05
    async with asyncio.timeout(60):
        while (await two.load(answer["worker_id"]))["active_requests"]:  # noqa: ASYNC110 - polled over HTTP
            await asyncio.sleep(0.01)


async def test_load_of_a_killed_process_returns_to_zero(two: Service) -> None:
    code = f"""
import json, time, urllib.request
for number in range(3):
    body = json.dumps({{"token_ids": list(range(64)), "expiry": 1.0}}).encode()
    urllib.request.urlopen(urllib.request.Request("{two.routed.url}/selection/select_and_reserve", body))
print("reserved", flush=True)
time.sleep(60)
"""
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert caller.stdout is not None
    assert await caller.stdout.readline() == b"reserved\n"
    caller.kill()
    await caller.wait()

    async def requests() -> int:
        return sum([(await two.load(worker))["active_requests"] for worker in (1, 2)])

    await until(requests, lambda count: count == 0)


async def test_full_fleet_is_refused_and_a_wait_gets_the_freed_capacity() -> None:
    async with router(admission={"requests": 1}) as routed:
        service = Service(routed)
        await service("POST", "/workers", WORKER)
        await service("POST", "/select_and_reserve", {"token_ids": TOKENS, "selection_id": "s"})
        status, full = await service("POST", "/select_and_reserve", {"token_ids": TOKENS})
        assert status == 429
        assert full["details"]["retry_after"] > 0
        waiting = asyncio.create_task(service("POST", "/select_and_reserve", {"token_ids": TOKENS, "wait": 20}))
        await routed.until_queued(1)
        await service("DELETE", "/reservations/s")
        assert (await waiting)[0] == 200


async def test_workers_of_the_router_are_chosen_and_declared_ones_receive_no_proxied_requests() -> None:
    async with scripted_worker() as worker, router(worker.url) as routed:
        service = Service(routed)
        await service("POST", "/workers", WORKER | {"model_name": "m"})
        _, workers = await service("GET", "/workers?model_name=m")
        own = next(each for each in workers if each["worker_id"] != 1)
        assert (own["endpoint"], own["lifecycle"]) == (worker.url, "schedulable")
        chosen = {
            (await service("POST", "/select", {"token_ids": [n] * 64, "model_name": "m"}))[1]["endpoint"]
            for n in range(20)
        }
        assert chosen == {worker.url, "http://127.0.0.1:1"}
        body = b'{"model": "m", "prompt": "x", "max_tokens": 1}'
        for _ in range(8):
            assert (await routed.call("/v1/completions", body)).worker == worker.url
        await service("DELETE", "/workers/1")
        await service("POST", "/workers", WORKER | {"model_name": "m", "endpoint": worker.url})
        _, workers = await service("GET", "/workers?model_name=m")
        assert [each["worker_id"] for each in workers] == [1]  # its id for the worker that the router knows


async def test_model_of_declared_workers_alone_is_no_model_of_the_proxy() -> None:
    async with router() as routed:
        await Service(routed)("POST", "/workers", WORKER)
        assert (await routed.call("/v1/models")).json()["data"] == []
        reply = await routed.call("/v1/completions", {"model": "default", "prompt": "x"})
        assert reply.status == 503


async def test_changes_require_the_operators_token() -> None:
    async with router(server={"token": "secret"}) as routed:
        for method, path in (
            ("POST", "/workers"),
            ("PATCH", "/workers/1"),
            ("DELETE", "/workers/1"),
            ("POST", "/select_and_reserve"),
            ("POST", "/reservations"),
            ("POST", "/reservations/a/prefill_complete"),
            ("POST", "/reservations/a/output_block"),
            ("DELETE", "/reservations/a"),
        ):
            reply = await routed.call(f"/selection{path}", b"{}", method)
            assert reply.status == 401, path
            allowed = await routed.call(f"/selection{path}", b"{}", method, headers={"authorization": "Bearer secret"})
            assert allowed.status in (400, 404, 422, 503), path


async def test_larger_body_is_refused(two: Service) -> None:
    body = b'{"token_ids": [' + b"1," * (4 * 2**20) + b"1]}"
    async with two.routed.session.post(f"{two.routed.url}/selection/select", data=io.BytesIO(body)) as refused:
        assert refused.status == 413
