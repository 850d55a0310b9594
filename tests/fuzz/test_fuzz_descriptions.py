"""Mutated descriptions of workers: each is read within its bounds, or raises an error of ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from budget import damaged, examples
from running_app import running_app

from kvevents.sources import MOST_BLOCK_SIZE
from router.fleet.discovery import DiscoveryError, WorkerDescription, describe_worker
from router.fleet.engine_metrics import read_engine_loads
from router.settings import WorkerSettings

FEW = 150
MOST_MODELS, MOST_RANKS = 20, 8
EVENTS = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:9", "replay_endpoint": "tcp://*:10", "topic": "kv"}
SERVER_INFO = {
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "127.0.0.1",
        "endpoint_port_base": 9,
        "replay_endpoint_port_base": 10,
        "topic": "kv",
        "dp_size": 2,
        "block_size": 16,
    },
    "kv_events_config": json.dumps(EVENTS),
    "page_size": 16,
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8998,
}
ODD: list[Any] = [
    *(None, True, 0, -1, 1, 1024, 10**12, 2**63, 2**64, 10**400, 1.5, -0.0, float("nan"), float("inf")),
    *("", "0", "-1", "null", "m", "\x00", "a\nb", "\ud800", "x" * 3000, [], {}, [[]], {"": {}}),
    *("tcp://127.0.0.1:1", "tcp://*:1", "tcp://a:0;b:1", "tcp://[::1]:1", "ipc:///tmp/x", "tcp://169.254.169.254:80"),
]
METRICS = [
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0',
    'vllm:num_requests_running{engine="0"} 1.0',
    'sglang:num_queue_reqs{dp_rank="1"} 2',
    "sglang:token_usage 0.5",
    "vllm:prompt_tokens_total 1e30",
]


def bent(random: Random, value: Any) -> Any:
    """A value of which something is another."""
    if random.random() < 0.15:
        return random.choice(ODD)
    if isinstance(value, dict):
        changed = {name: bent(random, each) for name, each in value.items() if random.random() < 0.95}
        if random.random() < 0.1:
            changed[random.choice(["", "x", "0", "99999", "id"])] = random.choice(ODD)
        return changed
    if isinstance(value, list):
        return [bent(random, each) for each in value * random.choice([1, 1, 1, 0, 2, 30])]
    return value


def mutated_answers(random: Random) -> dict[str, bytes]:
    """The answers of a worker, by path; what is not there is answered with 404."""
    cards = [{"id": "m", "root": "/m", "max_model_len": 4096}, {"id": "a", "root": "/a", "parent": "m"}]
    whole: dict[str, Any] = {"/v1/models": {"data": cards}}
    if random.random() < 0.5:
        whole["/kv_event_sources"] = {"0": EVENTS, "1": EVENTS}
    if random.random() < 0.7:
        whole["/server_info"] = SERVER_INFO
    answers = {path: json.dumps(bent(random, value)).encode() for path, value in whole.items()}
    lines = [line.replace("1", str(random.choice(ODD))[:600]) if random.random() < 0.3 else line for line in METRICS]
    answers["/metrics"] = "\n".join(lines).encode(errors="replace")
    return {path: damaged(random, answer) if random.random() < 0.1 else answer for path, answer in answers.items()}


@asynccontextmanager
async def worker(answers: dict[str, bytes]) -> AsyncIterator[str]:
    """A server with whatever these answers are at the time; its URL."""

    async def answer(request: web.Request) -> web.Response:
        known = answers.get(request.path)
        return web.Response(status=404) if known is None else web.Response(body=known)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with running_app(app) as url:
        yield url


def check(description: WorkerDescription) -> None:
    assert len(description.models) <= MOST_MODELS
    assert len(description.streams) <= MOST_RANKS
    assert 0 < len(description.ranks) <= MOST_RANKS
    assert all(0 <= rank <= 65_535 for rank in description.ranks)
    assert description.block_size is None or 1 <= description.block_size <= MOST_BLOCK_SIZE
    assert description.bootstrap_port is None or 1 <= description.bootstrap_port <= 65_535
    assert all(name.isprintable() for name in description.models)
    assert not any(";" in stream.endpoint for stream in description.streams)
    json.dumps([*description.models, *description.refused], allow_nan=False).encode()


async def test_mutated_descriptions_are_bounded_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.discovery.MOST_MODELS", MOST_MODELS)
    monkeypatch.setattr("router.fleet.discovery.MOST_RANKS", MOST_RANKS)
    answers: dict[str, bytes] = {}
    described = 0
    async with worker(answers) as url, aiohttp.ClientSession() as session:
        settings = WorkerSettings(url=url)
        for random in examples(FEW):
            answers.clear()
            answers.update(mutated_answers(random))
            loads = read_engine_loads(answers["/metrics"].decode(errors="replace"))
            assert all(0 <= load.running <= 1e15 and 0 <= (load.kv_usage or 0) <= 1 for load in loads.values()), answers
            try:
                description = await describe_worker(session, settings)
            except DiscoveryError:
                continue
            described += 1
            check(description)
    assert described
