"""The doctor on a running fleet: the findings of its router, and the workers of a cluster."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from router_under_test import router, until
from typer.testing import CliRunner

from benchmarks.ports import free_port
from kvrouter.cli import app
from kvrouter.tools.doctor import NoWorkersError
from kvrouter.tools.doctor.run import ROUTER_FIXES, run_doctor
from router.fleet.kubernetes import ClusterAccess, KubernetesError
from router.settings import Settings
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

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
    assert (found["cause"], found["fix"]) == ("worker_down", ROUTER_FIXES["worker_down"])
    assert "refused the connection" in found["evidence"]


async def test_unready_router_is_a_finding() -> None:
    async with router(f"http://127.0.0.1:{free_port()}") as routed:
        status, printed, _ = await doctor("--url", routed.url)
    assert status == 1
    assert "not_ready  no worker answers" in printed


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


def test_every_router_finding_has_a_fix() -> None:
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
