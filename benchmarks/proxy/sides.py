"""The routers under test, and their start in front of workers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.index.publisher import Publisher
from benchmarks.machine import INDEXER_CORE, python
from benchmarks.ports import free_port
from benchmarks.proxy.processes import StartError, answers, started
from benchmarks.proxy.prompts import MODEL
from benchmarks.proxy.report import AGAINST, INTERPRETED, LIMIT, NONE, OURS
from simulator.worker.settings import BUNDLED_MODEL

ROUTER_CORE = INDEXER_CORE
_FILL_SECONDS = 60.0
ROUND_ROBIN, CACHE_AWARE = "round robin", "cache aware"


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """The address and process of a router; without a router, that of a worker, which is not measured."""

    url: str
    pid: int | None


class Side(ABC):
    """A router. `mode` is its way of routing."""

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self.mode = mode

    @contextmanager
    def running(self, workers: Sequence[str], folder: Path) -> Iterator[RunningRouter]:
        """Run the router in front of workers, on its own core."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        log = folder / f"{self.name}-{self.mode}.log".replace(" ", "-")
        with started(self.command(workers, port, folder), ROUTER_CORE, log, lambda: answers(f"{url}/v1/models")) as pid:
            self.warm(url)
            yield RunningRouter(url, pid)

    @abstractmethod
    def command(self, workers: Sequence[str], port: int, folder: Path) -> list[str]:
        """Return the command that starts the router."""

    def warm(self, url: str) -> None:  # noqa: B027 - most routers need no warm-up
        """Prepare the router for the measurement. Raises StartError."""


class Nothing(Side):
    """No router: the limit of workers and load."""

    def __init__(self) -> None:
        super().__init__(NONE, "")

    @contextmanager
    def running(self, workers: Sequence[str], folder: Path) -> Iterator[RunningRouter]:  # noqa: ARG002
        yield RunningRouter(workers[0], None)

    def command(self, workers: Sequence[str], port: int, folder: Path) -> list[str]:
        raise NotImplementedError


class Relay(Side):
    """A relay of bytes in Python: the limit of any router in Python."""

    def __init__(self) -> None:
        super().__init__(LIMIT, "")

    def command(self, workers: Sequence[str], port: int, folder: Path) -> list[str]:  # noqa: ARG002
        ports = [url.rpartition(":")[2] for url in workers]
        return [sys.executable, "-m", "benchmarks.proxy.relay", str(port), *ports]


class Kvrouter(Side):
    """Our router. Cache aware has its tokenizer, an index filled by events, the default policy, and the audit."""

    def __init__(
        self,
        mode: str,
        publisher: Publisher | None = None,
        *,
        interpreted: bool = False,
        checkout: Path = Path(),
    ) -> None:
        """Choose the build.

        - `interpreted`: ignore the build of `make compiled`.
        - `checkout`: the directory of another checkout; its build is used.
        """
        super().__init__(AGAINST if checkout != Path() else INTERPRETED if interpreted else OURS, mode)
        self._publisher = publisher
        self._python = python(interpreted=interpreted, checkout=checkout)

    def command(self, workers: Sequence[str], port: int, folder: Path) -> list[str]:
        settings: dict[str, object] = {"server": {"port": port}, "workers": [{"url": url} for url in workers]}
        if self.mode == ROUND_ROBIN:
            settings["policy"] = {"name": "round_robin"}
        else:
            assert self._publisher is not None
            endpoints = self._publisher.open().values()
            settings["workers"] = [
                {"url": url, "block_size": 16, "streams": [{"endpoint": endpoint}]}
                for url, endpoint in zip(workers, endpoints, strict=True)
            ]
            settings["models"] = {MODEL: {"tokenizer": str(BUNDLED_MODEL)}}
        config = folder / f"{self.name}-{self.mode}.yaml".replace(" ", "-")
        config.write_text(json.dumps(settings))
        return [*self._python, "-m", "kvrouter", "serve", "--config", str(config)]

    def warm(self, url: str) -> None:
        if self._publisher is None:
            return
        self._publisher.start()
        deadline = time.monotonic() + _FILL_SECONDS
        while _blocks_held(url) < self._publisher.workload.blocks:
            if time.monotonic() > deadline:
                raise StartError(f"{self.name}: the index was not filled within {_FILL_SECONDS:.0f} s")
            time.sleep(0.2)


def _blocks_held(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvrouter_index_blocks{"))


class Peer(Side):
    """A Rust router, from its own environment."""

    def __init__(self, package: str, mode: str, command: list[str]) -> None:
        super().__init__(package, mode)
        self._bin = Path(".bench") / package / "bin"
        self._command = command

    def command(self, workers: Sequence[str], port: int, folder: Path) -> list[str]:  # noqa: ARG002
        policy = "round_robin" if self.mode == ROUND_ROBIN else "cache_aware"
        metrics = ["--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1"]
        options = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy, *metrics, "--log-level", "error"]
        return [str(self._bin.absolute() / self._command[0]), *self._command[1:], *options, "--worker-urls", *workers]

    def version(self) -> str:
        """Return the installed release."""
        code = f"from importlib.metadata import version; print(version({self.name!r}))"
        return subprocess.check_output([self._bin / "python", "-c", code], text=True).strip()


PEERS = {"smg": ["smg", "launch"], "sglang-router": ["sglang-router", "launch"], "vllm-router": ["vllm-router"]}


def peers(mode: str) -> list[Peer]:
    """Return the Rust routers in this mode."""
    return [Peer(package, mode, command) for package, command in PEERS.items()]
