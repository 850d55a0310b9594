"""Metrics that a router sends to a collector by OTLP, as the usual environment variables say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from router_under_test import router
from running_app import running_app
from scripted_worker import MODEL, Exchange, ScriptedWorker

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": [1, 2, 3], "stream": True}
USAGE = {"prompt_tokens": 3, "completion_tokens": 3}
SERVER = "gen_ai.server."
# As Envoy AI Gateway has them (internal/metrics/genai.go).
BOUNDS = {
    "request.duration": [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92],
    "time_to_first_token": [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0),
    ],
    "time_per_output_token": [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
}


class Collector:
    """The last metrics that were received, by their names."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    async def receive(self, request: web.Request) -> web.Response:
        message = ExportMetricsServiceRequest.FromString(await request.read())
        for of_resource in message.resource_metrics:
            for scope in of_resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}
        return web.Response()

    def points(self, name: str) -> list[tuple[dict[str, str], Any]]:
        """Return the attributes and the data of a histogram's series."""
        return [
            ({each.key: each.value.string_value for each in point.attributes}, point)
            for point in self.metrics[name].histogram.data_points
        ]


@asynccontextmanager
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/metrics", collector.receive)
    async with running_app(app) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield collector


async def stream(exchange: Exchange) -> None:
    if b'"fail"' in exchange.body:
        await exchange.answer(b"{}", "400 Bad Request")
        return
    await exchange.begin_chunks()
    for event in ({"choices": [{"text": "x"}]}, {"choices": [], "usage": USAGE}):
        await exchange.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.chunk(b"")


async def test_collector_receives_histograms_by_the_conventions_and_own_metrics(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.script = stream
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    async with collecting(monkeypatch) as collector:
        async with router(worker.url) as routed:
            await routed.call(PATH, BODY)
            await routed.call(PATH, BODY | {"suffix": "fail"})
            await routed.call(PATH, BODY | {"model": "unknown"})
            await routed.call("/v1/rerank", {"model": MODEL, "query": "a", "documents": []})
        known = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "kvrouter"}
        of_model = known | {"gen_ai.request.model": MODEL}
        durations = [attributes for attributes, _ in collector.points(f"{SERVER}request.duration")]
        assert sorted(durations, key=str) == sorted(
            [of_model, of_model | {"error.type": "400"}, known | {"error.type": "404"}], key=str
        )
        for name in ("time_to_first_token", "time_per_output_token"):
            [(attributes, point)] = collector.points(SERVER + name)
            assert (attributes, point.count) == (of_model, 1)
            assert collector.metrics[SERVER + name].unit == "s"
        for name, bounds in BOUNDS.items():
            [*_, (_, point)] = collector.points(SERVER + name)
            assert list(point.explicit_bounds) == pytest.approx(bounds)
        answers = collector.metrics["kvrouter_requests_total"].sum
        assert answers.is_monotonic
        assert {point.as_double for point in answers.data_points} >= {1.0}
        [(labels, own)] = collector.points("kvrouter_time_to_first_byte_seconds")
        assert labels == {"model": MODEL}
        assert sum(own.bucket_counts) == own.count == 3


@pytest.mark.parametrize("exporter", ["", "none", "prometheus"])
async def test_nothing_is_sent_unless_the_exporter_is_otlp(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, exporter: str
) -> None:
    worker.script = stream
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", exporter)
    async with collecting(monkeypatch) as collector:
        async with router(worker.url) as routed:
            await routed.call(PATH, BODY)
        assert collector.metrics == {}
