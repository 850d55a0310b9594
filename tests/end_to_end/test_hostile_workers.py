"""Workers with invalid or malicious descriptions: each affects only itself, and is a finding."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_under_test import RouterUnderTest, router, until
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_worker

PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
STREAM = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:9", "topic": "kv"}
EVENTS = {"publisher": "zmq", "endpoint_host": "127.0.0.1", "endpoint_port_base": 9, "dp_size": 1, "block_size": 16}


def worker_describing(answers: dict[str, Any]) -> Callable[[Exchange], Any]:
    """Return a script with the given answers by path, as JSON or bytes, which answers requests like a worker."""

    async def script(exchange: Exchange) -> None:
        known = {"/v1/models": {"data": [{"id": MODEL}]}} | answers
        if exchange.method == "POST":
            await exchange.answer(b'{"choices": []}')
        elif exchange.target in known:
            said = known[exchange.target]
            await exchange.answer(said if isinstance(said, bytes) else json.dumps(said).encode())
        else:
            await exchange.answer(status="404 Not Found")

    return script


@asynccontextmanager
async def with_healthy_worker(answers: dict[str, Any], **sections: Any) -> AsyncIterator[tuple[RouterUnderTest, str]]:
    """Run a router with a healthy worker and one that gives these answers, and yield the URL of the latter."""
    async with scripted_worker(worker_describing(answers)) as bad, scripted_worker() as good:
        bad.answers_discovery = False
        async with router(good.url, bad.url, **sections) as routed:
            yield routed, bad.url


async def check_serves(routed: RouterUnderTest, requests: int = 6) -> None:
    """Assert that requests of every kind are answered within a minute."""
    began = time.monotonic()
    for number in range(requests):
        assert (await routed.call(PATH, {**BODY, "prompt": list(range(number, number + 64))})).status == 200
    match = {"model": MODEL, "token_ids": list(range(64))}
    assert (await routed.call("/match", match)).status == 200
    for path in ("/workers", "/health", "/metrics", "/v1/models"):
        assert (await routed.call(path)).status == 200
    assert time.monotonic() - began < 60


async def finding(routed: RouterUnderTest, url: str) -> dict[str, Any]:
    """Return the finding about a worker's description."""
    found = await routed.findings()
    return next(
        each for each in found if each["worker"] == url and each["finding"] in ("worker_description", "worker_down")
    )


def sglang(**events: Any) -> dict[str, Any]:
    return {"/server_info": {"kv_events": EVENTS | events}}


def vllm_metrics(**labels: Any) -> dict[str, Any]:
    said = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return {"/kv_event_sources": {}, "/metrics": f"vllm:cache_config_info{{{said}}} 1.0\n".encode()}


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        (sglang(dp_size=10**12), "dp_size"),
        (sglang(dp_size=20_000), "dp_size"),
        (sglang(dp_size=-1), "dp_size"),
        (sglang(block_size=10**30), "block_size"),
        (sglang(block_size=-16), "block_size"),
        (sglang(endpoint_host="8.8.8.8"), "8.8.8.8"),
        (sglang(endpoint_host="127.0.0.1:0;127.0.0.2"), "rank 0"),
        (sglang(endpoint_port_base=10**30), "endpoint_port_base"),
        ({"/server_info": {"kv_events_config": '{"publisher": "zmq", "endpoint": "ipc:///tmp/kv"}'}}, "ipc"),
        ({"/server_info": {"kv_events_config": "[" * 8000}}, "kv_events_config"),
        ({"/server_info": {"page_size": 0}}, "page_size"),
        (vllm_metrics(block_size=0), "block_size"),
        (vllm_metrics(block_size=10**29), "block_size"),
        (vllm_metrics(block_size=16, num_gpu_blocks=10**29), "num_gpu_blocks"),
        ({"/kv_event_sources": {str(rank): STREAM for rank in range(20_000)}}, "kv_event_sources"),
        ({"/kv_event_sources": {str(10**30): STREAM}}, "rank"),
        ({"/kv_event_sources": {"0": STREAM | {"topic": "k" * 100_000}}}, "kv_event_sources[0]"),
        ({"/kv_event_sources": {"0": STREAM | {"topic": "k" * 1000}}}, "topic"),
        ({"/kv_event_sources": {"0": STREAM | {"endpoint": "tcp://127.0.0.1:0;127.0.0.2:9"}}}, "endpoint"),
        ({"/kv_event_sources": {"0": STREAM | {"endpoint": "ipc:///tmp/kv"}}}, "ipc"),
        ({"/kv_event_sources": {"0": STREAM | {"endpoint": "tcp://8.8.8.8:9"}}}, "8.8.8.8"),
        ({"/kv_event_sources": {"0": STREAM | {"replay_endpoint": "tcp://169.254.169.254:80"}}}, "169.254.169.254"),
        ({"/kv_event_sources": b"[" * 100_000}, None),
        ({"/server_info": b'{"kv_events":' * 50_000}, None),
        ({"/server_info": {"disaggregation_mode": "null", "disaggregation_bootstrap_port": 10**20}}, "bootstrap_port"),
        ({"/v1/models": {"data": [{"id": f"m{number}"} for number in range(50_000)]}}, "more than 1000"),
        ({"/v1/models": {"data": [{"id": "n" * 100_000}, {"id": MODEL}]}}, "/v1/models"),
        ({"/v1/models": {"data": [{"id": "a\nb\x00"}, {"id": MODEL}]}}, "printable"),
        ({"/v1/models": {"data": [{"id": MODEL, "root": "/models/\x00"}]}}, "root"),
        ({"/v1/models": {"data": [{"id": MODEL, "max_model_len": 10**30}]}}, "max_model_len"),
        ({"/v1/models": b'{"data": [' + b" " * 5_000_000 + b"]}"}, "more than 4194304 bytes"),
        ({"/v1/models": b"[" * 100_000}, None),
        ({"/v1/models": b'{"data": [{"id": "\xff"}]}'}, None),
    ],
)
async def test_invalid_description_affects_only_its_worker(answers: dict[str, Any], named: str | None) -> None:
    async with with_healthy_worker(answers) as (routed, bad):
        await check_serves(routed)
        found = await finding(routed, bad)
        assert named is None or named in found["detail"]


@pytest.mark.parametrize(
    "metrics",
    [
        b'vllm:num_requests_running{engine="%b"} 1\n' % (b"9" * 5000),
        b'vllm:num_requests_running{engine="0"} 1e300\n' * 100,
        b'vllm:kv_cache_usage_perc{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} -1e300\n',
        b"vllm:num_requests_running 1\n" * 200_000,
        b'vllm:prompt_tokens_total{engine="0"} 1e308\n' * 1000,
    ],
    ids=["rank", "huge", "nan", "long", "tokens"],
)
async def test_invalid_metrics_affect_only_their_worker(metrics: bytes) -> None:
    async with with_healthy_worker({"/metrics": metrics}, fleet={"metrics_interval": 0.05}) as (routed, bad):
        await asyncio.sleep(0.3)  # a few scrapes
        await check_serves(routed)
        (asked,) = (worker for worker in await routed.workers() if worker["worker"] == bad)
        assert asked["up"]


async def test_requests_to_workers_follow_no_redirects() -> None:
    """A prompt to tokenize and a reset are sent to the worker alone."""

    async def redirect(exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            await exchange.answer(json.dumps({"data": [{"id": MODEL}]}).encode())
        elif exchange.method == "POST" and exchange.target == PATH:
            await exchange.answer(b'{"choices": []}')
        elif exchange.target in ("/kv_event_sources", "/server_info"):
            await exchange.answer(status="404 Not Found")
        else:
            headers = b"location: " + elsewhere.url.encode() + b"/stolen\r\n"
            await exchange.answer(b"", "307 Temporary Redirect", headers)

    async with scripted_worker() as elsewhere, scripted_worker(redirect) as worker:
        worker.answers_discovery = elsewhere.answers_discovery = False
        async with router(worker.url) as routed:
            await routed.call(PATH, {**BODY, "prompt": "a secret that nobody else should read"})
            reset = await routed.call("/reset_prefix_cache", b"", "POST")
            assert (reset.status, reset.json()["workers"][0]["status"]) == (502, 0)
        asked = {exchange.target for exchange in worker.exchanges}
        assert {"/reset_prefix_cache", "/metrics"} <= asked
        assert any("render" in target or "tokenize" in target for target in asked), asked
        assert elsewhere.exchanges == []


async def test_bodiless_response_has_no_content_length(caplog: pytest.LogCaptureFixture) -> None:
    """A client would wait for a body that a 204 or 304 response does not have."""
    status = ""

    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 %b\r\ncontent-length: 5\r\nX_Request_Id: evil\r\n\r\n" % status.encode())

    async with scripted_worker(script) as worker, router(worker.url) as routed:
        for status in ("204 No Content", "304 Not Modified"):
            for method, path in (("POST", PATH), ("GET", "/v1/files/a")):
                reply = await routed.call(path, BODY if method == "POST" else None, method=method)
                assert reply.status == int(status[:3])
                assert not {"content-length", "x_request_id"} & {name.lower() for name in reply.headers}
    assert not [record for record in caplog.records if record.name == "uvicorn.error"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1\\@127.0.0.2:80/",
        "http://127.0.0.1:80/../x",
        "http://127.0.0.1:80/%2e%2e/x",
        "http://127.0.0.1:80//x",
        "http://2130706433:80",
        "http://127.1:80",
        "http://0x7f.0.0.1:80",
        "http://127.0.0.1:80/x?y=z",
        "http://127.0.0.1:80/#x",
        "http://127.0.0.1:080000",
        "http://127.0.0.1:0",
        "http://[fe80::1%25lo]:80",
        "http://127.0.0.1 :80",
        " http://127.0.0.1:80",
        "http://127.0.0.1:80/\t",
        "http:127.0.0.1:80",
        "http:///127.0.0.1:80",
        "HTTP://127.0.0.1:80",
        "http://ⓛocalhost:80",
    ],
)
async def test_ambiguous_url_is_refused(empty: RouterUnderTest, url: str) -> None:
    reply = await empty.call("/workers", {"url": url})
    assert (reply.status, reply.error["param"]) == (400, "url")
    assert await empty.workers() == []


ELSEWHERE = [
    "tcp://127.0.0.1:0;127.0.0.2:{port}",
    "tcp://127.0.0.1:9;8.8.8.8:{port}",
    "tcp://lo;127.0.0.1:{port}",
    "tcp://127.1:{port}",
    "tcp://2130706433:{port}",
    "tcp://*:{port}",
    "tcp://0.0.0.0:{port}",
    "tcp://127.0.0.1:{port}/x",
    "ws://127.0.0.1:{port}",
    "udp://127.0.0.1:{port}",
    "tcp://127.0.0.1:{port}\n",
]


@pytest.mark.parametrize("endpoint", [*ELSEWHERE, "ipc:///tmp/kv", "inproc://wake", "tcp://8.8.8.8:{port}"])
async def test_endpoint_with_foreign_address_is_refused(empty: RouterUnderTest, endpoint: str) -> None:
    """`/register` and `POST /workers` refuse the endpoint, and connect to nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.PUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        at = endpoint.format(port=socket.bind_to_random_port("tcp://127.0.0.1"))
        body = {"endpoint": "tcp://127.0.0.1:9", "modelname": MODEL, "instance_id": "w"}
        for field in ("endpoint", "replay_endpoint"):
            reply = await empty.call("/register", body | {field: at})
            assert reply.status == 400
            assert reply.error["param"] == field
        reply = await empty.call("/workers", {"url": "http://127.0.0.1:9", "streams": [{"endpoint": at}]})
        assert reply.status in (400, 403)
        assert reply.error["param"] == "streams"
        assert not monitor.poll(100)
    finally:
        context.destroy(0)
    assert await empty.workers() == []


@pytest.fixture(scope="module")
async def empty() -> Any:
    async with router() as routed:
        yield routed


async def test_resolved_address_is_checked_at_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolved to an allowed address may later resolve to a forbidden one."""
    resolved_address = "127.0.0.1"
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def getaddrinfo(host: Any, port: Any, **options: Any) -> Any:
        return await resolve(resolved_address if host == "worker.test" else host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)

    async def close(exchange: Exchange) -> None:
        await exchange.answer(headers=b"connection: close\r\n")
        await exchange.hang_up()

    networks = {"probe_interval": 0.2, "allowed_networks": ["127.0.0.1/32"]}
    async with scripted_worker(close) as worker, router(fleet=networks) as routed:
        url = worker.url.replace("127.0.0.1", "worker.test")
        assert (await routed.call("/workers", {"url": url})).status == 201

        await until(routed.workers, lambda workers: any(each["up"] for each in workers))
        assert (await routed.call(PATH, BODY)).status == 200
        resolved_address = "127.0.0.2"  # where nothing that listens on 127.0.0.1 answers, and nothing may be asked
        await worker.stop()
        await worker.start()
        reply = await routed.call(PATH, BODY)
        assert reply.status >= 500
        assert not any(exchange.target == PATH for exchange in worker.exchanges[1:])

        await until(
            routed.workers, lambda workers: any("allowed_networks" in (each.get("problem") or "") for each in workers)
        )


# Possible answers of a worker: any JSON, and nearly valid descriptions.
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**12, 2**63, 2**64, 10**400, -1, 0]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["tcp://127.0.0.1:1", "tcp://*:1", "tcp://a:0;b:1", "null", MODEL, "0", "-1", "\x00"]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)
fields = st.fixed_dictionaries({}, optional=dict.fromkeys((*STREAM, *EVENTS), anything))
cards = st.fixed_dictionaries({}, optional=dict.fromkeys(("id", "root", "parent", "max_model_len"), anything))
descriptions = st.fixed_dictionaries(
    {},
    optional={
        "/v1/models": st.one_of(st.fixed_dictionaries({"data": st.lists(cards, max_size=4)}), anything),
        "/kv_event_sources": st.one_of(st.dictionaries(st.sampled_from(["0", "1", "x"]), fields), anything),
        "/server_info": st.one_of(st.fixed_dictionaries({"kv_events": fields, "page_size": anything}), anything),
        "/metrics": st.one_of(
            st.binary(max_size=200),
            st.builds(lambda size: f'vllm:cache_config_info{{block_size="{size}"}} 1\n'.encode(), scalars),
            st.builds(lambda count: f"vllm:num_requests_running {count}\n".encode(), scalars),
        ),
    },
)


async def test_random_description_affects_only_its_worker() -> None:
    said: dict[str, Any] = {}

    async def script(exchange: Exchange) -> None:
        await worker_describing(said)(exchange)

    async with scripted_worker(script) as bad, scripted_worker() as good:
        bad.answers_discovery = False
        quick = {"probe_interval": 0.01, "metrics_interval": 0.01}
        async with router(good.url, bad.url, fleet=quick) as routed:
            loop = asyncio.get_running_loop()

            async def apply_description(description: dict[str, Any]) -> None:
                said.clear()
                said.update(description)
                asked = len(bad.exchanges)
                await until(lambda: _received(bad, asked + 4))
                await check_serves(routed, requests=1)

            @given(descriptions)
            @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
            def run(description: dict[str, Any]) -> None:
                asyncio.run_coroutine_threadsafe(apply_description(description), loop).result(60)

            await asyncio.to_thread(run)


async def _received(worker: ScriptedWorker, exchanges: int) -> bool:
    return len(worker.exchanges) >= exchanges
