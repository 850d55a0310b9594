"""The endpoint picker over real gRPC, asked as Envoy asks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import grpc
import pytest
from envoy_client import DESTINATION, SUBSET, EnvoyStream, Mode, headers, set_headers, streamed
from grpc_call import GrpcCall, channel_to
from grpc_health.v1 import health_pb2
from picker_under_test import BODY, JSON, PATH, STREAM, Asked, picker
from router_under_test import RouterUnderTest, until
from scripted_worker import MODEL, ScriptedWorker, scripted_worker

from router.auth import hashed_key
from router.picker import ext_proc_pb2 as pb
from router.settings import PickerSettings

pytestmark = pytest.mark.anyio

USAGE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}'


@pytest.fixture(scope="module")
async def workers() -> AsyncIterator[list[ScriptedWorker]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(scripted_worker()) for _ in range(3)]


@pytest.fixture(scope="module")
async def shared(workers: list[ScriptedWorker]) -> AsyncIterator[Asked]:
    settings = {
        "server": {"max_body_bytes": 300_000, "body_timeout": 2.0},
        "picker": {"fallbacks": 1, "read_usage": 1},
    }
    async with (
        picker(*(worker.url for worker in workers), **settings) as (side, port),
        channel_to(port) as channel,
    ):
        yield Asked(side, channel, [worker.url.removeprefix("http://") for worker in workers])


@pytest.fixture
async def asked(shared: Asked) -> Asked:
    """The shared picker, once its workers have recovered from what another test said of them."""

    numbers = count()

    async def ready() -> bool:
        if all(worker["state"] == "ready" for worker in await shared.side.workers()):
            return True
        # One that was left out is ready once it answered a request; what another holds would go there each time.
        prompt = f"{next(numbers)} is nobody's yet"
        await shared.side.call(PATH, json.dumps({"model": MODEL, "prompt": prompt, "stream": True}).encode())
        return False

    await until(ready)
    return shared


async def test_a_request_is_sent_to_a_worker_by_header_and_by_metadata(asked: Asked) -> None:
    stream = asked.stream()
    await stream.head(PATH, JSON, ("content-length", "7"), ("x-request-id", "mine"))
    await stream.body(BODY[:10], BODY[10:])
    head = await stream.hears()
    headers = set_headers(head.request_headers.response.header_mutation)
    first, fallback = headers[DESTINATION].split(",")
    assert {first, fallback} < set(asked.addresses)
    assert head.dynamic_metadata["envoy.lb"][DESTINATION] == headers[DESTINATION]
    said = dict(head.dynamic_metadata["kvrouter"])
    assert (said["x-kvrouter-worker"], said["x-kvrouter-overlap-tokens"]) == (f"http://{first}", "0")
    assert headers["content-length"] == str(len(BODY))
    assert "x-request-id" not in headers  # it has that already
    assert streamed((await stream.hears()).request_body) == (BODY, True)
    assert await asked.side.requests_in_flight() == 1
    await stream.answer_head(200, STREAM)
    head = await stream.hears()
    added = set_headers(head.response_headers.response.header_mutation)
    assert added["x-kvrouter-worker"] == f"http://{first}"
    assert added["x-request-id"] == "mine"
    await stream.ends()
    await asked.side.until_released()


async def test_a_large_body_goes_back_in_small_parts(asked: Asked) -> None:
    large = json.dumps({"model": MODEL, "prompt": "word " * 40_000}).encode()
    stream = asked.stream()
    await stream.head(PATH, JSON)
    await stream.body(*(large[start : start + 70_000] for start in range(0, len(large), 70_000)))
    await stream.hears()
    parts = []
    while not parts or not parts[-1][1]:
        parts.append(streamed((await stream.hears()).request_body))
    assert b"".join(part for part, _ in parts) == large
    assert max(len(part) for part, _ in parts) <= 64 * 1024
    await stream.ends()


async def test_what_makes_no_sense_is_answered(asked: Asked) -> None:
    for length, status in (("9" * 5000, 413), ("-1", None), ("\xb2", None)):
        stream = asked.stream()
        await stream.head(PATH, JSON, ("content-length", length))
        await stream.body(BODY)
        answer = (await stream.hears()).immediate_response
        assert (answer.status.code or None) == status
        asked_again = stream if status is None else None
        if asked_again is not None:
            await stream.hears()
        await stream.ends()
    stream = asked.stream(9)
    await stream.head(PATH, JSON)
    assert (await stream.hears()).immediate_response.status.code == 500
    await stream.ends()
    for told in ("x", "99999"):
        stream, _ = await asked.routed()
        await stream.tell(response_headers=headers([(":status", told)]))
        assert (await stream.hears()).HasField("immediate_response")
        await stream.ends()
        await asked.side.until_released()


async def test_trailers_end_a_body(asked: Asked) -> None:
    stream = asked.stream()
    await stream.head(PATH, JSON)
    await stream.body(BODY, ends=False)
    await stream.tell(request_trailers=pb.HttpTrailers())
    assert (await stream.hears()).HasField("request_headers")
    assert streamed((await stream.hears()).request_body) == (BODY, False)
    assert (await stream.hears()).HasField("request_trailers")
    await stream.ends()


async def test_a_buffered_body_is_whole_before_its_trailers(asked: Asked) -> None:
    stream = asked.stream(Mode.BUFFERED)
    await stream.head(PATH, JSON)
    await stream.hears()
    await stream.body(BODY, ends=False)
    assert (await stream.hears()).HasField("request_body")
    await stream.tell(request_trailers=pb.HttpTrailers())
    assert (await stream.hears()).HasField("request_trailers")
    await stream.ends()


async def test_a_buffered_body_is_not_sent_back(asked: Asked) -> None:
    stream = asked.stream(Mode.BUFFERED, Mode.BUFFERED)
    await stream.head(PATH, JSON)
    assert not (await stream.hears()).request_headers.response.header_mutation.set_headers
    await stream.body(BODY)
    told = await stream.hears()
    assert set_headers(told.request_body.response.header_mutation)[DESTINATION]
    assert told.dynamic_metadata["envoy.lb"][DESTINATION]
    assert not told.request_body.response.HasField("body_mutation")
    await stream.answer_head(200, JSON)
    await stream.hears()
    await stream.answer_body(b"{}", True)
    assert (await stream.hears()).HasField("response_body")
    await asked.side.until_released()
    await stream.ends()


async def test_a_request_without_a_body_is_sent_at_once(asked: Asked) -> None:
    stream = asked.stream()
    await stream.head("/version", method="GET", ends=True)
    assert set_headers((await stream.hears()).request_headers.response.header_mutation)[DESTINATION]
    await stream.ends()
    await asked.side.until_released()


async def test_bodies_that_are_not_sent_are_a_mistake_of_the_configuration(asked: Asked) -> None:
    stream = asked.stream(Mode.NONE)
    await stream.head(PATH, JSON)
    answer = (await stream.hears()).immediate_response
    assert answer.status.code == 500
    assert b"request_body_mode is NONE" in answer.body


async def test_heads_that_come_twice_are_passed_over(asked: Asked) -> None:
    stream, _ = await asked.routed(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
    await stream.head(PATH, JSON)
    await stream.answer_head(200, STREAM)
    await stream.hears()
    await stream.answer_head(500, STREAM)
    assert not (await stream.hears()).response_headers.response.header_mutation.set_headers
    assert await asked.side.requests_in_flight() == 1
    await stream.ends()
    await asked.side.until_released()


# The subset


@pytest.mark.parametrize("as_text", [False, True])
async def test_a_subset_in_metadata_is_kept_to(asked: Asked, as_text: bool) -> None:
    allowed = asked.addresses[2]
    for _ in range(4):
        stream, endpoint = await asked.routed(subset=f"{allowed}, 10.0.0.1:80" if as_text else [allowed])
        assert endpoint.split(",")[0] == allowed
        await stream.ends()


async def test_a_client_names_no_endpoints(asked: Asked) -> None:
    stream = asked.stream()
    names = (SUBSET, DESTINATION, "x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port")
    await stream.head(PATH, JSON, *((name, "10.0.0.1:80") for name in names))
    await stream.body(BODY)
    mutation = (await stream.hears()).request_headers.response.header_mutation
    assert set(set_headers(mutation)[DESTINATION].split(",")) < set(asked.addresses)
    assert set(mutation.remove_headers) == set(names) - {DESTINATION}
    await stream.hears()
    await stream.ends()


@pytest.mark.parametrize("subset", [[], ["10.0.0.1:80"]])
async def test_a_subset_without_a_worker_is_503(asked: Asked, subset: list[str]) -> None:
    stream = asked.stream(subset=subset)
    await stream.head(PATH, JSON)
    await stream.body(BODY)
    answer = (await stream.hears()).immediate_response
    assert answer.status.code == 503
    assert json.loads(answer.body)["error"]["code"] == "no_worker_available"


# Refusals


async def test_a_body_that_is_too_large_is_refused(asked: Asked) -> None:
    stream = asked.stream()
    await stream.head(PATH, JSON)
    await stream.body(b"x" * 200_000, b"x" * 200_000, ends=False)
    answer = (await stream.hears()).immediate_response
    assert answer.status.code == 413
    assert set_headers(answer.headers)["content-type"] == "application/json"


async def test_a_body_that_does_not_come_is_refused(asked: Asked) -> None:
    stream = asked.stream()
    await stream.head(PATH, JSON)
    assert (await stream.hears()).immediate_response.status.code == 408


async def test_the_models_are_answered_by_the_picker(asked: Asked) -> None:
    stream = asked.stream()
    await stream.head("/v1/models", method="GET", ends=True)
    answer = (await stream.hears()).immediate_response
    assert answer.status.code == 200
    assert [card["id"] for card in json.loads(answer.body)["data"]] == [MODEL]


async def test_tenants_are_known_by_their_keys(workers: list[ScriptedWorker]) -> None:
    tenants = {"named": {"a": {"keys": [hashed_key("secret")], "requests_per_second": 0.01}}}
    async with (
        picker(workers[0].url, server={"token": "admin"}, tenants=tenants) as (_, port),
        channel_to(port) as channel,
    ):
        seen = []
        for headers in ((), (("authorization", "Bearer secret"),), (("authorization", "Bearer secret"),)):
            stream = EnvoyStream(channel)
            await stream.head(PATH, JSON, *headers)
            await stream.body(BODY)
            seen.append(await stream.hears())
            stream.call.done_writing()
        assert seen[0].immediate_response.status.code == 401
        assert list(seen[1].request_headers.response.header_mutation.remove_headers) == ["authorization"]
        assert seen[2].immediate_response.status.code == 429
        assert set_headers(seen[2].immediate_response.headers)["retry-after"]


@pytest.mark.parametrize(("sent", "kept"), [("Bearer secret", False), ("Bearer own", True), (None, False)])
async def test_envoy_shows_workers_their_keys_where_the_clients_own_end_here(sent: str | None, kept: bool) -> None:
    tenants = {} if kept or sent is None else {"named": {"a": {"keys": [hashed_key("secret")]}}}
    given = [] if sent is None else [("authorization", sent)]
    async with (
        scripted_worker() as first,
        scripted_worker() as second,
        scripted_worker() as third,
        picker(
            workers=[
                {"url": first.url, "api_key": "a"},
                {"url": second.url, "api_key": "a"},
                {"url": third.url, "api_key": "b"},
            ],
            server={"token": "admin"},
            tenants=tenants,
            picker={"fallbacks": 3},
        ) as (side, port),
        channel_to(port) as channel,
    ):
        keys = {
            url.removeprefix("http://"): key for url, key in ((first.url, "a"), (second.url, "a"), (third.url, "b"))
        }
        assert (await side.call("/health")).json()["workers_up"] == 3
        for _ in range(6):
            stream = EnvoyStream(channel)
            await stream.head(PATH, JSON, *given)
            await stream.body(BODY)
            mutation = (await stream.hears()).request_headers.response.header_mutation
            set_ = set_headers(mutation)
            endpoints = set_[DESTINATION].split(",")
            assert set_.get("authorization") == (None if kept else f"Bearer {keys[endpoints[0]]}")
            assert "authorization" not in mutation.remove_headers
            assert len({keys[endpoint] for endpoint in endpoints}) == 1
            stream.call.done_writing()


# Answers


async def test_streamed_bytes_pass_unchanged_and_usage_is_read(asked: Asked) -> None:
    before = await asked.side.metric("kvrouter_time_per_output_token_seconds_count")
    stream, _ = await asked.routed(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
    await stream.answer_head(200, STREAM)
    await stream.hears()
    for part, last in ((b"data: 1\n\n", False), (b"data: " + USAGE + b"\n\n", True)):
        await stream.answer_body(part, last)
        assert streamed((await stream.hears()).response_body) == (part, last)
    await asked.side.until_released()
    assert await asked.side.metric("kvrouter_time_per_output_token_seconds_count") == before + 1
    await stream.ends()


async def test_an_answer_shown_beside_is_learned_from(asked: Asked) -> None:
    before = await asked.side.metric("kvrouter_time_per_output_token_seconds_count")
    stream = asked.stream()
    await stream.head(PATH, JSON)
    await stream.body(BODY)
    number = (await stream.hears()).dynamic_metadata["kvrouter"]["request"]
    await stream.hears()
    await stream.answer_head(200, STREAM)
    await stream.hears()
    observer = asked.stream()
    for part, last in ((b"data: 1\n\n", False), (b"data: " + USAGE + b"\n\n", True)):
        message = pb.ProcessingRequest(
            observability_mode=True, response_body=pb.HttpBody(body=part, end_of_stream=last)
        )
        message.metadata_context.filter_metadata["kvrouter"].update({"request": number})
        observer.call.write(message.SerializeToString())
    await observer.is_ended()  # nothing more is wanted
    await asked.side.until_released()
    assert await asked.side.metric("kvrouter_time_per_output_token_seconds_count") == before + 1
    await stream.ends()


async def test_a_worker_whose_answers_head_is_shown_to_be_envoys_own_gets_no_requests() -> None:
    fleet = {"probe_interval": 60.0, "metrics_interval": 60.0}
    async with (
        scripted_worker() as worker,
        picker(worker.url, fleet=fleet) as (side, port),
        channel_to(port) as channel,
    ):
        await worker.stop()
        for details, up in (("via_upstream", 1), ("upstream_reset_before_response_started{connection_failure}", 0)):
            message = pb.ProcessingRequest(observability_mode=True, response_headers=headers([(":status", "503")]))
            message.metadata_context.filter_metadata["kvrouter"].update({"x-kvrouter-worker": worker.url})
            message.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": details})
            observer = EnvoyStream(channel)
            observer.call.write(message.SerializeToString())
            await observer.ends()
            assert await side.metric("kvrouter_worker_up", worker=worker.url) == up


async def test_an_envoy_that_tells_no_modes_is_taken_for_the_inference_extensions(asked: Asked) -> None:
    stream = asked.stream()
    stream.tells_modes = False
    await stream.head(PATH, JSON)
    await stream.body(BODY)
    await stream.hears()
    assert streamed((await stream.hears()).request_body) == (BODY, True)
    await stream.answer_head(200, JSON)
    await stream.hears()
    await stream.answer_body(b"{}", True)
    assert streamed((await stream.hears()).response_body) == (b"{}", True)
    await asked.side.until_released()
    await stream.ends()


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set both or neither"):
        PickerSettings(certificate=tmp_path / "crt")


async def test_a_port_that_is_taken_is_named() -> None:
    async with picker() as (_, port):
        with pytest.raises(OSError, match=f"127.0.0.1:{port} cannot be bound"):
            async with picker(picker={"port": port}):
                pass


async def test_bytes_that_nobody_wants_are_not_asked_for(workers: list[ScriptedWorker]) -> None:
    async with (
        picker(workers[0].url, picker={"read_usage": 0}) as (side, port),
        channel_to(port) as channel,
    ):
        stream = EnvoyStream(channel, Mode.BUFFERED, Mode.STREAMED)
        await stream.head(PATH, JSON)
        await stream.hears()
        await stream.body(BODY)
        await stream.hears()
        await stream.answer_head(200, STREAM)
        told = await stream.hears()
        assert told.mode_override.response_body_mode == Mode.NONE
        await stream.ends()
        await side.until_released()


async def test_load_moves_to_the_fallback_that_answers(asked: Asked) -> None:
    stream, endpoints = await asked.routed()
    first, second = endpoints.split(",")
    message = pb.ProcessingRequest()
    message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": second})
    await stream.answer_head(200, STREAM, metadata_context=message.metadata_context)
    told = await stream.hears()
    added = set_headers(told.response_headers.response.header_mutation)
    assert added["x-kvrouter-worker"] == f"http://{second}"
    assert await asked.side.metric("kvrouter_requests_in_flight", worker=f"http://{first}") == 0
    assert await asked.side.metric("kvrouter_requests_in_flight", worker=f"http://{second}") == 1
    await stream.ends()
    await asked.side.until_released()


async def test_what_envoy_says_in_a_workers_stead_is_told_in_openais_words(asked: Asked) -> None:
    stream, _ = await asked.routed()
    message = pb.ProcessingRequest()
    message.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": "no_healthy_upstream"})
    await stream.answer_head(503, ("content-type", "text/plain"), attributes=message.attributes)
    answer = (await stream.hears()).immediate_response
    assert answer.status.code == 503
    assert json.loads(answer.body)["error"]["code"] == "no_worker_available"
    await asked.side.until_released()


# Ends


@pytest.mark.parametrize("answered", [False, True])
async def test_a_stream_that_is_reset_releases_its_load(asked: Asked, answered: bool) -> None:
    stream, _ = await asked.routed()
    if answered:
        await stream.answer_head(200, STREAM)
        await stream.hears()
    assert await asked.side.requests_in_flight() == 1
    stream.call.cancel()
    await asked.side.until_released()


async def test_a_gateway_that_tells_nothing_of_answers(workers: list[ScriptedWorker]) -> None:
    """Its requests end well, not as abandoned ones, and their prefills when they are expected to."""
    async with picker(workers[0].url) as (side, port), channel_to(port) as channel:
        asked = Asked(side, channel, [])

        async def no_prefills() -> bool:
            return all(load["pending"] == 0 for load in await side.loads())

        async def abandoned() -> bool:
            return await side.metric("kvrouter_requests_abandoned_total") == 1

        for number in range(2):
            stream, _ = await asked.routed()
            assert await side.requests_in_flight() == 1
            if number:
                await until(no_prefills, 30)
            await stream.ends()
            await side.until_released()
        assert await side.metric("kvrouter_requests_abandoned_total") == 0
        told, _ = await asked.routed()
        await told.answer_head(200, STREAM)
        await told.hears()
        await told.ends()
        left, _ = await asked.routed()  # where answers are told of, one that none came to was left
        left.call.cancel()
        await until(abandoned, 30)


async def test_a_stream_that_ends_within_the_body_leaves_nothing(asked: Asked) -> None:
    stream = asked.stream()
    await stream.head(PATH, JSON)
    await stream.body(BODY[:5], ends=False)
    await stream.ends()
    assert await asked.side.requests_in_flight() == 0


async def test_a_request_that_waits_is_sent_in_its_turn_or_given_up(workers: list[ScriptedWorker]) -> None:
    async with (
        picker(workers[0].url, admission={"requests": 1, "late_binding": False}) as (side, port),
        channel_to(port) as channel,
    ):
        asked = Asked(side, channel, [])
        first, _ = await asked.routed()
        leaving, second = asked.stream(), asked.stream()
        for stream in (leaving, second):
            await stream.head(PATH, JSON)
            await stream.body(BODY)
        await until(lambda: _waiting(side, 2))
        leaving.call.cancel()
        await until(lambda: _waiting(side, 1))
        await first.ends()
        assert (await second.hears()).HasField("request_headers")
        await second.hears()
        await second.ends()
        await side.until_released()


async def _waiting(side: RouterUnderTest, number: int) -> bool:
    return sum((await side.call("/health")).json()["queue"].values()) == number


async def test_workers_may_be_named(workers: list[ScriptedWorker]) -> None:
    named = workers[0].url.replace("127.0.0.1", "localhost")
    async with picker(named) as (side, port), channel_to(port) as channel:
        for _ in range(2):  # asked for, and known
            stream, endpoint = await Asked(side, channel, []).routed()
            assert f"http://{endpoint}" == workers[0].url
            await stream.ends()


# Health


async def health(channel: grpc.Channel, service: str, method: str = "Check") -> tuple[int | None, grpc.StatusCode]:
    """A service's first state, and how the call ended."""
    call = GrpcCall(channel, f"/grpc.health.v1.Health/{method}")
    call.write(health_pb2.HealthCheckRequest(service=service).SerializeToString())
    call.done_writing()
    heard = await call.read()
    if method == "Watch":
        call.cancel()
    code, _ = await call.status()
    return None if heard is None else health_pb2.HealthCheckResponse.FromString(heard).status, code


async def test_health(asked: Asked) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert await health(asked.channel, service) == (serving, grpc.StatusCode.OK)
    assert await health(asked.channel, "readiness", "Watch") == (serving, grpc.StatusCode.CANCELLED)
    assert await health(asked.channel, "other") == (None, grpc.StatusCode.NOT_FOUND)


async def test_without_workers_it_lives_and_is_not_ready() -> None:
    status = health_pb2.HealthCheckResponse
    async with picker() as (_, port), channel_to(port) as channel:
        assert await health(channel, "liveness") == (status.SERVING, grpc.StatusCode.OK)
        assert await health(channel, "readiness") == (status.NOT_SERVING, grpc.StatusCode.OK)
