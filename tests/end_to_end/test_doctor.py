"""The doctor on fleets with one fault each: it names the fault, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq
from aiohttp import web
from broken_fleet import Frames, event_relay, other_tokenizer, request_proxy
from router_under_test import router, until
from running_app import running_app
from typer.testing import CliRunner

from benchmarks.ports import free_port
from kvevents import BlockRemoved, BlockStored, EventSource, WireForm, decode_batch, encode_batch
from kvrouter.cli import app
from kvrouter.tools.doctor import NoWorkersError
from kvrouter.tools.doctor import stream as doctor_stream
from kvrouter.tools.doctor.pools import SharedPrompt, used_pool
from kvrouter.tools.doctor.run import examine, run_doctor, spans
from router.apis.endpoints import CHAT, COMPLETIONS, read_request
from router.apis.requests import ChatPrompt, TextPrompts
from router.fleet.kubernetes import ClusterAccess, KubernetesError
from router.observability.advice import ADVICE
from router.settings import Settings
from router.tokens.local_tokenizer import LocalTokenizer
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from simulator.worker.settings import BUNDLED_MODEL
from worker import PublisherConfig

PATIENCE = 1.5


class Sound:
    """A healthy worker and the endpoints of its events."""

    def __init__(self, url: str, source: dict[str, Any]) -> None:
        self.url = url
        self.endpoint, self.replay_endpoint = source["endpoint"], source["replay_endpoint"]

    def streams(self, **changed: Any) -> list[dict[str, Any]]:
        stream = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint, **changed}
        return [{name: value for name, value in stream.items() if value is not None}]


@pytest.fixture(scope="module")
async def sound() -> AsyncIterator[Sound]:
    settings = SimulatedWorkerSettings(adapters=("tuned",), prefill_s_per_token=1e-6, base_step_s=0.005)
    async with running(settings) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/kv_event_sources") as response:
            sources = await response.json()
        yield Sound(url, sources["0"])


async def found(
    *workers: dict[str, Any], api_key: str | None = None, patience: float = PATIENCE, **sections: Any
) -> list[list[str]]:
    """Return the causes that the doctor finds per worker. `patience` is the wait for events in seconds."""
    examined = await examine(Settings(workers=list(workers), **sections), api_key, patience)
    for each in examined:
        assert {finding.cause for finding in each.findings} <= set(ADVICE)
        print(each.name, *each.passed, *each.findings, sep="\n  ")  # shown when a test fails
    return [[finding.cause for finding in each.findings] for each in examined]


async def test_healthy_fleet_has_no_findings(sound: Sound) -> None:
    async with running(SimulatedWorkerSettings(dp_size=2, prefill_s_per_token=1e-6)) as two_ranks:
        assert await found({"url": sound.url}, {"url": two_ranks}, patience=60.0) == [[], []]


async def test_each_fault_is_found_as_its_cause(sound: Sound) -> None:
    broken: dict[str, list[dict[str, Any]]] = {}
    async with AsyncExitStack() as stack:

        async def with_streams(cause: str, **changed: Any) -> None:
            """A worker whose stream the settings describe."""
            url = await stack.enter_async_context(request_proxy(sound.url))
            broken.setdefault(cause, []).append({"url": url, "streams": sound.streams(**changed)})

        async def behind_proxy(cause: str, **options: Any) -> None:
            url = await stack.enter_async_context(request_proxy(sound.url, **options))
            broken.setdefault(cause, []).append({"url": url})

        async def relayed(cause: str, change: Callable[[Frames], Frames]) -> None:
            endpoint = await stack.enter_async_context(event_relay(sound.endpoint, change))
            await with_streams(cause, endpoint=endpoint)

        async def started(cause: str, **options: Any) -> None:
            url = await stack.enter_async_context(running(SimulatedWorkerSettings(**options)))
            broken.setdefault(cause, []).append({"url": url})

        broken["worker_down"] = [{"url": f"http://127.0.0.1:{free_port()}"}]
        await behind_proxy("worker_key", key="secret")
        await behind_proxy("requests_refused", change=with_fields(max_tokens="many"))
        await behind_proxy("salt", change=with_fields(cache_salt="pinch"))
        await behind_proxy("adapter", change=with_fields(model="tuned"))
        await behind_proxy("stream_buffered", buffered=True)
        await started("events_off", kv_events=PublisherConfig(publisher="null"))
        await started("prefix_caching_off", prefix_caching=False)
        url = await stack.enter_async_context(request_proxy(sound.url))
        broken["block_size"] = [{"url": url, "block_size": 32}]
        silent = stack.enter_context(zmq.Context()).socket(zmq.PUB)
        stack.callback(silent.close, 0)
        closed, unused = (
            f"tcp://127.0.0.1:{port}" for port in (free_port(), silent.bind_to_random_port("tcp://127.0.0.1"))
        )
        await with_streams("endpoint_unreachable", endpoint=closed)
        await with_streams("no_publisher", endpoint=sound.replay_endpoint)
        await with_streams("no_publisher", endpoint=sound.url.replace("http", "tcp"))
        await with_streams("stream_silent", endpoint=unused)
        await with_streams("topic_mismatch", topic="other")
        await with_streams("replay_missing", replay_endpoint=None)
        await with_streams("replay_silent", replay_endpoint=closed)
        await with_streams("replay_silent", replay_endpoint=sound.endpoint)
        await relayed("events_without_tokens", without_tokens)
        await relayed("events_unreadable", lambda frames: [*frames[:2], b"\xc1"])
        await relayed("clock", an_hour_early)
        await relayed("sequence", numbered_anew(lambda number: 2 * number))
        await relayed("sequence", numbered_anew(lambda number: 10_000 - number))

        workers = [(cause, worker) for cause, each in broken.items() for worker in each]
        causes = await found(*(worker for _, worker in workers))
    for (cause, _), reported in zip(workers, causes, strict=True):
        # Where numbers go back, what one conversation brought can be taken for another's.
        assert reported == [cause] or (cause == "sequence" and cause in reported)


@pytest.mark.parametrize("shares", [{"pulls": {"protocol": "p2p"}}, {"pools": [{"media": ["SHARED_STORAGE"]}]}, {}])
async def test_workers_that_share_blocks_with_different_hash_seeds_are_found(
    sound: Sound, shares: dict[str, Any]
) -> None:
    for pool in shares.get("pools", ()):
        pool |= {"name": "files", "type": "events"}
    async with (
        request_proxy(sound.url) as alike,
        request_proxy(sound.url) as other,
        event_relay(sound.endpoint, with_other_hashes) as endpoint,
    ):
        changed = sound.streams(endpoint=endpoint, replay_endpoint=None)
        workers: list[dict[str, Any]] = [{"url": sound.url}, {"url": alike}, {"url": other, "streams": changed}]
        causes = await found(*workers, **shares)
    assert causes[:3] == [[], [], ["replay_missing", *(["hash_seeds"] if shares else [])]]


def test_blame_for_other_hash_seeds_considers_all_blocks() -> None:
    class Stream:
        def __init__(self, tokens: int, engine_hash: int) -> None:
            self.received = self
            self._stored = [BlockStored([engine_hash], None, [tokens], 1)]

        def stored(self) -> list[BlockStored]:
            return self._stored

    # In the second block, the worker that differs is the first of two.
    seen = [(1, "sound", 10), (1, "other", 11), (2, "other", 21), (2, "alike", 20)]
    for order in itertools.permutations(seen):
        shared = SharedPrompt(pulls=True)
        for tokens, worker, engine_hash in order:
            shared.record(worker, "m", "", [Stream(tokens, engine_hash)])  # type: ignore[list-item]
        assert [(each.cause, each.worker) for each in shared.findings()] == [("hash_seeds", "other")]


@pytest.mark.parametrize(
    ("answers", "media", "settings"),
    [
        ({"/metrics": "vllm:num_requests_running 0"}, ["GPU", "cpu"], None),
        ({"/metrics": 'vllm:mooncake_store_operation_bytes_total{operation="put"} 1'}, [], "type: mooncake"),
        ({}, ["GPU", "storage", "SHARED_STORAGE"], "type: events, media: [SHARED_STORAGE]"),
        ({"/get_hicache_l3_cache_layout": '{"backend": "mooncake"}'}, [], "type: mooncake"),
        ({"/get_hicache_l3_cache_layout": '{"enabled": false, "backend": null}'}, [], None),
    ],
)
async def test_settings_of_a_pool_are_proposed_by_what_a_worker_shows(
    answers: dict[str, str], media: list[str], settings: str | None
) -> None:
    class Answering:
        async def get(self, path: str) -> str | None:
            return answers.get(path)

    stored = [BlockStored([1], None, [], 0, medium=medium) for medium in media]
    assert await used_pool(Answering(), stored) == settings


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ({}, "pool_unreachable"),
        ({"/kv_events/status": '{"enabled": false}', "/metrics": ""}, "pool_events_off"),
        ({"/metrics": "master_key_count 1", "/get_all_keys": "other@00"}, "pool_keys"),
        ({"/metrics": "master_key_count 1", "/get_all_keys": "tiny@00"}, None),
    ],
)
async def test_pool_that_never_hits_is_found(answers: dict[str, str], cause: str | None) -> None:
    async def answer(request: web.Request) -> web.Response:
        if not answers:
            return web.Response(status=404, text="not here")
        return web.Response(text=answers.get(request.path, '{"enabled": true}'))

    master = web.Application()
    master.router.add_get("/{path:.*}", answer)
    with socket.create_server(("127.0.0.1", 0)) as publisher:
        events = f"tcp://127.0.0.1:{publisher.getsockname()[1]}"
        async with running_app(master) as url:
            pool = {"name": "p", "type": "mooncake", "master": url, "events": events, "models": {"m": "tiny@"}}
            assert await found(pools=[pool]) == [[cause] if cause else []]


async def test_endpoint_without_publisher_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ may detect a refused connection before the request, and then has no peer to send to."""
    monkeypatch.setattr(doctor_stream, "_connect", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        stream = doctor_stream.WatchedStream(EventSource(0, endpoint, endpoint), None)
        with pytest.raises(doctor_stream.NoPublisherError, match=endpoint):
            await asyncio.wait_for(stream.replayed(), 60)
        await stream.close()


async def test_api_key_is_accepted_by_worker(sound: Sound) -> None:
    async with request_proxy(sound.url, key="secret") as url:
        assert await found({"url": url}, api_key="secret", patience=60.0) == [[]]


async def test_other_tokenizer_is_a_finding(sound: Sound, tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path)
    models = {"simulated": {"tokenizer": str(folder)}}
    assert await found({"url": sound.url}, models=models) == [["tokens_differ"]]


async def test_chats_of_an_sglang_are_compared_as_sglang_renders_them() -> None:
    """The engine refuses requests, because it has no other API."""
    engine = LocalTokenizer.load(str(BUNDLED_MODEL), sglang=True)

    async def described(request: web.Request) -> web.Response:
        root = str(BUNDLED_MODEL)
        found = {"data": [{"id": "m", "root": root}]} if request.path == "/v1/models" else {"tokenizer_path": root}
        return web.json_response(found)

    async def tokenized(request: web.Request) -> web.Response:
        body = await request.read()
        prompt = read_request("POST", COMPLETIONS if b'"prompt":' in body else CHAT, [], body).prompt
        assert isinstance(prompt, (ChatPrompt, TextPrompts))
        return web.json_response({"tokens": list(engine.tokenize(prompt)[0])})

    app = web.Application()
    app.router.add_get("/v1/models", described)
    app.router.add_get("/server_info", described)
    app.router.add_post("/tokenize", tokenized)
    async with running_app(app) as url:
        assert await found({"url": url}) == [["requests_refused"]]


async def test_other_chat_template_is_a_finding(sound: Sound, tmp_path: Path) -> None:
    models = {"simulated": {"tokenizer": with_chats_beginning("You are new. ", tmp_path)}}
    assert await found({"url": sound.url}, models=models) == [["prompts_asked"]]


async def test_cached_common_beginning_is_no_finding(tmp_path: Path) -> None:
    tokenizer = with_chats_beginning("You are new here. " * 8, tmp_path)
    models = {"simulated": {"tokenizer": tokenizer}}
    async with running(SimulatedWorkerSettings(tokenizer=tokenizer, prefill_s_per_token=1e-6)) as url:
        for _ in range(2):
            assert await found({"url": url}, models=models, patience=60.0) == [[]]


async def test_command_prints_json_and_sets_exit_status(sound: Sound) -> None:
    for url, status, causes in (
        (sound.url, 0, []),
        (f"http://127.0.0.1:{free_port()}", 1, ["worker_down"]),
    ):
        ended = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", "--json", "--worker", url])
        assert ended.exit_code == status
        answer = json.loads(ended.stdout)
        assert answer["workers"] == [url]
        assert [finding["cause"] for finding in answer["findings"]] == causes
        assert all(finding["evidence"] and finding["fix"] for finding in answer["findings"])


def with_chats_beginning(beginning: str, folder: Path) -> str:
    """The bundled tokenizer with another chat template; its path."""
    model = Path(shutil.copytree(BUNDLED_MODEL, folder / "model"))
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = beginning + config["chat_template"]
    file.write_text(json.dumps(config))
    return str(model)


def with_fields(**fields: str) -> Any:
    def change(path: str, body: bytes) -> bytes:
        return json.dumps(json.loads(body) | fields).encode() if "completions" in path else body

    return change


def numbered_anew(number: Any) -> Any:
    return lambda frames: [frames[0], number(int.from_bytes(frames[1], "big")).to_bytes(8, "big"), frames[2]]


def without_tokens(frames: Frames) -> Frames:
    batch = decode_batch(frames[2])
    for event in batch.events:
        if isinstance(event, BlockStored):
            event.token_ids = []
    return [*frames[:2], encode_batch(batch, WireForm.VLLM_MAPS)]


def with_other_hashes(frames: Frames) -> Frames:
    batch = decode_batch(frames[2])
    for event in batch.events:
        if isinstance(event, BlockStored | BlockRemoved):
            event.block_hashes = [int(each) ^ 1 for each in event.block_hashes]
            if isinstance(event, BlockStored) and event.parent_block_hash is not None:
                event.parent_block_hash = int(event.parent_block_hash) ^ 1
    return [*frames[:2], encode_batch(batch, WireForm.VLLM_MAPS)]


def an_hour_early(frames: Frames) -> Frames:
    batch = decode_batch(frames[2])
    batch.ts -= 3600
    return [*frames[:2], encode_batch(batch, WireForm.VLLM_MAPS)]


PODS = "/api/v1/namespaces/inference/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"
TROUBLESHOOTING = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
QUICK = SimulatedWorkerSettings(prefill_s_per_token=1e-6, base_step_s=0.005)


async def doctor(*arguments: str) -> tuple[int, str, str]:
    """Run the command, and return its exit status and its output."""
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", *arguments], terminal_width=200)
    return ended.exit_code, ended.stdout, ended.stderr


async def test_healthy_fleet_exits_with_zero() -> None:
    async with running(QUICK) as worker, router(worker) as routed:
        await until(lambda: routed.call("/ready"), lambda reply: reply.status == 200)
        status, printed, _ = await doctor("--url", routed.url)
    assert status == 0, printed
    assert re.search(r"ok  kvrouter \S+, \w+ index, policy kv_aware", printed)
    assert "ok  ready; 1 of 1 workers answer" in printed
    assert "prompts for simulated become tokens: local" in printed
    assert re.search(r"rank 0: events live from tcp://\S+", printed)
    assert printed.splitlines()[-1] == "no findings"


async def test_router_findings_are_printed_with_fixes() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with running(QUICK) as worker, router(worker, gone) as routed:
        status, printed, _ = await doctor("--url", routed.url, "--json")
    assert status == 1
    report = json.loads(printed)
    assert {worker, gone, routed.url} <= set(report["workers"])
    [found] = [each for each in report["findings"] if each["worker"] == gone]
    assert (found["cause"], found["fix"]) == ("worker_down", ADVICE["worker_down"].action)
    assert "refused the connection" in found["evidence"]


async def test_unready_router_is_a_finding() -> None:
    async with router(f"http://127.0.0.1:{free_port()}") as routed:
        status, printed, _ = await doctor("--url", routed.url)
    assert status == 1
    assert "error: not_ready  no worker answers" in printed


async def test_missing_token_is_reported_and_option_accepted() -> None:
    tenants = {"named": {"one": {"keys": ["0" * 64]}}}
    async with running(QUICK) as worker, router(worker, server={"token": "admin"}, tenants=tenants) as routed:
        status, _, complaint = await doctor("--url", routed.url)
        assert status == 2
        assert "needs the admin token for /workers: set --token" in complaint
        status, printed, _ = await doctor("--url", routed.url, "--token", "admin")
        assert worker in printed
        assert status in (0, 1)


async def test_url_without_router_is_reported() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert await doctor("--url", url) == (2, "", f"kvrouter: {url} refused the connection\n")
    async with running(QUICK) as worker:
        status, _, complaint = await doctor("--url", worker)
    assert status == 2
    assert "is this a router's URL?" in complaint or "is not a router" in complaint


async def test_url_excludes_worker_option() -> None:
    status, _, complaint = await doctor("--url", "http://127.0.0.1:1", "--worker", "http://127.0.0.1:2")
    assert status == 2
    assert "omit --config and --worker" in complaint


def test_every_finding_in_the_code_has_advice() -> None:
    named = set()
    for path in (Path(__file__).parents[2] / "router").rglob("*.py"):
        named |= set(re.findall(r'"finding": "([a-z_]+)"', path.read_text()))
    assert named
    assert named <= set(ADVICE)


def test_ranks_are_shown_as_spans() -> None:
    assert (spans([2, 0, 1, 7]), spans([3])) == ("0-2, 7", "3")


# Workers of a cluster


@asynccontextmanager
async def cluster(**objects: list[dict[str, Any]]) -> AsyncIterator[str]:
    """An API server that lists these `pods` and endpoint `slices`."""

    async def listed(request: web.Request) -> web.Response:
        items = objects.get("pods" if request.path == PODS else "slices", [])
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})

    app = web.Application()
    app.router.add_get(PODS, listed)
    app.router.add_get(SLICES, listed)
    async with running_app(app) as url:
        yield url


@pytest.mark.parametrize("by", ["selector", "service"])
async def test_workers_of_cluster_are_examined(
    by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(QUICK) as worker:
        port = int(worker.rpartition(":")[2])
        endpoints = {"addressType": "IPv4", "ports": [{"port": port}], "endpoints": [{"addresses": ["127.0.0.1"]}]}
        slices = [{"metadata": {"name": "s"}, **endpoints}]
        pods = [{"metadata": {"name": "a"}, "status": {"phase": "Running", "podIP": "127.0.0.1"}}]
        async with cluster(pods=pods, slices=slices) as api:
            monkeypatch.setattr(ClusterAccess, "in_cluster", lambda _: ClusterAccess(api, "inference"))
            settings = Settings(kubernetes={by: "app=vllm", "port": port})
            assert await run_doctor(settings, None, 2.0, True)
    named = "a" if by == "selector" else worker  # the pod's name, where there is one
    assert json.loads(capsys.readouterr().out) == {"workers": [named], "findings": []}


async def test_cluster_without_workers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as api:
        monkeypatch.setattr(ClusterAccess, "in_cluster", lambda _: ClusterAccess(api, "inference"))
        with pytest.raises(NoWorkersError, match="namespace inference has no workers for 'app=vllm'"):
            await run_doctor(Settings(kubernetes={"selector": "app=vllm"}), None, 1.0, True)
    monkeypatch.setattr(ClusterAccess, "in_cluster", lambda _: ClusterAccess(api, "inference"))
    with pytest.raises(KubernetesError, match="refused the connection"):
        await run_doctor(Settings(kubernetes={"selector": "app=vllm"}), None, 1.0, True)


async def test_kubernetes_settings_outside_cluster_suggest_url(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("kubernetes: {selector: app=vllm}")
    status, _, complaint = await doctor("--config", str(file))
    assert status == 2
    assert "not in a pod of a cluster" in complaint
    assert "or use --url" in complaint
