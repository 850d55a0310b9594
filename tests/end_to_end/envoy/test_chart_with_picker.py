"""The chart's Envoy, with the picker behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy_under_test import envoy
from picker_under_test import picker
from scripted_worker import MODEL, Exchange, scripted_worker

helm = pytest.importorskip("helm_python", reason="make test-envoy installs it", exc_type=ImportError)
pytest.importorskip("envoy", reason="make test-envoy installs it", exc_type=ImportError)

pytestmark = pytest.mark.envoy

CHART = Path(__file__).parents[3] / "deploy/helm/kvrouter"


def chart_config(_: Any) -> Any:
    """Return the Envoy configuration of the chart."""
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render({"envoy": {"enabled": True}}, name="rel", namespace="inference")
    for text in rendered.values():
        for found in yaml.safe_load_all(text) if "ConfigMap" in text else ():
            if found and "envoy.yaml" in found.get("data", {}):
                return yaml.safe_load(found["data"]["envoy.yaml"])
    raise AssertionError("the chart has no Envoy")


async def test_stream_passes_and_releases_load(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.chunk(b"")

    async with (
        scripted_worker(script) as worker,
        picker(worker.url) as (side, port),
        envoy(port, tmp_path, chart_config) as through,
    ):
        for _ in range(3):
            reply = await through.call("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True})
            assert (reply.status, reply.worker) == (200, worker.url)
            assert reply.body == b"data: 1\n\ndata: [DONE]\n\n"
            await side.until_released()
        # The picker learns from the first response that it is shown responses.
        assert await side.metric("kvrouter_time_to_first_byte_seconds_count") >= 1
