"""With the settings, Role and labels of the chart the router finds the workers of the chart, and may do no more.

The API server of this test serves the pods of the release, and refuses what the rendered Role does not allow.
"""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

pytest.importorskip("helm_python", reason="make test-helm installs it", exc_type=ImportError)

from chart import Object, named, of_kind, pod_templates, profile, render

from indexer import Indexer
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.build import FleetWatch
from router.fleet.fleet import Fleet
from router.fleet.kubernetes import ClusterAccess
from router.fleet.source_watch import follow_kubernetes
from router.fleet.worker import Worker
from router.settings import FleetSettings, Role, load_settings

pytestmark = pytest.mark.helm

NEVER_UP = FleetSettings(probe_interval=60, metrics_interval=60)


class ApiServer:
    """A server of the pods and slices of a release, which refuses requests that the Role does not allow."""

    def __init__(self, objects: list[Object], namespace: str) -> None:
        self.asked: set[tuple[str, str, str]] = set()
        self.refused: list[str] = []
        self._rules = [rule for role in of_kind(objects, "Role") for rule in role["rules"]]
        self._namespace = namespace
        self._services = {service["metadata"]["name"]: service for service in of_kind(objects, "Service")}
        self._pods = [
            {
                "metadata": {"name": f"pod-{number}", "labels": template["metadata"]["labels"]},
                "status": {"phase": "Running", "podIP": f"127.0.1.{number}"},
            }
            for number, template in enumerate(pod_templates(objects), start=1)
        ]

    def addresses(self, component: str) -> set[str]:
        """Return the addresses of the pods of a component."""
        return {pod["status"]["podIP"] for pod in self._selected({"app.kubernetes.io/component": component})}

    def _selected(self, labels: Object) -> list[Object]:
        return [pod for pod in self._pods if labels.items() <= pod["metadata"]["labels"].items()]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        *groups, _version, _namespaces, namespace, kind = request.path.strip("/").split("/")[1:]
        group = "".join(groups)  # none: the core
        verb = "watch" if "watch" in request.query else "list"
        self.asked.add((group, kind, verb))
        allowed = any(
            group in rule["apiGroups"] and kind in rule["resources"] and verb in rule["verbs"] for rule in self._rules
        )
        if not allowed or namespace != self._namespace:
            self.refused.append(f"{verb} {request.path}")
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        if verb == "list":
            labels = dict(pair.split("=", 1) for pair in request.query["labelSelector"].split(","))
            items = self._slices(labels) if kind == "endpointslices" else self._selected(labels)
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(30)
        return response

    def _slices(self, labels: Object) -> list[Object]:
        service = self._services[labels["kubernetes.io/service-name"]]["spec"]
        addresses = [pod["status"]["podIP"] for pod in self._selected(service["selector"])]
        return [
            {
                "metadata": {"name": "slice"},
                "addressType": "IPv4",
                "ports": [{"name": port["name"], "port": port["port"]} for port in service["ports"]],
                "endpoints": [{"addresses": [address], "conditions": {"ready": False}} for address in addresses],
            }
        ]


async def no_model(worker: Worker, model: object) -> None:
    raise AssertionError(f"{worker.url} answered with {model}")


async def found(objects: list[Object], namespace: str) -> tuple[dict[str, Role], ApiServer]:
    """The workers that the router finds, with their roles, and the server that it asked."""
    text = named(objects, "ConfigMap", "rel-kvrouter-config")["data"]["config.yaml"]
    settings = load_settings(None, yaml.safe_load(text)).kubernetes
    api = ApiServer(objects, namespace)
    app = web.Application()
    app.router.add_get("/{path:.*}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    access = ClusterAccess(f"http://127.0.0.1:{runner.addresses[0][1]}", settings.namespace or "inference")
    indexer = Indexer()
    indexer.start()
    async with aiohttp.ClientSession() as session:
        fleet = Fleet([], NEVER_UP, indexer)
        watch = FleetWatch(fleet, NEVER_UP, indexer, session, AllowedNetworks([]), no_model)
        await watch.start()
        following = asyncio.create_task(follow_kubernetes(settings, access, session, fleet))
        async with asyncio.timeout(60):
            while not fleet.workers or len(api.asked) < 2:
                assert not api.refused
                await asyncio.sleep(0.01)
        workers = {worker.url: worker.settings.role for worker in fleet.workers}
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await watch.stop()
    await asyncio.to_thread(indexer.stop)
    await runner.cleanup()
    return workers, api


@pytest.mark.parametrize("name", ["demo", "vllm", "sglang", "disaggregated", "envoy"])
def test_router_discovers_workers_within_its_role(name: str) -> None:
    objects = render(profile(name))
    workers, api = asyncio.run(found(objects, "inference"))
    assert workers.keys() == {f"http://{address}:8000" for address in api.addresses("worker")}
    [rule] = of_kind(objects, "Role")[0]["rules"]
    assert api.asked == set(product(rule["apiGroups"], rule["resources"], rule["verbs"]))


def test_discovered_workers_have_their_roles() -> None:
    workers, _api = asyncio.run(found(render(profile("disaggregated")), "inference"))
    assert sorted(workers.values()) == [Role.DECODE, Role.DECODE, Role.PREFILL, Role.PREFILL]


def test_discovery_uses_the_configured_namespace_and_selector() -> None:
    values: dict[str, Any] = {"discovery": {"namespace": "models", "selector": "app.kubernetes.io/component=worker"}}
    workers, _api = asyncio.run(found(render(profile("demo") | values), "models"))
    assert len(workers) == 2
