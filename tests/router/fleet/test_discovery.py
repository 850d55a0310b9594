"""The description of a worker from its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvevents import EventSource
from kvevents.curve import create_key_pair, load_public_key
from router.fleet.discovery import (
    ENGINE_LABELS,
    DiscoveryError,
    Engine,
    ServedModel,
    WorkerDescription,
    describe_worker,
)
from router.settings import Role, WorkerSettings

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "root": "/models/m", "parent": None}]}
VLLM = {
    "/v1/models": MODELS,
    "/kv_event_sources": {
        "0": {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "topic": "kv", "hwm": 100000},
        "1": {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5558", "replay_endpoint": "tcp://127.0.0.1:5658"},
    },
    "/metrics": 'vllm:cache_config_info{block_size="32",engine="0"} 1.0\n',
}
ZMQ = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 16,
    "dp_size": 2,
    "replay_endpoint_port_base": 6557,
}
SGLANG = {"/v1/models": MODELS, "/server_info": {"page_size": 1, "kv_events": ZMQ}}


@asynccontextmanager
async def server(answers: dict[str, Any]) -> AsyncIterator[str]:
    """Run a server that answers the given paths with JSON, text, a status or bytes, and other paths with 404."""

    async def answer(request: web.Request) -> web.Response:
        given = answers.get(request.path, 404)
        if isinstance(given, int):
            return web.Response(status=given)
        if isinstance(given, bytes):
            return web.Response(body=given, content_type="application/json", charset="utf-8")
        return web.Response(text=given) if isinstance(given, str) else web.json_response(given)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


async def describe(answers: dict[str, Any], **settings: Any) -> WorkerDescription:
    async with server(answers) as url, aiohttp.ClientSession() as session:
        return await describe_worker(session, WorkerSettings(url=url, **settings))


async def test_vllm_worker_is_described() -> None:
    assert await describe(VLLM) == WorkerDescription(
        engine=Engine.VLLM,
        models={"m": ServedModel("m", "m", None, "/models/m")},
        streams=(
            EventSource(0, "tcp://127.0.0.1:5557", None, "kv"),
            EventSource(1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658", ""),
        ),
        block_size=32,
        ranks=(0, 1),
    )


async def test_worker_without_events_has_no_streams() -> None:
    description = await describe(VLLM | {"/kv_event_sources": {}})
    assert (description.engine, description.streams, description.ranks) == (Engine.VLLM, (), (0,))
    assert description.block_size == 32
    description = await describe(SGLANG | {"/server_info": {"page_size": 64, "kv_events": None}})
    assert (description.engine, description.streams, description.block_size) == (Engine.SGLANG, (), 64)


@pytest.mark.parametrize("metrics", ["", 'vllm:cache_config_info{block_size="None"} 1.0\n', "up 1\n"])
async def test_block_size_is_none_when_not_reported(metrics: str) -> None:
    assert (await describe(VLLM | {"/metrics": metrics})).block_size is None


async def test_sglang_worker_is_described() -> None:
    assert await describe(SGLANG) == WorkerDescription(
        engine=Engine.SGLANG,
        models={"m": ServedModel("m", "m", None, "/models/m")},
        streams=(
            EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557", "kv"),
            EventSource(1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:6558", "kv"),
        ),
        block_size=16,
        ranks=(0, 1),
    )


async def test_sglang_encode_server_is_known_by_a_path_of_its_own() -> None:
    description = await describe({"/scheduler_receive_url": 405})
    assert description == WorkerDescription(Engine.SGLANG, {}, role=Role.ENCODE)
    with pytest.raises(DiscoveryError, match="/v1/models returns 404"):
        await describe({"/scheduler_receive_url": 404})


async def test_sglang_server_reports_that_it_only_encodes() -> None:
    description = await describe(SGLANG | {"/server_info": {"page_size": 1, "encoder_only": True}})
    assert description.kv_format == (("page_size", "1"),)
    assert description.role is Role.ENCODE
    assert (await describe(SGLANG | {"/server_info": {"page_size": 1, "encoder_only": False}})).role is Role.BOTH


async def test_other_server_is_described_by_its_models_and_the_settings() -> None:
    description = await describe({"/v1/models": {"object": "list", "data": [{"id": "m"}, {"id": "n"}]}})
    assert description == WorkerDescription(Engine.OTHER, {"m": ServedModel("m", "m"), "n": ServedModel("n", "n")})
    description = await describe({"/v1/models": MODELS}, streams=[{"endpoint": "tcp://10.0.0.1:1"}])
    assert (description.engine, description.streams) == (Engine.OTHER, (EventSource(0, "tcp://10.0.0.1:1"),))


@pytest.mark.parametrize(
    ("answers", "labels", "engine"),
    [
        ({"/v1/models": MODELS}, {"llm-d.ai/engine-type": "vllm"}, Engine.VLLM),
        ({"/v1/models": MODELS}, {"inference.networking.k8s.io/engine-type": "sglang"}, Engine.SGLANG),
        ({"/v1/models": MODELS}, {ENGINE_LABELS[1]: "sglang", ENGINE_LABELS[0]: "vllm"}, Engine.VLLM),
        ({"/v1/models": MODELS}, {"llm-d.ai/engine-type": "triton"}, Engine.OTHER),
        (SGLANG, {"llm-d.ai/engine-type": "vllm"}, Engine.SGLANG),
    ],
)
async def test_label_names_an_engine_whose_routes_do_not(
    answers: dict[str, Any], labels: dict[str, str], engine: Engine
) -> None:
    assert (await describe(answers, labels=labels)).engine is engine


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
async def test_wildcard_address_of_a_stream_becomes_the_workers_host(wildcard: str) -> None:
    sources = {"0": {"endpoint": f"tcp://{wildcard}:5557", "replay_endpoint": f"tcp://{wildcard}:5558"}}
    description = await describe(VLLM | {"/kv_event_sources": sources})
    assert description.streams == (EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", ""),)


async def test_model_with_parent_is_an_adapter() -> None:
    cards = [{"id": "poet", "root": "/adapters/poet", "parent": "m"}, {"id": "m", "root": "/models/m", "parent": None}]
    description = await describe({"/v1/models": {"data": cards}})
    assert description.models == {
        "m": ServedModel("m", "m", None, "/models/m"),
        "poet": ServedModel("poet", "m", "poet", "/adapters/poet"),
    }
    assert description.base_models() == [ServedModel("m", "m", None, "/models/m")]


async def test_adapter_of_sglang_has_the_name_that_applies_it() -> None:
    cards = [
        {"id": "tiny", "root": "tiny", "parent": None, "max_model_len": 4096},
        {"id": "one", "root": "/adapters/one", "parent": "tiny", "max_model_len": None},
    ]
    description = await describe(SGLANG | {"/v1/models": {"data": cards}})
    one = ServedModel("one", "tiny", "one", "/adapters/one", 4096, sent_as="tiny:one")
    assert description.models == {
        "tiny": ServedModel("tiny", "tiny", None, "tiny", 4096),
        "one": one,
        "tiny:one": ServedModel("tiny:one", "tiny", "one", "/adapters/one", 4096),
    }
    assert description.base_models() == [description.models["tiny"]]


async def test_files_of_a_served_name_are_where_sglang_reports_them() -> None:
    info = SGLANG["/server_info"] | {"tokenizer_path": "/models/tiny"}
    card = {"id": "tiny", "root": "tiny"}
    described = await describe({"/v1/models": {"data": [card]}, "/server_info": info})
    assert described.models["tiny"].root == "/models/tiny"
    assert (await describe(SGLANG | {"/server_info": info})).models["m"].root == "/models/m"  # named already


async def test_names_with_the_same_root_are_one_model() -> None:
    cards = [
        {"id": "m", "root": "/models/m"},
        {"id": "alias", "root": "/models/m"},
        {"id": "poet", "root": "/adapters/poet", "parent": "alias"},
        {"id": "other", "root": "/models/other"},
    ]
    description = await describe({"/v1/models": {"data": cards}})
    assert {name: (served.model, served.adapter) for name, served in description.models.items()} == {
        "m": ("m", None),
        "alias": ("m", None),
        "poet": ("m", "poet"),
        "other": ("other", None),
    }
    assert [served.name for served in description.base_models()] == ["m", "other"]


async def test_settings_override_what_a_worker_reports() -> None:
    description = await describe(
        VLLM,
        model="mine",
        block_size=64,
        streams=[{"endpoint": "tcp://10.0.0.1:1"}, {"dp_rank": 3, "endpoint": "tcp://10.0.0.1:2", "topic": "t"}],
    )
    assert description == WorkerDescription(
        engine=Engine.VLLM,
        models={"mine": ServedModel("mine", "mine", None, "/models/m")},
        streams=(EventSource(0, "tcp://10.0.0.1:1"), EventSource(3, "tcp://10.0.0.1:2", None, "t")),
        block_size=64,
        ranks=(0, 3),
    )


async def test_stream_key_is_loaded_and_a_missing_file_is_an_error_of_its_worker(tmp_path: Path) -> None:
    path, _ = create_key_pair(tmp_path, "worker")
    streams = [{"endpoint": "tcp://10.0.0.1:1", "curve_server_key_file": str(path)}]
    description = await describe(VLLM, streams=streams)
    assert description.streams == (EventSource(0, "tcp://10.0.0.1:1", None, "", load_public_key(path, "key")),)
    settings = WorkerSettings.model_validate({"url": "http://10.0.0.1:1", "streams": streams})
    path.unlink()
    async with server({"/v1/models": MODELS}) as url, aiohttp.ClientSession() as session:
        with pytest.raises(DiscoveryError, match="curve_server_key_file"):
            await describe_worker(session, settings.model_copy(update={"url": url}))


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/v1/models": 500},
        {"/v1/models": "<html>"},
        {"/v1/models": b"\xff"},
        {"/v1/models": []},
        {"/v1/models": {"data": [{"name": "m"}]}},
        {"/v1/models": {"data": [{"id": 1}]}},
        VLLM | {"/kv_event_sources": "soon"},
        SGLANG | {"/server_info": []},
    ],
)
async def test_invalid_answer_is_an_error(answers: dict[str, Any]) -> None:
    with pytest.raises(DiscoveryError, match=r"http://127\.0\.0\.1:"):
        await describe(answers)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"/health": "ok"}, "/v1/models returns 404 Not Found; is this the URL of an engine?"),
        ({"/v1/models": "<html>"}, "its answer is not the JSON of an engine; is this the URL of an engine?"),
        ({"/v1/models": {"data": []}, "/health": b'{"workers":0,"workers_up":0}'}, "a kvrouter answers there"),
        (
            {"/v1/models": {"data": [{"id": "m", "owned_by": "kvrouter"}]}, "/health": b'{"workers_up":1}'},
            "a kvrouter answers there, not an engine: name the workers behind it",
        ),
    ],
)
async def test_url_of_another_service_is_named(answers: dict[str, Any], reason: str) -> None:
    with pytest.raises(DiscoveryError) as refused:
        await describe(answers)
    assert str(refused.value).partition(": ")[2].startswith(reason)


async def test_engine_whose_health_is_bad_is_no_router() -> None:
    assert (await describe({"/v1/models": {"data": []}, "/health": 503})).models == {}


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        (VLLM | {"/kv_event_sources": {"rank": {"endpoint": "tcp://127.0.0.1:1"}}}, "rank"),
        (VLLM | {"/kv_event_sources": {"0": {"topic": ""}}}, "endpoint"),
        (SGLANG | {"/server_info": {"kv_events": ZMQ | {"endpoint_port_base": 65535}}}, "65536"),
        (SGLANG | {"/server_info": {"kv_events": ZMQ | {"endpoint_port_base": "tcp"}}}, "endpoint_port_base"),
        (VLLM | {"/v1/models": {"data": [*MODELS["data"], {"id": 1}]}}, "id"),
    ],
)
async def test_invalid_field_is_ignored_and_reported(answers: dict[str, Any], named: str) -> None:
    description = await describe(answers)
    assert list(description.models) == ["m"]
    assert named in description.refused[0]


@pytest.mark.parametrize(
    "answers", [VLLM | {"/kv_event_sources": 500}, VLLM | {"/metrics": 503}, SGLANG | {"/server_info": 500}]
)
async def test_server_error_is_an_error_and_not_a_missing_path(answers: dict[str, Any]) -> None:
    with pytest.raises(DiscoveryError, match=r"50[03]"):
        await describe(answers)


async def test_unreachable_worker_is_an_error() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(DiscoveryError, match=r"127\.0\.0\.1:9"):
            await describe_worker(session, WorkerSettings(url="http://127.0.0.1:9"))
