"""Fleets with one fault each, which `/health`, `kvrouter doctor --url` and the page's data name in the same way."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from broken_fleet import other_tokenizer, request_proxy
from router_under_test import QUICK, RouterUnderTest, router, until
from typer.testing import CliRunner

from benchmarks.ports import free_port
from kvrouter.cli import app
from kvrouter.processes import KvrouterProcess
from kvrouter.tools.doctor.run import examine
from router.observability.advice import ADVICE
from router.settings import Settings
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

FAST = SimulatedWorkerSettings(prefill_s_per_token=1e-6, base_step_s=0.002)
SECONDS = 90.0


async def page_findings(routed: RouterUnderTest) -> list[dict[str, Any]]:
    """Return the findings in the page's data."""
    async with routed.request("/live") as response:
        async for line in response.content:
            if line.startswith(b"data: ") and "findings" in (update := json.loads(line[6:])):
                found: list[dict[str, Any]] = update["findings"]
                return found
    raise AssertionError("the page's data have no findings")


async def named(routed: RouterUnderTest, *expected: str) -> dict[str, Any]:
    """Wait until the findings have these names, assert that all places agree on them, and return the first."""
    await until(routed.findings, lambda found: [each["finding"] for each in found] == [*expected], seconds=SECONDS)
    health, page = await routed.health(), await page_findings(routed)
    command = ["doctor", "--url", routed.url]
    shown, as_json = [
        await asyncio.to_thread(CliRunner().invoke, app, [*command, *more], env={"COLUMNS": "200"})
        for more in ((), ("--json",))
    ]
    doctor = json.loads(as_json.stdout)["findings"]
    print("/health:", health["status"], json.dumps(health["findings"], indent=1))
    print(f"kvrouter doctor --url\n{shown.stdout}page: {[each['finding'] for each in page]}")
    assert [each["finding"] for each in page] == [each["cause"] for each in doctor] == [*expected]
    for found in (*health["findings"], *page):
        severity, _, action = ADVICE[found["finding"]]
        assert (found["severity"], found["action"]) == (severity, action)
        assert found["link"].endswith(f"#{found['finding']}")
        assert f"{severity}: {found['finding']}" in shown.stdout
        assert action in shown.stdout
    assert (shown.exit_code, as_json.exit_code) == ((1, 1) if expected else (0, 0))
    errors = [name for name in expected if ADVICE[name].severity == "error"]
    assert (health["status"] == "ok") == (not errors)
    first: dict[str, Any] = next(iter(health["findings"]), {})
    return first


async def causes(*workers: dict[str, Any], **sections: Any) -> list[str]:
    """Return the causes that `kvrouter doctor --worker` names."""
    examined = await examine(Settings(workers=list(workers), **sections), None, 4.0)
    return [finding.cause for each in examined for finding in each.findings]


@asynccontextmanager
async def traffic(
    routed: RouterUnderTest, at_once: int = 2, words: str = "word", to: str = "", pause: float = 0.02, **fields: Any
) -> AsyncIterator[None]:
    """Send different prompts until the block ends, to the router or past it to a worker's URL."""

    async def send(number: int) -> None:
        turn = 0
        while True:
            turn += 1
            text = " ".join(f"{words} {number} {turn} {place}" for place in range(40))
            body = {"model": "simulated", "prompt": text, "max_tokens": 2} | fields
            async with routed.session.post(f"{to or routed.url}/v1/completions", json=body) as response:
                await response.read()
            await asyncio.sleep(pause)

    tasks = [asyncio.create_task(send(number)) for number in range(at_once)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_healthy_fleet_has_no_findings() -> None:
    async with running(FAST) as one, running(FAST) as other, router(one, other) as routed:
        await routed.until_live()
        async with traffic(routed, pause=0.08):
            await asyncio.sleep(18)  # longer than load and look-ups need to be judged
            await named(routed)


async def test_caching_off_is_named_by_metrics() -> None:
    off = SimulatedWorkerSettings(prefix_caching=False, prefill_s_per_token=1e-6, base_step_s=0.002)
    async with running(FAST) as sound, running(off) as broken, router(sound, broken) as routed:
        await routed.until_live()
        found = await named(routed, "prefix_caching_off")
        assert found["worker"] == broken
        assert await causes({"url": broken}) == ["prefix_caching_off"]


async def test_caching_off_is_named_by_prompts_that_are_not_stored() -> None:
    off = SimulatedWorkerSettings(prefix_caching=False, prefill_s_per_token=1e-6, base_step_s=0.002)
    async with (
        running(FAST) as sound,
        running(off) as worker,
        request_proxy(worker, hidden=("/metrics",)) as broken,
        router(sound, broken) as routed,
    ):
        await routed.until_live()
        async with traffic(routed, at_once=4):
            found = await named(routed, "prefix_caching_off")
        assert (found["worker"], found["dp_rank"]) == (broken, 0)
        assert "was stored" in found["detail"]


async def test_refused_key_is_named() -> None:
    closed = SimulatedWorkerSettings(api_key="secret", prefill_s_per_token=1e-6)
    async with running(FAST) as sound, running(closed) as broken, router(sound, broken) as routed:
        found = await named(routed, "worker_key")
        assert found["worker"] == broken
        assert await causes({"url": broken}) == ["worker_key"]


async def test_hung_worker_is_named() -> None:
    fleet = QUICK | {"probe_timeout": 1.0}
    with KvrouterProcess(["simulate"]) as process:
        broken = await asyncio.to_thread(process.wait_until_listening)
        async with running(FAST) as sound, router(sound, broken, fleet=fleet) as routed:
            await routed.until_up(2)
            process.send_signal(signal.SIGSTOP)
            try:
                found = await named(routed, "worker_down")
                assert found["worker"] == broken
                assert await causes({"url": broken}, fleet={"probe_timeout": 1.0}) == ["worker_down"]
            finally:
                process.send_signal(signal.SIGCONT)


async def test_unreachable_worker_is_named() -> None:
    broken = f"http://127.0.0.1:{free_port()}"
    async with running(FAST) as sound, router(sound, broken) as routed:
        found = await named(routed, "worker_down")
        assert found["worker"] == broken
        assert await causes({"url": broken}) == ["worker_down"]


async def test_hot_worker_is_named() -> None:
    """Other clients send their requests past the router to one worker."""
    slow = SimulatedWorkerSettings(base_step_s=0.05, prefill_s_per_token=1e-6)
    async with running(slow) as one, running(slow) as two, running(slow) as hot, router(one, two, hot) as routed:
        await routed.until_live()
        async with traffic(routed, at_once=12, to=hot, max_tokens=40, ignore_eos=True):
            found = await named(routed, "hot_worker")
        assert found["worker"] == hot


async def test_wrong_tokenizer_is_named(tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path)
    models = {"simulated": {"tokenizer": str(folder)}}
    async with running(FAST) as broken, router(broken, models=models) as routed:
        await routed.until_live()
        async with traffic(routed, words="34 68 34 68 34 68 34 68"):
            found = await named(routed, "tokens_differ")
        assert found["worker"] == broken
        assert await causes({"url": broken}, models=models) == ["tokens_differ"]


async def test_ranks_with_one_cause_are_one_finding() -> None:
    worker = SimulatedWorkerSettings(dp_size=4, prefill_s_per_token=1e-6)
    async with running(worker) as url, router(workers=[{"url": url, "block_size": 32}]) as routed:
        await routed.until_live()
        async with traffic(routed, at_once=6):
            await until(routed.findings, lambda found: found and len(found[0].get("dp_ranks", ())) == 4)
        found = await named(routed, "block_size")
        assert found["dp_ranks"] == [0, 1, 2, 3]
        assert await causes({"url": url, "block_size": 32}) == ["block_size"] * 4
