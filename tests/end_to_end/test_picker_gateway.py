"""Features for gateways of the Inference Extension and llm-d: objectives, rewrites, subsets, sidecars and TLS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import hpack
import pytest
import trustme
from envoy_client import DESTINATION, METHOD, EnvoyStream, Mode, headers, set_headers, streamed
from grpc_call import channel_to
from picker_under_test import BODY, JSON, PATH, STREAM, PickerUnderTest, picker
from router_under_test import QUICK, RouterUnderTest, until
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_worker, scripted_workers

from router.auth import hashed_key
from router.fleet.kubernetes import ClusterAccess
from router.picker import ext_proc_pb2 as pb
from router.picker import server as picker_server
from router.picker.http2 import frames
from router.picker.state import Objectives

OBJECTIVE = "x-llm-d-inference-objective"
REWRITE = "x-llm-d-model-name-rewrite"
PREFILLER = "x-prefiller-host-port"


@pytest.fixture(scope="module")
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker() as found:
        yield found


# Objectives


async def queued_by_objective(asked: PickerUnderTest, side: RouterUnderTest) -> dict[str, EnvoyStream]:
    """Send a request of each objective, the lowest priority first, and return them once all wait."""
    waiting: dict[str, EnvoyStream] = {}
    for number, objective in enumerate(("unknown", "standard", "premium"), 1):
        stream = waiting[objective] = asked.stream()
        await stream.head(PATH, JSON, (OBJECTIVE, objective))
        await stream.body(BODY)
        await side.until_queued(number)
    return waiting


async def test_objective_with_higher_priority_is_routed_first(worker: ScriptedWorker) -> None:
    """InferenceObjectives count upwards, requests of engines downwards."""
    async with (
        picker(
            worker.url,
            admission={"requests": 1, "late_binding": False},
            picker={"objectives": {"premium": 10, "standard": 5}},
        ) as (side, port),
        channel_to(port) as channel,
    ):
        asked = PickerUnderTest(side, channel, [])
        first, _ = await asked.routed()
        waiting = await queued_by_objective(asked, side)
        before = first
        for objective in ("premium", "standard", "unknown"):
            await before.finish()
            mutation = (await waiting[objective].receive()).request_headers.response.header_mutation
            assert OBJECTIVE in mutation.remove_headers
            await waiting[objective].receive()
            before = waiting[objective]
        await before.finish()
        await side.until_released()


async def test_objective_with_higher_priority_is_routed_first_if_the_limit_computes_itself() -> None:
    metrics = b"vllm:num_requests_running %d\nvllm:num_requests_waiting %d\n"
    fleet = {"fleet": {**QUICK, "metrics_interval": 0.05}}
    async with (
        scripted_worker() as worker,
        picker(worker.url, picker={"objectives": {"premium": 10, "standard": 5}}, **fleet) as (side, port),
        channel_to(port) as channel,
    ):
        worker.metrics = metrics % (1, 1)
        asked = PickerUnderTest(side, channel, [])
        running = [(await asked.routed())[0], (await asked.routed())[0]]
        await side.until_metric(1.0, "kvrouter_saturation", cause="slots")  # one runs, and one waits in the engine
        waiting = await queued_by_objective(asked, side)
        worker.metrics = metrics % (1, 0)
        for objective in ("premium", "standard", "unknown"):
            await running.pop(0).finish()
            await waiting[objective].receive()
            await waiting[objective].receive()
            running.append(waiting[objective])
        for stream in running:
            await stream.finish()
        await side.until_released()


async def test_sheddable_objective_is_refused_instead_of_waiting(worker: ScriptedWorker) -> None:
    async with (
        picker(
            worker.url,
            admission={"requests": 1, "late_binding": False},
            picker={"objectives": {"batch": -1, "standard": 0}},
        ) as (side, port),
        channel_to(port) as channel,
    ):
        asked = PickerUnderTest(side, channel, [])

        async def ask(objective: str) -> EnvoyStream:
            stream = asked.stream()
            await stream.head(PATH, JSON, (OBJECTIVE, objective))
            await stream.body(BODY)
            return stream

        first = await ask("batch")
        assert (await first.receive()).HasField("request_headers"), "it finds capacity"
        await first.receive()
        waits = await ask("standard")
        await side.until_queued(1)
        for refused in [await ask("batch") for _ in range(2)]:
            answer = (await refused.receive()).immediate_response
            assert (answer.status.code, json.loads(answer.body)["error"]["code"]) == (429, "shed")
            sent = set_headers(answer.headers)
            assert "retry-after" in sent
            assert sent["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        await first.finish()
        await waits.receive()
        await waits.receive()
        await waits.finish()
        await side.until_released()


@pytest.mark.parametrize("tenant", [False, True])
async def test_flows_take_turns_by_fairness_id(worker: ScriptedWorker, tenant: bool) -> None:
    """Requests of a tenant are of one flow, whatever id they name."""
    key = ("authorization", "Bearer key-a")
    settings: dict[str, Any] = {"admission": {"requests": 1, "late_binding": False}}
    if tenant:
        settings |= {"tenants": {"named": {"a": {"keys": [hashed_key("key-a")]}}}, "server": {"token": "admin"}}
    async with picker(worker.url, **settings) as (side, port), channel_to(port) as channel:
        asked = PickerUnderTest(side, channel, [])
        before, _ = await asked.routed(headers=[key] if tenant else [])
        waiting: list[EnvoyStream] = []
        for number, flow in enumerate(("loud", "loud", "loud", "quiet"), 1):
            stream = asked.stream()
            await stream.head(PATH, JSON, ("x-gateway-inference-fairness-id", flow), *([key] if tenant else []))
            await stream.body(BODY)
            waiting.append(stream)
            await side.until_queued(number)
        for number in [0, 1, 2, 3] if tenant else [0, 3, 1, 2]:
            await before.finish()
            mutation = (await waiting[number].receive()).request_headers.response.header_mutation
            assert "x-gateway-inference-fairness-id" in mutation.remove_headers
            await waiting[number].receive()
            before = waiting[number]
        await before.finish()


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/embeddings", "/version"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_request_without_body_goes_to_a_healthy_endpoint(worker: ScriptedWorker, path: str, method: str) -> None:
    async with picker(worker.url, "http://127.0.0.1:9") as (side, port), channel_to(port) as channel:
        stream = PickerUnderTest(side, channel, []).stream()
        await stream.head(path, method=method, ends=True)
        answer = await stream.receive()
        if (method, path) == ("POST", "/version"):
            assert answer.immediate_response.status.code == 405
        else:
            chosen = set_headers(answer.request_headers.response.header_mutation)
            assert chosen[DESTINATION] == worker.url.removeprefix("http://")
            assert ":method" not in chosen
        await stream.finish()


@pytest.mark.parametrize(
    ("path", "status"), [("/sleep", 405), ("/match", 405), ("/unknown", 404), ("/v1/../sleep", 400)]
)
async def test_request_without_body_to_a_closed_path_is_refused(worker: ScriptedWorker, path: str, status: int) -> None:
    async with picker(worker.url) as (side, port), channel_to(port) as channel:
        stream = PickerUnderTest(side, channel, []).stream()
        await stream.head(path, method="GET", ends=True)
        assert (await stream.receive()).immediate_response.status.code == status


async def test_cluster_objectives_override_settings() -> None:
    objectives = Objectives({"a": 1, "b": 2})
    assert [objectives.priority(name) for name in "abc"] == [1, 2, None]
    await objectives.follow(
        [
            {"metadata": {"name": "b"}, "spec": {"priority": 7}},
            {"metadata": {"name": "c"}, "spec": {}},
            {"metadata": {"name": "broken"}, "spec": {"priority": "high"}},
            {"metadata": {"name": "huge"}, "spec": {"priority": 2**40}},
            {},
        ]
    )
    assert [objectives.priority(name) for name in ("a", "b", "c", "broken", "huge")] == [1, 7, 0, None, None]
    await objectives.follow([])
    assert objectives.priority("b") == 2


@pytest.mark.parametrize("group", ["inference.networking.x-k8s.io", "llm-d.ai"])
async def test_inference_objectives_of_cluster_are_followed(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """A server that answers as Kubernetes' does: a list, and a watch that adds to it."""
    targets: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        targets.append(target)
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
        if "watch=1" in target:
            found = {"metadata": {"name": "premium", "resourceVersion": "2"}, "spec": {"priority": 3}}
            data = json.dumps({"type": "ADDED", "object": found}).encode() + b"\n"
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))
            await reader.read()  # the watch stays open
        else:
            data = json.dumps({"metadata": {"resourceVersion": "1"}, "items": []}).encode()
            writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(data), data))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as cluster:
        url = f"http://127.0.0.1:{cluster.sockets[0].getsockname()[1]}"
        monkeypatch.setattr(ClusterAccess, "in_cluster", lambda namespace: ClusterAccess(url, namespace or "default"))
        async with (
            picker(
                worker.url,
                tenants={},
                picker={"follow_objectives": group},
                admission={"requests": 1, "late_binding": False},
            ) as (side, port),
            channel_to(port) as channel,
        ):
            await until(lambda: len(targets) > 1)
            asked = PickerUnderTest(side, channel, [])
            first, _ = await asked.routed()
            usual, premium = asked.stream(), asked.stream()
            for number, (stream, more) in enumerate(((usual, ()), (premium, ((OBJECTIVE, "premium"),))), 1):
                await stream.head(PATH, JSON, *more)
                await stream.body(BODY)
                await side.until_queued(number)
            await first.finish()
            await premium.receive()
            await premium.receive()
            await premium.finish()
            await usual.receive()
            await usual.receive()
            await usual.finish()
        path = f"/apis/{group}/v1alpha2/namespaces/default/inferenceobjectives"
        assert all(target.startswith(path) for target in targets)


@pytest.mark.parametrize("group", ["inference.networking.x-k8s.io", "llm-d.ai"])
async def test_model_rewrites_of_cluster_are_followed(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """A server that lists one rewrite, as Kubernetes' does, and watches for ever."""
    targets: list[str] = []
    rule = {"matches": [{"model": {"type": "Exact", "value": "public"}}], "targets": [{"modelRewrite": MODEL}]}
    rewrite = {"metadata": {"name": "r"}, "spec": {"poolRef": {"name": "ours"}, "rules": [rule]}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        targets.append(target)
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
        if "watch=1" in target:
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
            await reader.read()  # the watch stays open
        else:
            data = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [rewrite]}).encode()
            writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(data), data))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as cluster:
        url = f"http://127.0.0.1:{cluster.sockets[0].getsockname()[1]}"
        monkeypatch.setattr(ClusterAccess, "in_cluster", lambda namespace: ClusterAccess(url, namespace or "default"))
        settings = {"follow_rewrites": group, "pool": "ours"}
        async with picker(worker.url, picker=settings) as (side, port), channel_to(port) as channel:
            await until(lambda: len(targets) > 1)
            asked = PickerUnderTest(side, channel, [])
            for model, headers in (("public", ()), ("public", ((REWRITE, "other"),)), (MODEL, ())):
                body = json.dumps({"model": model, "prompt": "some words"}).encode()
                stream = await asked.sent(body=body, headers=headers)
                await stream.receive()
                sent, _ = streamed((await stream.receive()).request_body)
                assert json.loads(sent)["model"] == MODEL
                await stream.finish()
        assert all(
            each.startswith(f"/apis/{group}/v1alpha2/namespaces/default/inferencemodelrewrites") for each in targets
        )


# The model


@pytest.mark.parametrize("mode", [Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED])
async def test_model_is_rewritten_in_body(worker: ScriptedWorker, mode: int) -> None:
    async with picker(worker.url) as (side, port), channel_to(port) as channel:
        stream = PickerUnderTest(side, channel, []).stream(mode)
        asked = {"model": "public-name", "prompt": "some words", "nested": {"model": "untouched"}}
        await stream.head(PATH, JSON, (REWRITE, MODEL))
        if mode == Mode.BUFFERED:
            await stream.receive()
        await stream.body(json.dumps(asked).encode())
        head = await stream.receive()
        if mode == Mode.BUFFERED:
            common = head.request_body.response
            sent = common.body_mutation.body
        else:
            common = head.request_headers.response
            sent, _ = streamed((await stream.receive()).request_body)
        assert json.loads(sent) == asked | {"model": MODEL}
        assert set_headers(common.header_mutation)["content-length"] == str(len(sent))
        assert REWRITE in common.header_mutation.remove_headers
        await stream.finish()


async def test_body_that_cannot_be_rewritten_is_refused(worker: ScriptedWorker) -> None:
    async with picker(worker.url) as (side, port), channel_to(port) as channel:
        stream = await PickerUnderTest(side, channel, []).sent(headers=[(REWRITE, MODEL)], body=b"[1]")
        answer = (await stream.receive()).immediate_response
        assert answer.status.code == 400
        assert json.loads(answer.body)["error"]["message"]


# Prefill and decode by llm-d's sidecar


async def test_sidecar_receives_prefill_address() -> None:
    async with scripted_worker() as prefill, scripted_worker() as decode:
        workers = [{"url": prefill.url, "role": "prefill"}, {"url": decode.url, "role": "decode"}]
        settings = {"workers": workers, "disaggregation": {"backend": "sidecar", "decode_computes": False}}
        async with picker(**settings) as (side, port), channel_to(port) as channel:
            request = PickerUnderTest(side, channel, []).stream()
            body = json.dumps({"model": MODEL, "prompt": "word " * 2000}).encode()
            await request.head(PATH, JSON, (PREFILLER, "10.6.6.6:1"))
            await request.body(body)
            routing_headers = set_headers((await request.receive()).request_headers.response.header_mutation)
            assert routing_headers[DESTINATION] == decode.url.removeprefix("http://")
            assert routing_headers[PREFILLER] == prefill.url.removeprefix("http://")
            await request.receive()
            await request.answer_head(200, STREAM)
            await request.receive()
            await request.finish()
            await side.until_released()
            assert prefill.exchanges == []  # the sidecar asks it, not the picker


# Subsets


@pytest.mark.parametrize("named", ["127.0.0.1", "127.0.0.1:1,127.0.0.1"])
async def test_subset_address_without_port_matches_all_ports(worker: ScriptedWorker, named: str) -> None:
    async with picker(worker.url) as (side, port), channel_to(port) as channel:
        stream, endpoint = await PickerUnderTest(side, channel, []).routed(subset=named)
        assert f"http://{endpoint}" == worker.url
        await stream.finish()


async def test_fallbacks_are_within_the_subset() -> None:
    async with (
        scripted_workers(*[Exchange.answer] * 4) as each,
        picker(*(worker.url for worker in each), picker={"fallbacks": 3}) as (side, port),
        channel_to(port) as channel,
    ):
        allowed = [worker.url.removeprefix("http://") for worker in each[:2]]
        for _ in range(4):
            stream, named = await PickerUnderTest(side, channel, []).routed(subset=allowed)
            assert sorted(named.split(",")) == sorted(allowed)
            await stream.finish()


# TLS


class Pair:
    """The files of a certificate, and the bytes of its authority."""

    def __init__(self, folder: Path) -> None:
        self.crt, self.key = folder / "crt", folder / "key"
        self.write(trustme.CA())

    def write(self, authority: trustme.CA) -> None:
        issued = authority.issue_cert("127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(str(self.crt))
        issued.private_key_pem.write_to_path(str(self.key))
        self.trusted = authority.cert_pem.bytes()


async def test_rotated_certificate_is_used_without_restart(
    worker: ScriptedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picker_server, "LOOK_SECONDS", 0.02)
    pair = Pair(tmp_path)
    section = {"certificate": pair.crt, "key": pair.key}
    async with picker(worker.url, picker=section) as (side, port), channel_to(port, pair.trusted) as before:
        begun, _ = await PickerUnderTest(side, before, []).routed()
        pair.key.write_bytes(b"half a rotation")
        await asyncio.sleep(0.1)
        async with channel_to(port, pair.trusted) as meanwhile:
            stream, _ = await PickerUnderTest(side, meanwhile, []).routed()
            await stream.finish()
        pair.write(trustme.CA())

        async def served() -> bool:
            async with channel_to(port, pair.trusted) as after:
                try:
                    await asyncio.to_thread(grpc.channel_ready_future(after).result, 0.5)
                except grpc.FutureTimeoutError:
                    return False
                stream, _ = await PickerUnderTest(side, after, []).routed()
                await stream.finish()
                return True

        await until(served)
        await begun.finish()  # what was connected stays so


async def test_tls_peer_without_http2_is_closed(worker: ScriptedWorker, tmp_path: Path) -> None:
    import ssl

    pair = Pair(tmp_path)
    async with picker(worker.url, picker={"certificate": pair.crt, "key": pair.key}) as (_, port):
        trusting = ssl.create_default_context(cadata=pair.trusted.decode())
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        await writer.wait_closed()


async def test_unreadable_certificate_is_named(worker: ScriptedWorker, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="crt"):
        async with picker(worker.url, picker={"certificate": tmp_path / "crt", "key": tmp_path / "key"}):
            pass


# Bodies that are not sent


async def test_least_loaded_routes_by_headers_alone(worker: ScriptedWorker) -> None:
    unseen = {"policy": {"name": "least_loaded"}, "proxy": {"engine_fields": "pass"}}
    async with picker(worker.url, **unseen) as (side, port), channel_to(port) as channel:
        stream = PickerUnderTest(side, channel, []).stream(Mode.NONE)
        await stream.head(PATH, JSON, ("content-length", "77"))
        mutation = (await stream.receive()).request_headers.response.header_mutation
        assert f"http://{set_headers(mutation)[DESTINATION]}" == worker.url
        assert "content-length" not in {*set_headers(mutation), *mutation.remove_headers}
        assert await side.requests_in_flight() == 1
        await stream.answer_head(200, STREAM)
        await stream.receive()
        await stream.finish()
        await side.until_released()


_BY_LOAD = {"policy": {"name": "least_loaded"}}


@pytest.mark.parametrize(
    ("workers", "sections", "why"),
    [
        ([{}], {}, b"The policy reads prompts."),
        ([{}, {"model": "other"}], _BY_LOAD, b"several models"),
        ([{}], _BY_LOAD, b"Engine control fields are not checked"),
        ([{"role": "prefill"}, {"role": "decode"}], _BY_LOAD, b"Prefill and decode have different workers."),
        ([{}], _BY_LOAD | {"tenants": {"named": {"a": {"keys": [hashed_key("k")]}}}}, b"tenants"),
    ],
)
async def test_settings_that_need_bodies_refuse_requests_without(
    workers: list[dict[str, str]], sections: dict[str, Any], why: bytes
) -> None:
    async with AsyncExitStack() as stack:
        settings = [{"url": (await stack.enter_async_context(scripted_worker())).url, **each} for each in workers]
        server = {"server": {"token": "admin"}} if "tenants" in sections else {}
        side, port = await stack.enter_async_context(picker(workers=settings, **server, **sections))
        channel = await stack.enter_async_context(channel_to(port))
        stream = PickerUnderTest(side, channel, []).stream(Mode.NONE)
        await stream.head(PATH, JSON, ("authorization", "Bearer k"))
        answer = (await stream.receive()).immediate_response
        assert answer.status.code == 500
        assert why in answer.body


# Many at once


class Connection:
    """Sends frames, and waits until they have been taken."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        windows = frames.settings({frames.INITIAL_WINDOW_SIZE: 2**20}) + frames.window_update(0, 2**30)
        writer.write(frames.PREFACE + windows)

    def send(self, stream: int, flags: int = 0, **message: Any) -> None:
        data = pb.ProcessingRequest(**message).SerializeToString() if message else b""
        prefix = len(data).to_bytes(5, "big") if message else b""
        self._writer.write(frames.frame(frames.DATA, flags, stream, prefix + data))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def acknowledged(self) -> None:
        """All that was sent has been taken, and what it led to is here."""
        self._writer.write(frames.frame(frames.PING, 0, 0, bytes(8)))
        async with asyncio.timeout(60):
            while True:
                high, low, kind, flags, _ = frames.HEAD.unpack(await self._reader.readexactly(frames.HEAD_BYTES))
                payload = await self._reader.readexactly(high << 16 | low)
                if (kind, flags, payload) == (frames.PING, frames.ACK, bytes(8)):
                    return
                assert kind != frames.GOAWAY or payload[4:8] == bytes(4), payload


async def test_many_requests_on_few_connections_release_all_load(worker: ScriptedWorker) -> None:
    """On a few connections: bodies that come in parts, resets at every point, and a goaway in the middle."""
    number, few = 800, 4
    async with AsyncExitStack() as stack:
        # The first bytes are late, but no request may wait.
        side, port = await stack.enter_async_context(picker(worker.url, admission={"requests": None}))
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(few)]
        for _, writer in pairs:
            stack.callback(writer.close)
        connections = [Connection(*pair) for pair in pairs]
        requests = [(connections[place % few], place // few * 2 + 1) for place in range(number)]
        block = hpack.Encoder().encode(
            [(":method", "POST"), (":scheme", "http"), (":path", METHOD), ("content-type", "application/grpc")]
        )
        modes = pb.ProtocolConfiguration(request_body_mode=Mode.FULL_DUPLEX_STREAMED)

        async def all_acknowledged() -> None:
            await asyncio.gather(*(connection.acknowledged() for connection in connections))

        def leave(group: list[tuple[Connection, int]]) -> None:
            for connection, stream in group:
                connection.write(frames.reset(stream, frames.CANCEL))

        for connection, stream in requests:
            connection.write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block))
            head = headers([(":method", "POST"), (":path", PATH), JSON])
            connection.send(stream, request_headers=head, protocol_config=modes)
            connection.send(stream, request_body=pb.HttpBody(body=BODY[:10]))
        await all_acknowledged()
        leave(requests[: number // 4])
        connections[0].write(frames.goaway(0, frames.NO_ERROR))
        for connection, stream in requests[number // 4 :]:
            connection.send(stream, request_body=pb.HttpBody(body=BODY[10:], end_of_stream=True))
        await all_acknowledged()
        await until(side.requests_in_flight, lambda count: count == number * 3 // 4)
        leave(requests[number // 4 : number // 2])
        for connection, stream in requests[number // 2 :]:
            connection.send(stream, response_headers=headers([(":status", "200"), STREAM]))
        await all_acknowledged()
        await until(side.requests_in_flight, lambda count: count == number // 2)
        leave(requests[number // 2 : number * 3 // 4])
        for connection, stream in requests[number * 3 // 4 :]:
            connection.send(stream, frames.END_STREAM)
        await side.until_released()


# Scores


async def test_scores_of_all_candidates_are_reported_if_asked() -> None:
    async with scripted_workers(None, None) as workers:
        urls = [each.url for each in workers]
        addresses = {url.removeprefix("http://") for url in urls}
        for wanted in (True, False):
            async with (
                picker(*urls, picker={"emit_scores": wanted}) as (side, port),
                channel_to(port) as channel,
            ):
                await side.until_up(2)
                stream = await PickerUnderTest(side, channel, []).sent()
                found = (await stream.receive()).dynamic_metadata["envoy.lb"]
                assert ("x-gateway-destination-endpoint-scores" in found) is wanted
                if wanted:
                    scores = dict(found["x-gateway-destination-endpoint-scores"])
                    assert scores.keys() == addresses
                    assert all(0 <= score <= 1 for score in scores.values())
                    assert scores[found[DESTINATION]] == max(scores.values()) == 1
