"""The endpoint picker over real gRPC, asked as Envoy asks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import grpc
import pytest
from envoy_client import DESTINATION, SUBSET, EnvoyStream, Mode, headers, set_headers, streamed
from grpc_call import GrpcCall, channel_to
from grpc_health.v1 import health_pb2
from picker_under_test import BODY, JSON, PATH, STREAM, PickerUnderTest, picker
from router_under_test import until
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_worker, scripted_workers

from router.auth import hashed_key
from router.picker import ext_proc_pb2 as pb
from router.settings import PickerSettings

USAGE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}'


@pytest.fixture(scope="module")
async def workers() -> AsyncIterator[list[ScriptedWorker]]:
    async with scripted_workers(*[Exchange.answer] * 3) as workers:
        yield workers


@pytest.fixture(scope="module")
async def shared(workers: list[ScriptedWorker]) -> AsyncIterator[PickerUnderTest]:
    settings = {
        "server": {"max_body_bytes": 300_000, "body_timeout": 2.0},
        "picker": {"fallbacks": 1, "read_usage": 1},
    }
    async with (
        picker(*(worker.url for worker in workers), **settings) as (side, port),
        channel_to(port) as channel,
    ):
        yield PickerUnderTest(side, channel, [worker.url.removeprefix("http://") for worker in workers])


@pytest.fixture
async def endpoint_picker(shared: PickerUnderTest) -> PickerUnderTest:
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


async def test_choice_is_sent_in_header_and_metadata(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    await stream.head(PATH, JSON, ("content-length", "7"), ("x-request-id", "mine"))
    await stream.body(BODY[:10], BODY[10:])
    head = await stream.receive()
    headers = set_headers(head.request_headers.response.header_mutation)
    first, fallback = headers[DESTINATION].split(",")
    assert {first, fallback} < set(endpoint_picker.addresses)
    assert head.dynamic_metadata["envoy.lb"][DESTINATION] == headers[DESTINATION]
    metadata = dict(head.dynamic_metadata["kvrouter"])
    assert (metadata["x-kvrouter-worker"], metadata["x-kvrouter-overlap-tokens"]) == (f"http://{first}", "0")
    assert headers["content-length"] == str(len(BODY))
    assert "x-request-id" not in headers  # it has that already
    assert streamed((await stream.receive()).request_body) == (BODY, True)
    assert await endpoint_picker.side.requests_in_flight() == 1
    await stream.answer_head(200, STREAM)
    head = await stream.receive()
    added = set_headers(head.response_headers.response.header_mutation)
    assert added["x-kvrouter-worker"] == f"http://{first}"
    assert added["x-request-id"] == "mine"
    await stream.finish()
    await endpoint_picker.side.until_released()


async def test_large_body_is_returned_in_small_parts(endpoint_picker: PickerUnderTest) -> None:
    large = json.dumps({"model": MODEL, "prompt": "word " * 40_000}).encode()
    stream = endpoint_picker.stream()
    await stream.head(PATH, JSON)
    await stream.body(*(large[start : start + 70_000] for start in range(0, len(large), 70_000)))
    await stream.receive()
    parts = []
    while not parts or not parts[-1][1]:
        parts.append(streamed((await stream.receive()).request_body))
    assert b"".join(part for part, _ in parts) == large
    assert max(len(part) for part, _ in parts) <= 64 * 1024
    await stream.finish()


async def test_invalid_messages_are_answered(endpoint_picker: PickerUnderTest) -> None:
    for length, status in (("9" * 5000, 413), ("-1", None), ("\xb2", None)):
        stream = await endpoint_picker.sent(headers=[("content-length", length)])
        answer = (await stream.receive()).immediate_response
        assert (answer.status.code or None) == status
        asked_again = stream if status is None else None
        if asked_again is not None:
            await stream.receive()
        await stream.finish()
    stream = endpoint_picker.stream(9)
    await stream.head(PATH, JSON)
    assert (await stream.receive()).immediate_response.status.code == 500
    await stream.finish()
    for status in ("x", "99999"):
        stream, _ = await endpoint_picker.routed()
        await stream.send(response_headers=headers([(":status", status)]))
        assert (await stream.receive()).HasField("immediate_response")
        await stream.finish()
        await endpoint_picker.side.until_released()


@pytest.mark.parametrize(
    "header", [("x-a\r\nx-b", "1"), ("X-Data-Parallel-Rank", "1"), ("", "1"), ("x-a", "1\r\nx-b: 2")]
)
async def test_what_is_no_header_is_refused_in_both_directions(
    endpoint_picker: PickerUnderTest, header: tuple[str, str]
) -> None:
    stream = await endpoint_picker.sent(headers=[header])
    answer = (await stream.receive()).immediate_response
    assert (answer.status.code, json.loads(answer.body)["error"]["code"]) == (400, "head")
    await stream.finish()
    stream, _ = await endpoint_picker.routed()
    await stream.answer_head(200, ("content-type", "application/json"), header)
    answer = (await stream.receive()).immediate_response
    assert answer.status.code >= 500
    assert header[0].lower() not in set_headers(answer.headers)
    await stream.finish()
    await endpoint_picker.side.until_released()


async def test_trailers_end_body(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    await stream.head(PATH, JSON)
    await stream.body(BODY, ends=False)
    await stream.send(request_trailers=pb.HttpTrailers())
    assert (await stream.receive()).HasField("request_headers")
    assert streamed((await stream.receive()).request_body) == (BODY, False)
    assert (await stream.receive()).HasField("request_trailers")
    await stream.finish()


async def test_buffered_body_is_complete_before_trailers(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream(Mode.BUFFERED)
    await stream.head(PATH, JSON)
    await stream.receive()
    await stream.body(BODY, ends=False)
    assert (await stream.receive()).HasField("request_body")
    await stream.send(request_trailers=pb.HttpTrailers())
    assert (await stream.receive()).HasField("request_trailers")
    await stream.finish()


async def test_buffered_body_is_not_returned(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream(Mode.BUFFERED, Mode.BUFFERED)
    await stream.head(PATH, JSON)
    assert not (await stream.receive()).request_headers.response.header_mutation.set_headers
    await stream.body(BODY)
    response = await stream.receive()
    assert set_headers(response.request_body.response.header_mutation)[DESTINATION]
    assert response.dynamic_metadata["envoy.lb"][DESTINATION]
    assert not response.request_body.response.HasField("body_mutation")
    await stream.answer_head(200, JSON)
    await stream.receive()
    await stream.answer_body(b"{}", True)
    assert (await stream.receive()).HasField("response_body")
    await endpoint_picker.side.until_released()
    await stream.finish()


async def test_request_without_body_is_routed_at_once(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    await stream.head("/version", method="GET", ends=True)
    assert set_headers((await stream.receive()).request_headers.response.header_mutation)[DESTINATION]
    await stream.finish()
    await endpoint_picker.side.until_released()


async def test_missing_request_body_mode_is_a_500(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream(Mode.NONE)
    await stream.head(PATH, JSON)
    answer = (await stream.receive()).immediate_response
    assert answer.status.code == 500
    assert b"request_body_mode is NONE" in answer.body


async def test_repeated_heads_are_ignored(endpoint_picker: PickerUnderTest) -> None:
    stream, _ = await endpoint_picker.routed(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
    await stream.head(PATH, JSON)
    await stream.answer_head(200, STREAM)
    await stream.receive()
    await stream.answer_head(500, STREAM)
    assert not (await stream.receive()).response_headers.response.header_mutation.set_headers
    assert await endpoint_picker.side.requests_in_flight() == 1
    await stream.finish()
    await endpoint_picker.side.until_released()


# The subset


@pytest.mark.parametrize("as_text", [False, True])
async def test_subset_in_metadata_limits_choice(endpoint_picker: PickerUnderTest, as_text: bool) -> None:
    allowed = endpoint_picker.addresses[2]
    for _ in range(4):
        stream, endpoint = await endpoint_picker.routed(subset=f"{allowed}, 10.0.0.1:80" if as_text else [allowed])
        assert endpoint.split(",")[0] == allowed
        await stream.finish()


async def test_endpoint_headers_of_clients_are_removed(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    names = (SUBSET, DESTINATION, "x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port")
    await stream.head(PATH, JSON, *((name, "10.0.0.1:80") for name in names))
    await stream.body(BODY)
    mutation = (await stream.receive()).request_headers.response.header_mutation
    assert set(set_headers(mutation)[DESTINATION].split(",")) < set(endpoint_picker.addresses)
    assert set(mutation.remove_headers) == set(names) - {DESTINATION}
    await stream.receive()
    await stream.finish()


@pytest.mark.parametrize("subset", [[], ["10.0.0.1:80"]])
async def test_subset_without_worker_is_503(endpoint_picker: PickerUnderTest, subset: list[str]) -> None:
    stream = await endpoint_picker.sent(subset=subset)
    answer = (await stream.receive()).immediate_response
    assert answer.status.code == 503
    assert json.loads(answer.body)["error"]["code"] == "no_worker_available"


# Refusals


async def test_too_large_body_is_413(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    await stream.head(PATH, JSON)
    await stream.body(b"x" * 200_000, b"x" * 200_000, ends=False)
    answer = (await stream.receive()).immediate_response
    assert answer.status.code == 413
    assert set_headers(answer.headers)["content-type"] == "application/json"


async def test_missing_body_is_408(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    await stream.head(PATH, JSON)
    assert (await stream.receive()).immediate_response.status.code == 408


async def test_models_are_answered_by_picker(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    await stream.head("/v1/models", method="GET", ends=True)
    answer = (await stream.receive()).immediate_response
    assert answer.status.code == 200
    assert [card["id"] for card in json.loads(answer.body)["data"]] == [MODEL]


async def test_tenant_keys_are_checked_and_removed(workers: list[ScriptedWorker]) -> None:
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
            seen.append(await stream.receive())
            stream.call.done_writing()
        assert seen[0].immediate_response.status.code == 401
        assert list(seen[1].request_headers.response.header_mutation.remove_headers) == ["authorization"]
        assert seen[2].immediate_response.status.code == 429
        assert set_headers(seen[2].immediate_response.headers)["retry-after"]


@pytest.mark.parametrize(("sent", "kept"), [("Bearer secret", False), ("Bearer own", True), (None, False)])
async def test_worker_key_replaces_tenant_key(sent: str | None, kept: bool) -> None:
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
        assert (await side.health())["workers_up"] == 3
        for _ in range(6):
            stream = EnvoyStream(channel)
            await stream.head(PATH, JSON, *given)
            await stream.body(BODY)
            mutation = (await stream.receive()).request_headers.response.header_mutation
            set_ = set_headers(mutation)
            endpoints = set_[DESTINATION].split(",")
            assert set_.get("authorization") == (None if kept else f"Bearer {keys[endpoints[0]]}")
            assert "authorization" not in mutation.remove_headers
            assert len({keys[endpoint] for endpoint in endpoints}) == 1
            stream.call.done_writing()


# Answers


async def test_streamed_response_passes_unchanged_and_usage_is_read(endpoint_picker: PickerUnderTest) -> None:
    before = await endpoint_picker.side.metric("kvrouter_time_per_output_token_seconds_count")
    stream, _ = await endpoint_picker.routed(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
    await stream.answer_head(200, STREAM)
    await stream.receive()
    for part, last in ((b"data: 1\n\n", False), (b"data: " + USAGE + b"\n\n", True)):
        await stream.answer_body(part, last)
        assert streamed((await stream.receive()).response_body) == (part, last)
    await endpoint_picker.side.until_released()
    assert await endpoint_picker.side.metric("kvrouter_time_per_output_token_seconds_count") == before + 1
    await stream.finish()


async def test_observed_response_is_learned_from(endpoint_picker: PickerUnderTest) -> None:
    before = await endpoint_picker.side.metric("kvrouter_time_per_output_token_seconds_count")
    stream = await endpoint_picker.sent()
    number = (await stream.receive()).dynamic_metadata["kvrouter"]["request"]
    await stream.receive()
    await stream.answer_head(200, STREAM)
    await stream.receive()
    observer = endpoint_picker.stream()
    for part, last in ((b"data: 1\n\n", False), (b"data: " + USAGE + b"\n\n", True)):
        message = pb.ProcessingRequest(
            observability_mode=True, response_body=pb.HttpBody(body=part, end_of_stream=last)
        )
        message.metadata_context.filter_metadata["kvrouter"].update({"request": number})
        observer.call.write(message.SerializeToString())
    await observer.until_ended()  # nothing more is wanted
    await endpoint_picker.side.until_released()
    assert await endpoint_picker.side.metric("kvrouter_time_per_output_token_seconds_count") == before + 1
    await stream.finish()


async def test_connection_failure_reported_by_envoy_marks_worker_down() -> None:
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
            await observer.finish()
            assert await side.metric("kvrouter_worker_up", worker=worker.url) == up


async def test_missing_modes_default_to_duplex_streaming(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    stream.sends_modes = False
    await stream.head(PATH, JSON)
    await stream.body(BODY)
    await stream.receive()
    assert streamed((await stream.receive()).request_body) == (BODY, True)
    await stream.answer_head(200, JSON)
    await stream.receive()
    await stream.answer_body(b"{}", True)
    assert streamed((await stream.receive()).response_body) == (b"{}", True)
    await endpoint_picker.side.until_released()
    await stream.finish()


def test_certificate_without_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set both or neither"):
        PickerSettings(certificate=tmp_path / "crt")


async def test_port_in_use_is_named() -> None:
    async with picker() as (_, port):
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 is in use by another process: .*--grpc-port"):
            async with picker(picker={"port": port}):
                pass


async def test_response_body_is_skipped_without_usage_reading(workers: list[ScriptedWorker]) -> None:
    async with (
        picker(workers[0].url, picker={"read_usage": 0}) as (side, port),
        channel_to(port) as channel,
    ):
        stream = EnvoyStream(channel, Mode.BUFFERED, Mode.STREAMED)
        await stream.head(PATH, JSON)
        await stream.receive()
        await stream.body(BODY)
        await stream.receive()
        await stream.answer_head(200, STREAM)
        response = await stream.receive()
        assert response.mode_override.response_body_mode == Mode.NONE
        await stream.finish()
        await side.until_released()


async def test_load_moves_to_fallback_that_answered(endpoint_picker: PickerUnderTest) -> None:
    stream, endpoints = await endpoint_picker.routed()
    first, second = endpoints.split(",")
    message = pb.ProcessingRequest()
    message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": second})
    await stream.answer_head(200, STREAM, metadata_context=message.metadata_context)
    response = await stream.receive()
    added = set_headers(response.response_headers.response.header_mutation)
    assert added["x-kvrouter-worker"] == f"http://{second}"
    assert await endpoint_picker.side.metric("kvrouter_requests_in_flight", worker=f"http://{first}") == 0
    assert await endpoint_picker.side.metric("kvrouter_requests_in_flight", worker=f"http://{second}") == 1
    await stream.finish()
    await endpoint_picker.side.until_released()


async def test_full_worker_is_not_named_again_and_its_answer_is_forwarded(endpoint_picker: PickerUnderTest) -> None:
    routed = [await endpoint_picker.routed() for _ in range(4)]  # at three workers
    first = [endpoints.split(",")[0] for _, endpoints in routed]
    full = next(each for each in first if first.count(each) > 1)
    stream = routed[first.index(full)][0]
    await stream.answer_head(503, ends=True)
    response = await stream.receive()
    assert response.HasField("response_headers"), "Envoy forwards the worker's own answer"
    other, endpoints = await endpoint_picker.routed()
    assert full not in endpoints
    assert await endpoint_picker.side.metric("kvrouter_worker_full_total", worker=f"http://{full}") == 1
    for each, _ in [*routed, (other, "")]:
        await each.finish()
    await endpoint_picker.side.until_released()


async def test_error_of_envoy_becomes_openai_error(endpoint_picker: PickerUnderTest) -> None:
    stream, _ = await endpoint_picker.routed()
    message = pb.ProcessingRequest()
    message.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": "no_healthy_upstream"})
    await stream.answer_head(503, ("content-type", "text/plain"), attributes=message.attributes)
    answer = (await stream.receive()).immediate_response
    assert answer.status.code == 503
    assert json.loads(answer.body)["error"]["code"] == "no_worker_available"
    await endpoint_picker.side.until_released()


# Ends


@pytest.mark.parametrize("answered", [False, True])
async def test_reset_stream_releases_load(endpoint_picker: PickerUnderTest, answered: bool) -> None:
    stream, _ = await endpoint_picker.routed()
    if answered:
        await stream.answer_head(200, STREAM)
        await stream.receive()
    assert await endpoint_picker.side.requests_in_flight() == 1
    stream.call.cancel()
    await endpoint_picker.side.until_released()


async def test_load_is_released_without_response_messages(workers: list[ScriptedWorker]) -> None:
    """Requests do not count as abandoned, and their prefill ends at its predicted time."""
    async with picker(workers[0].url) as (side, port), channel_to(port) as channel:
        endpoint_picker = PickerUnderTest(side, channel, [])

        for number in range(2):
            stream, _ = await endpoint_picker.routed()
            assert await side.requests_in_flight() == 1
            if number:
                await until(side.loads, lambda loads: all(load["pending"] == 0 for load in loads))
            await stream.finish()
            await side.until_released()
        assert await side.metric("kvrouter_requests_abandoned_total") == 0
        answered, _ = await endpoint_picker.routed()
        await answered.answer_head(200, STREAM)
        await answered.receive()
        await answered.finish()
        left, _ = await endpoint_picker.routed()  # once responses are reported, a request without one is abandoned
        left.call.cancel()
        await until(lambda: side.metric("kvrouter_requests_abandoned_total"), lambda value: value == 1)


async def test_stream_that_ends_within_body_holds_no_load(endpoint_picker: PickerUnderTest) -> None:
    stream = endpoint_picker.stream()
    await stream.head(PATH, JSON)
    await stream.body(BODY[:5], ends=False)
    await stream.finish()
    assert await endpoint_picker.side.requests_in_flight() == 0


async def test_waiting_request_is_routed_in_turn_or_cancelled(workers: list[ScriptedWorker]) -> None:
    async with (
        picker(workers[0].url, admission={"requests": 1, "late_binding": False}) as (side, port),
        channel_to(port) as channel,
    ):
        endpoint_picker = PickerUnderTest(side, channel, [])
        first, _ = await endpoint_picker.routed()
        leaving, second = endpoint_picker.stream(), endpoint_picker.stream()
        for stream in (leaving, second):
            await stream.head(PATH, JSON)
            await stream.body(BODY)
        await side.until_queued(2)
        leaving.call.cancel()
        await side.until_queued(1)
        await first.finish()
        assert (await second.receive()).HasField("request_headers")
        await second.receive()
        await second.finish()
        await side.until_released()


async def test_host_names_of_workers_are_resolved(workers: list[ScriptedWorker]) -> None:
    named = workers[0].url.replace("127.0.0.1", "localhost")
    async with picker(named) as (side, port), channel_to(port) as channel:
        for _ in range(2):  # asked for, and known
            stream, endpoint = await PickerUnderTest(side, channel, []).routed()
            assert f"http://{endpoint}" == workers[0].url
            await stream.finish()


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


async def test_health_service_reports_serving(endpoint_picker: PickerUnderTest) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert await health(endpoint_picker.channel, service) == (serving, grpc.StatusCode.OK)
    assert await health(endpoint_picker.channel, "readiness", "Watch") == (serving, grpc.StatusCode.CANCELLED)
    assert await health(endpoint_picker.channel, "other") == (None, grpc.StatusCode.NOT_FOUND)


async def test_picker_without_workers_is_alive_and_not_ready() -> None:
    status = health_pb2.HealthCheckResponse
    async with picker() as (_, port), channel_to(port) as channel:
        assert await health(channel, "liveness") == (status.SERVING, grpc.StatusCode.OK)
        assert await health(channel, "readiness") == (status.NOT_SERVING, grpc.StatusCode.OK)
