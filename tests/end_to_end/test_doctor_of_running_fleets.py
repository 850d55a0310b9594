"""The doctor of a fleet that runs: what its router tells; and of the workers that a cluster has."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from router_under_test import router, until

from benchmarks.ports import free_port
from kvrouter.tools.doctor import NoWorkersError
from kvrouter.tools.doctor.run import run_doctor
from kvrouter.tools.doctor.running_fleet import ROUTER_FIXES
from router.fleet.kubernetes import ClusterAccess, KubernetesError
from router.settings import Settings
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

pytestmark = pytest.mark.anyio

PODS = "/api/v1/namespaces/inference/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"
TROUBLESHOOTING = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
QUICK = SimulatedWorkerSettings(prefill_s_per_token=1e-6, base_step_s=0.005)


async def doctor(*arguments: str) -> tuple[int | None, str, str]:
    """The command's exit status, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvrouter",
        "doctor",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def test_a_sound_fleet() -> None:
    async with running(QUICK) as worker, router(worker) as routed:

        async def is_ready() -> bool:
            return bool((await routed.call("/ready")).status == 200)

        await until(is_ready)
        status, printed, _ = await doctor("--url", routed.url)
    assert status == 0, printed
    assert re.search(r"ok  kvrouter \S+, \w+ index, policy kv_aware", printed)
    assert "ok  ready; 1 of 1 workers answer" in printed
    assert "prompts for simulated become tokens: local" in printed
    assert re.search(r"rank 0: events live from tcp://\S+", printed)
    assert printed.splitlines()[-1] == "no findings"


async def test_what_the_router_finds_is_told_with_what_to_do() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with running(QUICK) as worker, router(worker, gone) as routed:
        status, printed, _ = await doctor("--url", routed.url, "--json")
    assert status == 1
    told = json.loads(printed)
    assert {worker, gone, routed.url} <= set(told["workers"])
    [found] = [each for each in told["findings"] if each["worker"] == gone]
    assert (found["cause"], found["fix"]) == ("worker_down", ROUTER_FIXES["worker_down"])
    assert "refused the connection" in found["evidence"]


async def test_a_router_that_is_not_ready() -> None:
    async with router(f"http://127.0.0.1:{free_port()}") as routed:
        status, printed, _ = await doctor("--url", routed.url)
    assert status == 1
    assert "not_ready  no worker answers" in printed


async def test_the_token_is_asked_for_and_given() -> None:
    tenants = {"named": {"one": {"keys": ["0" * 64]}}}
    async with running(QUICK) as worker, router(worker, server={"token": "admin"}, tenants=tenants) as routed:
        status, _, complaint = await doctor("--url", routed.url)
        assert status == 2
        assert "needs the admin token for /workers: set --token" in complaint
        status, printed, _ = await doctor("--url", routed.url, "--token", "admin")
        assert worker in printed
        assert status in (0, 1)


async def test_what_is_no_router() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert await doctor("--url", url) == (2, "", f"kvrouter: {url} refused the connection\n")
    async with running(QUICK) as worker:
        status, _, complaint = await doctor("--url", worker)
    assert status == 2
    assert "is this a router's URL?" in complaint or "is not a router" in complaint


async def test_a_router_is_asked_alone() -> None:
    status, _, complaint = await doctor("--url", "http://127.0.0.1:1", "--worker", "http://127.0.0.1:2")
    assert status == 2
    assert "omit --config and --worker" in complaint


def test_there_is_a_fix_for_every_finding_of_a_router() -> None:
    section = TROUBLESHOOTING.read_text().partition("## Findings")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE))
    assert documented
    assert documented <= set(ROUTER_FIXES)


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
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("by", ["selector", "service"])
async def test_the_workers_of_a_cluster_are_examined(
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


async def test_a_cluster_without_workers_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as api:
        monkeypatch.setattr(ClusterAccess, "in_cluster", lambda _: ClusterAccess(api, "inference"))
        with pytest.raises(NoWorkersError, match="namespace inference has no workers for 'app=vllm'"):
            await run_doctor(Settings(kubernetes={"selector": "app=vllm"}), None, 1.0, True)
    monkeypatch.setattr(ClusterAccess, "in_cluster", lambda _: ClusterAccess(api, "inference"))
    with pytest.raises(KubernetesError, match="refused the connection"):
        await run_doctor(Settings(kubernetes={"selector": "app=vllm"}), None, 1.0, True)


async def test_outside_of_a_cluster_it_says_where_to_ask(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("kubernetes: {selector: app=vllm}")
    status, _, complaint = await doctor("--config", str(file))
    assert status == 2
    assert "not in a pod of a cluster" in complaint
    assert "or use --url" in complaint
