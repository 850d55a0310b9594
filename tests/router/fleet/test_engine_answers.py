"""Every field that is read of engines' answers, held against answers of their releases (`tests/data/engine_answers`).

Those of SGLang 0.5.23 are recorded, shortened. Those of its other releases and of vLLM 0.32.0 are written from the
release's source: they have every field of its classes, or the parts of its metrics that are read.
"""

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

from indexer.hashing import MediaSpan
from kvevents import EventSource
from router.apis.abilities import Ability
from router.apis.requests import ChatPrompt, TextPrompts
from router.apis.usage import UsageTail
from router.fleet.discovery import Engine, ServedModel, WorkerDescription, describe_worker
from router.fleet.engine_metrics import EngineLoad, Sleep, read_engine_loads, read_sleep
from router.settings import WorkerSettings
from router.tokens.engine_client import EngineClient

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


VLLM = "0.32.0"
OF_VLLM = [
    *(("models", f"data.{name}") for name in ("id", "root", "parent", "max_model_len", "owned_by")),
    *(("kv_event_sources", f"0.{name}") for name in ("publisher", "endpoint", "replay_endpoint", "topic")),
    ("version", "version"),
    ("completion", "choices.prompt_token_ids"),
    ("chat", "prompt_token_ids"),
    *(
        (name, f"usage.{field}")
        for name in ("chat", "completion")
        for field in ("prompt_tokens", "completion_tokens", "prompt_tokens_details.cached_tokens")
    ),
    *(
        ("responses", f"usage.{name}")
        for name in ("input_tokens", "output_tokens", "input_tokens_details.cached_tokens")
    ),
    *(("messages", f"usage.{name}") for name in ("input_tokens", "output_tokens", "cache_read_input_tokens")),
    ("messages", "usage.cache_creation_input_tokens"),
    ("tokenize", "tokens"),
    ("render", "token_ids"),
    ("render", "features.mm_hashes"),
    ("render", "features.mm_placeholders.image.offset"),
    ("render", "features.mm_placeholders.image.length"),
]


def answer(release: str, name: str, engine: str = "sglang") -> Any:
    return json.loads((ANSWERS / f"{engine}-{release}.{name}.json").read_text())


def has(value: Any, field: str) -> bool:
    """Return whether an answer has a field. The first item of a list counts."""
    for part in field.split("."):
        value = value[0] if isinstance(value, list) else value
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


@pytest.mark.parametrize(("name", "field", "releases"), FIELDS)
def test_field_is_in_the_answers_of_its_releases_alone(name: str, field: str, releases: tuple[str, ...]) -> None:
    found = [release for release in RELEASES if (ANSWERS / f"sglang-{release}.{name}.json").exists()]
    assert tuple(release for release in found if has(answer(release, name), field)) == releases


@pytest.mark.parametrize(("name", "field"), OF_VLLM)
def test_field_is_in_the_answers_of_vllm(name: str, field: str) -> None:
    assert has(answer(VLLM, name, "vllm"), field)


@asynccontextmanager
async def worker(answers: dict[str, Any]) -> AsyncIterator[str]:
    async def reply(request: web.Request) -> web.Response:
        found = answers.get(request.path)
        if isinstance(found, str):
            return web.Response(text=found)
        return web.Response(status=404) if found is None else web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", reply)
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


@asynccontextmanager
async def vllm() -> AsyncIterator[str]:
    paths = {
        "/v1/models": "models",
        "/kv_event_sources": "kv_event_sources",
        "/version": "version",
        "/tokenize": "tokenize",
        "/v1/completions": "completion",
        "/v1/chat/completions": "chat",
        "/v1/chat/completions/render": "render",
    }
    answers = {path: answer(VLLM, name, "vllm") for path, name in paths.items()}
    async with worker(answers | {"/metrics": (ANSWERS / f"vllm-{VLLM}.metrics").read_text()}) as url:
        yield url


async def test_vllm_is_described_by_its_release() -> None:
    async with vllm() as url, aiohttp.ClientSession() as session:
        description = await describe_worker(session, WorkerSettings(url=url))
        release = await EngineClient(session, "tiny").release(url, Engine.VLLM)
    assert (description.engine, description.refused, release.version) == (Engine.VLLM, (), "0.32.0+cpu")
    assert (description.block_size, description.capacity, description.ranks) == (32, 1000, (0, 1))
    assert list(description.streams) == [
        EventSource(rank, f"tcp://127.0.0.1:{5557 + rank}", f"tcp://127.0.0.1:{5577 + rank}", "kv-events")
        for rank in (0, 1)
    ]
    assert description.models == {
        "tiny": ServedModel("tiny", "tiny", None, "/models/tiny", 4096),
        "one": ServedModel("one", "tiny", "one", "/adapters/one", 4096),
    }


async def test_token_ids_of_vllm_are_read() -> None:
    chat, text = ChatPrompt([{"role": "user", "content": "a"}]), TextPrompts(["a"])
    async with vllm() as url, aiohttp.ClientSession() as session:
        client = EngineClient(session, "tiny")
        (rendered,) = await client.rendered(url, chat)
        others = [
            *await client.tokenized(url, text),
            *await client.computed(url, chat),
            *await client.computed(url, text),
        ]
    assert list(rendered) == [11, 12, 13]
    assert rendered.media == (MediaSpan(1, 3, "abc"),)
    assert [list(each) for each in others] == [[11, 12, 13]] * 3


@pytest.mark.parametrize("name", ["completion", "chat", "responses", "messages"])
def test_usage_of_vllm_is_read(name: str) -> None:
    tail = UsageTail()
    tail.feed((ANSWERS / f"vllm-{VLLM}.{name}.json").read_bytes())
    usage = tail.usage()
    assert usage is not None
    assert (usage.prompt, usage.completion, usage.cached) == (41, 6, 32)


def test_load_and_sleep_of_vllm_are_read() -> None:
    text = (ANSWERS / f"vllm-{VLLM}.metrics").read_text()
    assert read_engine_loads(text) == {0: EngineLoad(1, 0, 0.25, 120), 1: EngineLoad(2, 1, 0.25, 120)}
    assert read_sleep(text) is Sleep.AWAKE
    asleep = text.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
    assert read_sleep(asleep) is Sleep.WITH_CACHE
    for state in ("weights_offloaded", "discard_all"):
        assert read_sleep(asleep.replace(f'"{state}"}} 0.0', f'"{state}"}} 1.0')) is Sleep.WITHOUT_CACHE
