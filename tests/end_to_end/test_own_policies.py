"""Policies of one's own before real workers: the examples of docs/own-policies.md, labels, refusals and failures."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from simulated_pairs import simulated_pairs
from simulated_workers import simulated_workers
from typer.testing import CliRunner

from kvrouter.cli import app
from router.auth import hashed_key

PAGE = Path(__file__).parents[2] / "docs" / "own-policies.md"
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "Where may this be?"}], "max_tokens": 2}
COMPLETION = {"model": "simulated", "prompt": "Where may this be? " * 4, "max_tokens": 2}


@pytest.fixture(scope="module")
async def urls() -> AsyncIterator[list[str]]:
    async with simulated_workers(2, base_step_s=0.001) as found:
        yield found


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of modules, with the modules of the page."""
    for name, text in re.findall(r"`(\w+\.py)`[^`]*```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def labelled(urls: list[str], *labels: dict[str, str]) -> list[dict[str, Any]]:
    return [{"url": url, "labels": each} for url, each in zip(urls, labels, strict=True)]


async def answered_by(routed: RouterUnderTest, **options: Any) -> str:
    reply = await routed.call("/v1/chat/completions", CHAT, **options)
    assert reply.status == 200, reply.body
    return reply.worker


def test_the_page_has_three_examples(code: Path) -> None:
    assert sorted(path.name for path in code.iterdir()) == ["canary.py", "hardware.py", "residency.py"]


@pytest.mark.usefixtures("code")
async def test_tenants_stay_in_their_region(urls: list[str]) -> None:
    tenants = {name: {"keys": [hashed_key(name)]} for name in ("acme", "other")}
    async with router(
        workers=labelled(urls, {"region": "us"}, {"region": "eu"}),
        policy={"extra": ["residency:allowed"]},
        tenants={"named": tenants, "isolate": False},
        server={"token": "operator"},
    ) as routed:
        await routed.until_up(2)
        keys = {name: {"authorization": f"Bearer {name}"} for name in tenants}
        assert {await answered_by(routed, headers=keys["acme"]) for _ in range(6)} == {urls[1]}
        operator = {"authorization": "Bearer operator"}
        asked = {"request": CHAT, "tenant": "acme"}
        explained = (await routed.call("/explain", asked, headers=operator)).json()
        assert [each["worker"] for each in explained["candidates"]] == [urls[1]]
        assert explained["candidates"][0]["terms"]["residency:allowed"] == 0
        assert explained["excluded"] == [{"worker": urls[0], "dp_rank": 0, "by": "residency:allowed"}]
        without = (await routed.call("/explain", {"request": CHAT}, headers=operator)).json()
        assert len(without["candidates"]) == 2
        assert without["excluded"] == []
        await routed.call("/workers/drain", {"url": urls[1]}, headers=operator)
        refused = await routed.call("/v1/chat/completions", CHAT, headers=keys["acme"])
        assert (refused.status, refused.error["code"]) == (503, "no_worker_available")
        assert "policy allows no worker" in refused.error["message"]
        assert await answered_by(routed, headers=keys["other"]) == urls[0]


@pytest.mark.usefixtures("code")
async def test_a_dear_worker_needs_a_cached_prefix(urls: list[str]) -> None:
    workers = labelled(urls, {"hardware": "h200"}, {"hardware": "l40s"})
    async with router(workers=workers, policy={"extra": ["hardware:price"]}) as routed:
        await routed.until_up(2)
        assert {await answered_by(routed) for _ in range(5)} == {urls[1]}
        explained = (await routed.call("/explain", {"request": CHAT})).json()
        terms = {each["worker"]: each["terms"]["hardware:price"] for each in explained["candidates"]}
        assert terms == {urls[0]: 6000, urls[1]: 0}
        listed = {each["url"]: each["labels"] for each in await routed.workers()}
        assert listed == {urls[0]: {"hardware": "h200"}, urls[1]: {"hardware": "l40s"}}


@pytest.mark.usefixtures("code")
async def test_some_sessions_use_the_canary(urls: list[str]) -> None:
    workers = labelled(urls, {"track": "canary"}, {"track": "stable"})
    async with router(workers=workers, policy={"extra": ["canary:split"]}) as routed:
        await routed.until_up(2)
        used = {
            str(number): {await answered_by(routed, headers={"x-session-id": f"session {number}"}) for _ in range(2)}
            for number in range(60)
        }
    assert all(len(workers) == 1 for workers in used.values())  # a session stays
    canary = sum(workers == {urls[0]} for workers in used.values())
    assert 1 <= canary <= 10


async def test_a_request_waits_for_an_allowed_worker_at_its_limit(urls: list[str], code: Path) -> None:
    (code / "first.py").write_text(
        "from math import inf\n"
        "def only(candidates, request):\n"
        "    return [0 if each.labels.get('a') else inf for each in candidates]\n"
    )
    sections = {"policy": {"extra": ["first:only"]}, "admission": {"requests": 1}}
    async with router(workers=labelled(urls, {"a": "1"}, {}), **sections) as routed:
        await routed.until_up(2)
        long = CHAT | {"max_tokens": 400}
        first = asyncio.create_task(routed.call("/v1/chat/completions", long))
        await until(routed.requests_in_flight, lambda count: count == 1)
        second = asyncio.create_task(routed.call("/v1/chat/completions", CHAT))
        await routed.until_queued(1)
        assert (await first).worker == (await second).worker == urls[0]


async def test_failing_code_costs_no_request_and_is_found(urls: list[str], code: Path) -> None:
    (code / "fails.py").write_text("def score(candidates, request): raise KeyError('region')")
    async with router(*urls, policy={"name": "fails:score"}) as routed:
        await routed.until_up(2)
        for _ in range(3):
            await answered_by(routed)
        found = [each for each in await routed.findings() if each["finding"] == "policy_failed"]
        assert [each["policy"] for each in found] == ["fails:score"]
        assert "KeyError: 'region'; 3 failures" in found[0]["detail"]
        assert await routed.metric("kvrouter_policy_failures_total", policy="fails:score", reason="error") == 3
        assert (await routed.health())["policy"] == "fails:score"


async def test_slow_code_is_switched_off(urls: list[str], code: Path) -> None:
    (code / "slow.py").write_text(
        "import time\ndef score(candidates, request):\n    time.sleep(0.01)\n    return [0.0] * len(candidates)"
    )
    async with router(*urls, policy={"extra": ["slow:score"]}) as routed:
        await routed.until_up(2)
        for _ in range(7):
            await answered_by(routed)
        assert [each["finding"] for each in await routed.findings()] == ["policy_switched_off"]
        assert await routed.metric("kvrouter_policy_failures_total", policy="slow:score", reason="slow") == 5
        assert await routed.metric("kvrouter_policy_switched_off", policy="slow:score") == 1


async def test_a_policy_sees_headers_without_credentials(urls: list[str], code: Path) -> None:
    (code / "sees.py").write_text(
        "seen = []\ndef score(candidates, request):\n    seen.append(request)\n    return [0.0] * len(candidates)"
    )
    async with router(*urls, policy={"extra": ["sees:score"]}) as routed:
        await routed.until_up(2)
        await answered_by(routed, headers={"X-Region": "eu", "authorization": "Bearer secret", "cookie": "a=b"})
    import sees  # type: ignore[import-not-found]

    (request,) = sees.seen
    assert request.headers["x-region"] == "eu"
    assert not {"authorization", "cookie"} & request.headers.keys()
    assert (request.model, request.tenant, request.phase) == ("simulated", "", "both")
    assert request.tokens > 0
    assert request.session


async def test_both_choices_of_a_disaggregated_fleet_are_restricted(code: Path) -> None:
    (code / "zones.py").write_text(
        "from math import inf\n"
        "phases = set()\n"
        "def same(candidates, request):\n"
        "    phases.add(str(request.phase))\n"
        "    return [0 if each.labels['zone'] == 'a' else inf for each in candidates]\n"
    )
    async with simulated_pairs("nixl", prefills=2, decodes=2) as pairs:
        zones = {url: "ab"[number] for group in (pairs.prefills, pairs.decodes) for number, url in enumerate(group)}
        workers = [known | {"labels": {"zone": zones[known["url"]]}} for known in pairs.known]
        sections = {"policy": {"extra": ["zones:same"]}, "disaggregation": {"decode_computes": False}}
        async with router(workers=workers, **sections) as routed:
            await routed.until_up(4)
            for _ in range(4):
                reply = await routed.call("/v1/completions", COMPLETION)
                assert reply.status == 200, reply.body
                assert reply.worker == pairs.decodes[0]
            served = [
                await pairs.metric("vllm:request_success_total", url) for url in (*pairs.prefills, *pairs.decodes)
            ]
            assert served == [4, 0, 4, 0]
    import zones as module  # type: ignore[import-not-found]

    assert module.phases == {"prefill", "decode"}


@pytest.mark.usefixtures("code")
def test_simulated_fleets_have_labels_and_use_the_code(tmp_path: Path) -> None:
    trace, results = tmp_path / "trace.jsonl", tmp_path / "results.json"
    lines = [
        {"timestamp": 400 * number, "input_length": 1024, "output_length": 4, "hash_ids": [2 * number, 2 * number + 1]}
        for number in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ["--policy", "kv_aware", "--extra", "hardware:price", "--workers", "2", "--engine", "8b"]
    options += ["--labels", "hardware=h200,region=eu", "--labels", "hardware=l40s"]
    outputs = ["--output", str(tmp_path / "report.html"), "--json", str(results)]
    run = CliRunner().invoke(app, ["replay-trace", str(trace), *options, *outputs])
    assert run.exit_code == 0, run.output
    plain, priced = json.loads(results.read_text())["runs"]
    assert priced["label"] == "kv_aware + hardware:price"
    assert {answer["worker"] for answer in plain["requests"]} == {"worker 1", "worker 2"}
    assert {answer["worker"] for answer in priced["requests"]} == {"worker 2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "nowhere:x"], "--policy nowhere:x: there is no module nowhere"),
        (["--extra", "nowhere:x"], "--extra nowhere:x: there is no module nowhere"),
        (["--labels", "region"], "--labels region: expected NAME=VALUE"),
    ],
)
def test_wrong_options_of_a_simulation_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 1]}\n')
    run = CliRunner().invoke(app, ["replay-trace", str(trace), *options])
    assert run.exit_code == 1
    assert message in run.output.replace("\n", " ")
