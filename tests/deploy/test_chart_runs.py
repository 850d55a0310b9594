"""The commands and settings of the chart's demo profile, run as local processes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import yaml

pytest.importorskip("helm_python", reason="make test-helm installs it", exc_type=ImportError)

from chart import Object, container, named, profile, render

from benchmarks.ports import free_ports
from kvrouter.processes import KvrouterProcess

pytestmark = pytest.mark.helm

RANKS = 2


def ask(url: str, body: Object | None = None) -> Object:
    request = Request(url, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"})
    with contextlib.closing(urlopen(request, timeout=60)) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a router in front of one worker, both as the chart starts them, but for places of this machine."""
    http, own, *streams = free_ports(2 + 2 * RANKS)
    values = profile("demo") | {
        "discovery": {"mode": "none", "port": http},
        "events": {"port": streams[0], "replayPort": streams[RANKS]},
        "config": {"server": {"port": own, "drain_seconds": 0}, "workers": [{"url": f"http://127.0.0.1:{http}"}]},
        "workers": {"demo-ranks": {"dataParallelSize": RANKS}},
    }
    objects = render(values)
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(named(objects, "ConfigMap", "rel-kvrouter-config")["data"]["config.yaml"])
    assert yaml.safe_load(file.read_text())["server"]["port"] == own
    serve = [
        str(file) if word == "/etc/kvrouter/config/config.yaml" else word
        for word in container(objects, "rel-kvrouter-router")["args"]
    ]
    with KvrouterProcess(container(objects, "rel-kvrouter-worker-demo-ranks")["args"]) as worker:
        worker.wait_until_listening()
        with KvrouterProcess(serve) as running:
            running.wait_until_listening()
            yield f"http://127.0.0.1:{own}"


def until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            ask(f"{url}/ready")
            return
        except URLError:
            assert time.monotonic() < deadline, "not ready"
            time.sleep(0.1)


def test_router_discovers_every_rank_and_its_stream(router: str) -> None:
    until_ready(router)
    [worker] = ask(f"{router}/workers")["workers"]
    assert [rank["dp_rank"] for rank in worker["ranks"]] == list(range(RANKS))
    assert {rank["state"] for rank in worker["ranks"]} == {"live"}


def test_router_answers_and_matches_cached_prompts(router: str) -> None:
    until_ready(router)
    question = {"model": "simulated", "prompt": "word " * 200, "max_tokens": 4}
    assert ask(f"{router}/v1/completions", question)["usage"]["completion_tokens"] == 4
    deadline = time.monotonic() + 60
    while not any(found["matched_tokens"] for found in ask(f"{router}/match", question)["matches"]):
        assert time.monotonic() < deadline, "no event told of it"
        time.sleep(0.05)
