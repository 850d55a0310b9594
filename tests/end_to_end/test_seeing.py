"""Observability of a router: metrics, health, readiness, request ids, logs and traces."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from router_under_test import RouterUnderTest, router, until
from running_app import running_app
from scripted_worker import MODEL, Exchange, ScriptedWorker
from simulated_workers import simulated_workers
from structlog.testing import LogCapture

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
PATH = "/v1/completions"
SECRET = "the quick brown fox"
BODY = {"model": MODEL, "prompt": list(range(100))}
USAGE = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def stream(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    for event in ({"choices": [{"text": SECRET}]}, {"choices": [], "usage": USAGE}):
        await exchange.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.chunk(b"")


@pytest.fixture
async def routed(worker: ScriptedWorker) -> AsyncIterator[RouterUnderTest]:
    async with router(worker.url, logs={"access": True}) as routed:
        yield routed


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """The log entries of all levels."""
    capture = LogCapture()
    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, capture],
        wrapper_class=structlog.make_filtering_bound_logger(0),
        cache_logger_on_first_use=False,
    )
    yield capture.entries
    structlog.configure(**before)


async def request_lines(logs: list[Any], number: int = 1) -> list[Any]:
    """Wait for the log lines of `number` requests, which are written after the responses."""

    await until(lambda: sum(line["event"] == "request" for line in logs) == number)
    return [line for line in logs if line["event"] == "request"]


# Metrics


async def test_every_documented_metric_is_exported(routed: RouterUnderTest) -> None:
    await routed.call(PATH, BODY)
    text = (await routed.call("/metrics")).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    named = set(re.findall(r"`((?:kvrouter|process)_[a-z_]+)[`{]", METRICS.read_text()))
    named |= {f"kvrouter_stream{rest}" for rest in re.findall(r"`(_[a-z_]+)`", METRICS.read_text())}
    forwarded = {f"kvrouter_forwarded_token_{each}" for each in ("requests", "mismatches", "bytes")}
    own_policy = {"kvrouter_policy_failures", "kvrouter_policy_switched_off"}
    hooks = {"kvrouter_hook_calls", "kvrouter_hook_seconds"}
    only_where_switched_on = {"kvrouter_process_up", "kvrouter_stream_failovers"} | forwarded | own_policy | hooks
    assert {name.removesuffix("_total") for name in named} - only_where_switched_on == {
        name for name in families if not name.endswith("_created")
    }
    assert {
        "kvrouter_requests": "counter",
        "kvrouter_requests_refused": "counter",
        "kvrouter_requests_retried": "counter",
        "kvrouter_requests_abandoned": "counter",
        "kvrouter_answers_broken": "counter",
        "kvrouter_prompt_tokens": "counter",
        "kvrouter_overlap_tokens": "counter",
        "kvrouter_best_overlap_tokens": "counter",
        "kvrouter_decisions": "counter",
        "kvrouter_decision_cost": "counter",
        "kvrouter_queue_seconds": "histogram",
        "kvrouter_time_to_first_byte_seconds": "histogram",
        "kvrouter_time_per_output_token_seconds": "histogram",
        "kvrouter_audit_predicted_tokens": "counter",
        "kvrouter_audit_cached_tokens": "counter",
        "kvrouter_audit_drift_ratio": "gauge",
        "kvrouter_stream_seconds_since_confirmed": "gauge",
        "kvrouter_worker_up": "gauge",
    }.items() <= {name: family.type for name, family in families.items()}.items()


async def test_metrics_have_the_names_of_llm_d_too_if_the_setting_says_so(
    worker: ScriptedWorker, routed: RouterUnderTest
) -> None:
    assert b"llm_d_epp_" not in (await routed.call("/metrics")).body

    async with router(worker.url, picker={"llm_d_metrics": True, "pool": "agents"}) as named:
        await named.call(PATH, BODY)
        text = (await named.call("/metrics")).body.decode()
        families = {f.name: f for f in text_string_to_metric_families(text) if f.name.startswith("llm_d_epp_")}
        documented = set(re.findall(r"`(llm_d_epp_[a-z_0-9]+)`", METRICS.read_text()))
        # The worker reports neither its queue nor its memory, and the answer is no stream.
        assert set(families) == {name.removesuffix("_total") for name in documented} - {
            "llm_d_epp_average_kv_cache_utilization",
            "llm_d_epp_average_queue_size",
        }
        model = {"model_name": MODEL, "target_model_name": MODEL}
        assert await named.metric("llm_d_epp_request_total", **model) == 1
        assert await named.metric("llm_d_epp_request_ttft_seconds_count", **model) == 1
        assert await named.metric("llm_d_epp_request_input_tokens_bucket", le="+Inf", **model) == 1
        assert families["llm_d_epp_ready_endpoints"].samples[0][1:3] == ({"name": "agents"}, 1)
        assert await named.metric("llm_d_epp_flow_control_queue_size", inference_pool="agents") == 0


async def test_stream_is_counted_in_metrics(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    worker.script = stream
    for _ in range(2):
        await routed.call(PATH, BODY | {"stream": True})
    model = {"model": MODEL}
    assert await routed.metric("kvrouter_requests_total", status="200", **model) == 2
    assert await routed.metric("kvrouter_decisions_total", **model) == 2
    assert await routed.metric("kvrouter_queue_seconds_count", **model) == 2
    for histogram in ("tokenizing_seconds", "scheduler_seconds", "request_queue_duration_seconds"):
        assert await routed.metric(f"kvrouter_{histogram}_count", **model) == 2
    assert await routed.metric("kvrouter_request_queue_duration_seconds_sum", **model) == 0
    for histogram in ("request_input_tokens", "request_output_tokens", "prefix_indexer_hit_ratio"):
        assert await routed.metric(f"kvrouter_{histogram}_count", **model) == 2
    assert await routed.metric("kvrouter_time_to_first_byte_seconds_count", **model) == 2
    assert await routed.metric("kvrouter_time_per_output_token_seconds_count", **model) == 2
    assert await routed.metric("kvrouter_overlap_tokens_total", **model) == 96
    assert await routed.metric("kvrouter_best_overlap_tokens_total", **model) == 96
    assert await routed.metric("kvrouter_decision_cost_total", **model) > 0
    assert await routed.metric("kvrouter_audit_wrong_tokens_total", **model) == 96


async def test_unknown_models_are_no_labels(routed: RouterUnderTest) -> None:
    for number in range(20):
        assert (await routed.call(PATH, BODY | {"model": f"other-{number}"})).status == 404
        assert (await routed.call("/v1/moderations", {"model": f"other-{number}"})).status == 404
    assert b"other-" not in (await routed.call("/metrics")).body
    assert await routed.metric("kvrouter_requests_refused_total", status="404") == 40


# Health and readiness


async def test_router_is_ready_while_a_worker_answers(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    reply = await routed.call("/ready")
    assert (reply.status, reply.json()) == (200, {"status": "ready"})
    await worker.stop()
    assert (await routed.call(PATH, BODY)).status == 503
    reply = await routed.call("/ready")
    assert (reply.status, reply.json()) == (503, {"status": "no worker answers"})
    health = await routed.call("/health")
    assert (health.status, health.json()["status"]) == (200, "no worker answers")
    found = {found["finding"] for found in health.json()["findings"]}
    assert found - {"prompts_by_text", "tokenizer_missing"} == {"worker_down"}


async def test_router_is_ready_once_index_caught_up_or_timed_out(worker: ScriptedWorker) -> None:
    streams = [{"endpoint": "tcp://127.0.0.1:9", "replay_endpoint": "tcp://127.0.0.1:9"}]
    async with router(workers=[{"url": worker.url, "streams": streams}], constants={"catch_up": 0.3}) as routed:
        reply = await routed.call("/ready")
        assert (reply.status, reply.json()) == (503, {"status": "the index is catching up"})

        await until(lambda: routed.call("/ready"), lambda reply: reply.status == 200)
        (found, _) = await routed.findings()  # and no tokenizer
        assert (found["finding"], found["worker"], found["dp_rank"]) == ("events_missing", worker.url, 0)
        assert found["detail"] == "no event was received from tcp://127.0.0.1:9"


async def test_stream_at_another_host_and_without_replays_says_so(worker: ScriptedWorker) -> None:
    streams = [{"endpoint": "tcp://127.0.0.2:9"}]
    async with router(workers=[{"url": worker.url, "streams": streams}]) as routed:
        found = {found["finding"]: found["detail"] for found in await routed.findings()}
    assert "127.0.0.2 is not the worker's host" in found["events_missing"]
    assert found["replay_missing"] == "the stream at tcp://127.0.0.2:9 has no replay endpoint"


# Request ids and logs


async def test_request_id_is_forwarded_returned_and_logged(
    worker: ScriptedWorker, routed: RouterUnderTest, logs: list[Any]
) -> None:
    reply = await routed.call(PATH, BODY, headers={"X-Request-Id": "mine-1"})
    assert reply.headers.getall("x-request-id") == ["mine-1"]
    assert worker.last.header("x-request-id") == [b"mine-1"]
    (line,) = await request_lines(logs)
    assert line.pop("ms") >= line.pop("first_byte_ms") > 0
    assert line == {
        "event": "request",
        "log_level": "info",
        "request_id": "mine-1",
        "method": "POST",
        "path": PATH,
        "status": 200,
        "worker": worker.url,
        "overlap": "0",
        "bytes": 2,
    }


async def test_logged_bytes_exclude_chunk_framing(
    worker: ScriptedWorker, routed: RouterUnderTest, logs: list[Any]
) -> None:
    events = [b"data: %d\n\n" % number for number in range(5)]

    async def slowly(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        for event in events:
            await exchange.chunk(event)
            await asyncio.sleep(0.01)
        await exchange.chunk(b"")

    worker.script = slowly
    reply = await routed.call(PATH, BODY)
    (line,) = await request_lines(logs)
    assert reply.body == b"".join(events)
    assert line["bytes"] == len(reply.body)


@pytest.mark.parametrize("given", ["", "with space", "x" * 129, "é"])
async def test_request_id_is_created_if_missing_or_invalid(
    worker: ScriptedWorker, routed: RouterUnderTest, given: str
) -> None:
    worker.script = lambda exchange: exchange.answer(headers=b"x-request-id: the-workers-own\r\n")
    reply = await routed.call(PATH, BODY, headers={"x-request-id": given})
    (made,) = reply.headers.getall("x-request-id")
    assert len(made) == 32
    assert worker.last.header("x-request-id") == [made.encode()]


async def test_refusals_are_logged_with_request_id(routed: RouterUnderTest, logs: list[Any]) -> None:
    reply = await routed.call(PATH, b"{")
    (line,) = await request_lines(logs)
    assert (reply.status, line["status"], line["request_id"]) == (400, 400, reply.headers["x-request-id"])
    assert "worker" not in line


async def test_prompts_and_responses_are_never_logged(
    worker: ScriptedWorker, routed: RouterUnderTest, logs: list[Any]
) -> None:
    async def break_off(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(SECRET.encode())
        await exchange.hang_up()

    chat = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}
    for script in (Exchange.answer, stream, break_off):
        worker.script = script
        for path, body in (
            (PATH, {"model": MODEL, "prompt": SECRET}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {"model": MODEL, "messages": SECRET}),
            (f"{PATH}?q={SECRET.replace(' ', '%20')}", {"model": MODEL, "prompt": [SECRET, 3]}),
            (PATH, f'{{"model": "m", "prompt": "{SECRET}"'.encode()),
            ("/match", {"model": MODEL, "prompt": SECRET}),
            ("/other", {"model": MODEL, "text": SECRET}),
        ):
            try:
                await routed.call(path, body)
            except OSError:
                assert script is break_off
    await request_lines(logs, 21)
    assert any(line["log_level"] == "debug" for line in logs)
    assert "quick" not in repr(logs)


# Traces


class Collector:
    """Receives spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: dict[str, Any] = {}
        self.raw = b""

    async def receive(self, request: web.Request) -> web.Response:
        self.raw += await request.read()
        export = ExportTraceServiceRequest.FromString(await request.read())
        for resource in export.resource_spans:
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return web.Response(content_type="application/x-protobuf")

    def attributes(self, name: str) -> dict[str, Any]:
        values = ((each.key, each.value) for each in self.spans[name].attributes)
        return {key: getattr(value, value.WhichOneof("value")) for key, value in values}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.receive)
    async with running_app(app) as url:
        collector.url = f"{url}/v1/traces"
        yield collector


@pytest.mark.parametrize("parent", [None, PARENT])
async def test_request_is_traced_to_worker(worker: ScriptedWorker, logs: list[Any], parent: str | None) -> None:
    worker.script = stream
    async with collecting() as collector:
        async with router(worker.url, otel={"endpoint": collector.url}, logs={"access": True}) as routed:
            headers = {"traceparent": parent, "tracestate": "a=1"} if parent else {}
            await routed.call(PATH, {"model": MODEL, "prompt": SECRET, "stream": True}, headers=headers)
            (forwarded,) = worker.last.header("traceparent")
        spans = collector.spans
    name = f"text_completion {MODEL}"
    assert set(spans) == {name, "tokenize", "decide", "upstream"}
    request = spans[name]
    assert {span.trace_id for span in spans.values()} == {request.trace_id}
    assert {spans[name].parent_span_id for name in ("tokenize", "decide", "upstream")} == {request.span_id}
    version, trace_id, span_id, flags = forwarded.decode().split("-")
    assert (version, trace_id, span_id) == ("00", request.trace_id.hex(), spans["upstream"].span_id.hex())
    assert flags == "01" if parent else len(flags) == 2
    if parent:
        assert (trace_id, request.parent_span_id.hex()) == tuple(parent.split("-")[1:3])
        assert worker.last.header("tracestate") == [b"a=1"]
    assert collector.attributes(name) == {
        "http.request.method": "POST",
        "url.path": PATH,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvrouter",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert collector.attributes("decide") == {"kvrouter.worker": worker.url, "kvrouter.overlap_tokens": 0}
    assert collector.attributes("upstream") == {"kvrouter.worker": worker.url}
    assert set(collector.attributes("tokenize")) == {"gen_ai.request.model", "kvrouter.prompt_tokens"}
    assert b"quick" not in collector.raw
    assert {line["trace_id"] for line in logs if line["event"] == "request"} == {trace_id}


@pytest.mark.parametrize(
    ("path", "headers", "fields", "status", "expected"),
    [
        (
            "/v1/chat/completions",
            {"x-dynamo-session-id": "chain"},
            {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 7, "n": 2},
            200,
            {"request.max_tokens": 7, "request.choice.count": 2, "conversation.id": "chain"},
        ),
        ("/v1/chat/completions", {}, {"messages": [{"role": "user", "content": SECRET}], "user": "ann"}, 400, {}),
        ("/v1/embeddings", {}, {"input": SECRET}, 200, {}),
        ("/v1/rerank", {}, {"query": SECRET, "documents": []}, 200, None),
    ],
)
async def test_span_of_a_request_follows_the_conventions_for_generative_ai(
    worker: ScriptedWorker,
    path: str,
    headers: dict[str, str],
    fields: dict[str, Any],
    status: int,
    expected: dict[str, Any] | None,
) -> None:
    usage = b'"usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}'

    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b'{"choices": [], %b}' % usage, "200 OK" if status == 200 else "400 Bad Request")

    worker.script = answer
    async with collecting() as collector, router(worker.url, otel={"endpoint": collector.url}) as routed:
        reply = await routed.call(path, {"model": MODEL} | fields, headers=headers)
        assert reply.status == status
    operation = "embeddings" if path.endswith("embeddings") else "chat"
    name = "request" if expected is None else f"{operation} {MODEL}"
    found = collector.attributes(name)
    named = {key.removeprefix("gen_ai."): value for key, value in found.items() if key.startswith("gen_ai.")}
    if expected is None:
        assert named == {}
        return
    expected |= {"operation.name": operation, "provider.name": "kvrouter", "request.model": MODEL}
    if status == 200:
        expected |= {"usage.input_tokens": 9, "usage.output_tokens": 4, "usage.cache_read.input_tokens": 8}
    assert named == expected
    assert found.get("error.type") == (None if status == 200 else str(status))
    assert b"quick" not in collector.raw


async def test_provider_of_a_span_is_the_engine() -> None:
    async with collecting() as collector, simulated_workers(1, base_step_s=0.001) as urls:
        async with router(*urls, otel={"endpoint": collector.url}) as routed:
            await routed.until_up(1)
            await routed.call(PATH, {"model": "simulated", "prompt": SECRET, "max_tokens": 2})
        assert collector.attributes("text_completion simulated")["gen_ai.provider.name"] == "vllm"


async def test_trace_context_is_forwarded_without_tracing(worker: ScriptedWorker, routed: RouterUnderTest) -> None:
    await routed.call(PATH, BODY, headers={"traceparent": PARENT})
    assert worker.last.header("traceparent") == [PARENT.encode()]
    await routed.call(PATH, BODY)
    assert worker.last.header("traceparent") == []
