"""Every field that is read of SGLang's answers, held against answers of its releases (`tests/data/engine_answers`)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvevents import EventSource
from router.apis.abilities import Ability
from router.apis.usage import UsageTail
from router.fleet.discovery import Engine, ServedModel, WorkerDescription, describe_worker
from router.fleet.engine_metrics import EngineLoad, read_engine_loads
from router.settings import WorkerSettings

ANSWERS = Path(__file__).parents[2] / "data" / "engine_answers"
RELEASES = ("0.5.10", "0.5.13", "0.5.20", "0.5.23")
SINCE_13, SINCE_20, LATEST = RELEASES[1:], RELEASES[2:], RELEASES[3:]

# The path of an answer, a field that is read of it, and the releases that have the field.
FIELDS = [
    ("models", "data.id", LATEST),
    ("models", "data.root", LATEST),
    ("models", "data.parent", LATEST),
    ("models", "data.max_model_len", LATEST),
    ("models", "data.owned_by", LATEST),
    ("server_info", "version", RELEASES),
    ("server_info", "chat_template", RELEASES),
    ("server_info", "kv_events_config", RELEASES),
    ("server_info", "page_size", RELEASES),
    ("server_info", "dp_size", RELEASES),
    ("server_info", "dcp_size", SINCE_20),
    ("server_info", "tokenizer_path", RELEASES),
    ("server_info", "served_model_name", RELEASES),
    ("server_info", "disaggregation_mode", RELEASES),
    ("server_info", "disaggregation_bootstrap_port", RELEASES),
    ("server_info", "encoder_only", RELEASES),
    ("server_info", "tool_call_parser", RELEASES),
    ("server_info", "grammar_backend", RELEASES),
    ("server_info", "disable_radix_cache", RELEASES),
    ("server_info", "hicache_storage_backend", RELEASES),
    ("server_info", "hicache_storage_backend_extra_config", RELEASES),
    ("server_info", "hicache_object_layout", LATEST),
    ("server_info", "kv_events.publisher", SINCE_13),
    ("server_info", "kv_events.endpoint_host", SINCE_13),
    ("server_info", "kv_events.endpoint_port_base", SINCE_13),
    ("server_info", "kv_events.topic", SINCE_13),
    ("server_info", "kv_events.block_size", SINCE_13),
    ("server_info", "kv_events.dp_size", SINCE_13),
    ("server_info", "kv_events.replay_endpoint_port_base", LATEST),
    ("model_info", "has_image_understanding", SINCE_13),
    ("model_info", "has_audio_understanding", SINCE_13),
    ("completion", "usage.prompt_tokens", LATEST),
    ("completion", "usage.completion_tokens", LATEST),
    ("completion", "usage.prompt_tokens_details.cached_tokens", LATEST),
]


def answer(release: str, name: str) -> Any:
    return json.loads((ANSWERS / f"sglang-{release}.{name}.json").read_text())


@pytest.mark.parametrize(("name", "field", "releases"), FIELDS)
def test_field_is_in_the_answers_of_its_releases_alone(name: str, field: str, releases: tuple[str, ...]) -> None:
    found = []
    for release in RELEASES:
        if not (ANSWERS / f"sglang-{release}.{name}.json").exists():
            continue
        value = answer(release, name)
        for part in field.split("."):
            value = value[0] if isinstance(value, list) else value
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            found.append(release)
    assert tuple(found) == releases


@asynccontextmanager
async def worker(answers: dict[str, Any]) -> AsyncIterator[str]:
    async def reply(request: web.Request) -> web.Response:
        return web.json_response(answers[request.path]) if request.path in answers else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", reply)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


async def described(release: str) -> WorkerDescription:
    answers = {"/server_info": answer(release, "server_info"), "/v1/models": answer("0.5.23", "models")}
    if release != "0.5.10":
        answers["/model_info"] = answer(release, "model_info")
    async with worker(answers) as url, aiohttp.ClientSession() as session:
        return await describe_worker(session, WorkerSettings(url=url))


@pytest.mark.parametrize("release", RELEASES)
async def test_worker_is_described_by_its_release(release: str) -> None:
    description = await described(release)
    assert description.engine is Engine.SGLANG
    assert description.refused == ()
    assert description.block_size == 16
    base, replay = (31010, 31020) if release == "0.5.23" else (5557, 5558)
    ranks = (0,) if release == "0.5.23" else (0, 1)
    assert description.ranks == ranks
    assert list(description.streams) == [
        EventSource(rank, f"tcp://127.0.0.1:{base + rank}", f"tcp://127.0.0.1:{replay + rank}", "kv-events")
        for rank in ranks
    ]
    lacks = {Ability.TOOLS, Ability.STRUCTURED_OUTPUT}
    if release != "0.5.10":
        lacks |= {Ability.IMAGES, Ability.AUDIO, Ability.VIDEO}
    assert description.lacks == lacks
    assert description.models["tiny"] == ServedModel("tiny", "tiny", None, "/models/tiny", 4096)
    assert description.models["one"].sent_as == "tiny:one"


async def test_model_keeps_its_name_after_new_weights_from_disk() -> None:
    """SGLang then lists the path of the weights, and answers to any name."""
    cards = json.loads(json.dumps(answer("0.5.23", "models")).replace('"tiny"', '"/models/tiny-2"'))
    answers = {"/server_info": answer("0.5.23", "server_info"), "/v1/models": cards}
    async with worker(answers) as url, aiohttp.ClientSession() as session:
        models = (await describe_worker(session, WorkerSettings(url=url))).models
        only = (await describe_worker(session, WorkerSettings(url=url, model="mine"))).models
    assert models["tiny"] == ServedModel("tiny", "tiny", None, "/models/tiny", 4096)
    assert models["/models/tiny-2"].model == "tiny"
    assert (models["one"].model, models["one"].sent_as) == ("tiny", "tiny:one")
    assert list(only) == ["mine"]


def test_usage_and_load_of_the_latest_release_are_read() -> None:
    tail = UsageTail()
    tail.feed((ANSWERS / "sglang-0.5.23.completion.json").read_bytes())
    usage = tail.usage()
    assert usage is not None
    assert (usage.prompt, usage.completion, usage.cached) == (41, 6, 32)
    loads = read_engine_loads((ANSWERS / "sglang-0.5.23.metrics").read_text())
    assert loads == {0: EngineLoad(running=0, waiting=0, kv_usage=0.0, tokens=1738 + 75 + 4 + 26)}
