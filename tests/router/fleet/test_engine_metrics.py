"""The load that vLLM and SGLang report in their metrics."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from manual_clock import Clock

from indexer import Indexer
from router.fleet.engine_metrics import NOTHING_KNOWN, EngineLoad, EngineMetrics, EngineView, read_engine_loads
from router.fleet.fleet import Fleet
from router.fleet.prober import MetricsScraper
from router.settings import FleetSettings, WorkerSettings

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:generation_tokens_total{engine="0",model_name="m"} 500.0
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="0"} 4.0
sglang:num_queue_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="0"} 5.0
sglang:token_usage{dp_rank="1",engine_type="unified",model_name="m",tp_rank="0"} 0.75
sglang:prompt_tokens_total{model_name="m"} 10.0
"""
TENSORRT_LLM = """\
trtllm_num_requests_running{model_name="m",engine_type="trtllm"} 2.0
trtllm_num_requests_waiting{model_name="m",engine_type="trtllm"} 1.0
trtllm_kv_cache_utilization{model_name="m",engine_type="trtllm"} 0.5
"""


@pytest.fixture
def metrics(clock: Clock) -> EngineMetrics:
    return EngineMetrics(5.0, clock)


def test_requests_of_each_priority_are_not_counted_twice() -> None:
    """SGLang 0.5.23 with `--enable-priority-scheduling`."""
    text = """\
sglang:num_running_reqs{engine_type="unified",model_name="m",priority=""} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",priority="0"} 1.0
sglang:num_running_reqs{engine_type="unified",model_name="m",priority="5"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",priority=""} 1.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",priority="None"} 1.0
sglang:prompt_tokens_total{model_name="m",priority="0"} 10.0
sglang:prompt_tokens_total{model_name="m",priority="5"} 10.0
"""
    assert read_engine_loads(text) == {0: EngineLoad(3, 1, None, 20)}


def test_metrics_of_vllm_and_sglang_are_read_by_rank() -> None:
    assert read_engine_loads(VLLM) == {0: EngineLoad(3, 2, 0.25, 2000), 1: EngineLoad(1, 0, 0.5, 0)}
    assert read_engine_loads(SGLANG) == {0: EngineLoad(0, None, None, 10), 1: EngineLoad(4, 5, 0.75, 0)}


def test_metrics_of_tensorrt_llm_are_read() -> None:
    assert read_engine_loads(TENSORRT_LLM) == {0: EngineLoad(2, 1, 0.5, 0)}


@pytest.mark.parametrize(
    ("labels", "path"), [({"llm-d.ai/engine-type": "trtllm-serve"}, "/prometheus/metrics"), ({}, "/metrics")]
)
async def test_label_of_a_pod_names_where_its_metrics_are(labels: dict[str, str], path: str) -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()

    async def answer(request: web.Request) -> web.Response:
        asked.put_nowait(request.path)
        return web.Response(text=TENSORRT_LLM)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        indexer = Indexer()
        indexer.start()
        fleet = Fleet([WorkerSettings(url=str(server.make_url("/")), labels=labels)], FleetSettings(), indexer)
        scraper = MetricsScraper(fleet, FleetSettings(), session, lambda *_: Counter())
        watch = asyncio.create_task(scraper.watch(fleet.workers[0]))
        assert await asyncio.wait_for(asked.get(), 10.0) == path
        watch.cancel()
        indexer.stop()


@pytest.mark.parametrize(
    "text", ["", "other_metric 1", "vllm:num_requests_running{} NaN", "vllm:num_requests_running x"]
)
def test_unknown_or_invalid_metrics_are_ignored(text: str) -> None:
    assert read_engine_loads(text) == {}


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        ("", (False, False)),
        ('vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0\n', (True, False)),
        ('vllm:mooncake_store_operation_bytes_total{engine="0",operation="put"} 1.0\n', (False, True)),
    ],
)
def test_speculative_decoding_and_pools_are_detected(
    metrics: EngineMetrics, sample: str, found: tuple[bool, bool]
) -> None:
    metrics.read(VLLM + sample, {})
    assert (metrics.drafts, metrics.pooled) == found


def test_unseen_requests_are_those_beyond_the_known_ones(metrics: EngineMetrics) -> None:
    metrics.read(VLLM, {0: 2, 1: 4})
    assert metrics.get(0) == EngineView(unseen=3, waiting=2, kv_usage=0.25, queue=2, running=3)
    assert metrics.get(1) == EngineView(unseen=0, waiting=0, kv_usage=0.5, queue=0, running=1)
    assert metrics.get(2) == NOTHING_KNOWN


def test_stale_scrape_expires(metrics: EngineMetrics, clock: Clock) -> None:
    metrics.read(VLLM, {})
    clock.now += 5.1
    assert metrics.get(0) == NOTHING_KNOWN


def test_unanswered_counts_from_the_first_unanswered_scrape(metrics: EngineMetrics, clock: Clock) -> None:
    metrics.scrape_began()
    clock.now += 1
    assert metrics.unanswered == 0  # it may never answer scrapes
    metrics.scrape_answered()
    metrics.scrape_began()
    clock.now += 2
    metrics.scrape_began()
    assert metrics.unanswered == 2
    metrics.scrape_answered()
    assert metrics.unanswered == 0


def test_progress_is_the_time_of_the_last_counter_increase(metrics: EngineMetrics, clock: Clock) -> None:
    for _ in range(2):
        clock.now += 1
        metrics.read(VLLM, {})
    assert metrics.progress_at == 101
    clock.now += 1
    metrics.read(VLLM.replace("1.5e+03", "1.6e+03"), {})
    assert metrics.progress_at == 103


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        ("vllm:prompt_tokens_total 5.0", "vllm:prompt_tokens_total 6.0", False),
        ("vllm:prompt_tokens_total 5.0", "vllm:prompt_tokens_total 4.0", True),
        ("process_start_time_seconds 100.5", "process_start_time_seconds 100.5", False),
        ("process_start_time_seconds 100.5", "process_start_time_seconds 200.0", True),
        ("process_start_time_seconds 200.0", "process_start_time_seconds 100.0", False),
        ("process_start_time_seconds 100.5", "", False),
    ],
)
def test_new_process_is_recognized(metrics: EngineMetrics, before: str, after: str, restarted: bool) -> None:
    assert not metrics.read(before, {})
    assert metrics.read(after, {}) is restarted
    assert not metrics.read(after, {})
