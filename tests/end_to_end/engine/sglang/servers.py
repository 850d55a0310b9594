"""A real SGLang worker, as a user starts it, with what it needs on a machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.ports import free_ports
from engine.processes import ServerProcess
from engine.sglang.installation import MODEL, SglangInstallation

PAGE_SIZE = 16
_ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--cuda-graph-backend-decode", "disabled"),
    *("--cuda-graph-backend-prefill", "disabled", "--disable-overlap-schedule", "--sleep-on-idle"),
    *("--dtype", "float32", "--context-length", "4096", "--skip-server-warmup", "--host", "127.0.0.1"),
)


class SglangWorker:
    """One SGLang on loopback with KV events. Started again, it has the same ports.

    - `tokens`: the size of its cache.
    - `ranks`: its data-parallel ranks.
    - `flags`: what else it is started with.
    """

    api_key = ""

    def __init__(
        self,
        name: str,
        installation: SglangInstallation,
        logs: Path,
        *flags: str | Path,
        tokens: int = 16_384,
        page_size: int = PAGE_SIZE,
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._installation = installation
        self._port, self._events, *_ = free_ports(1 + 2 * ranks)  # a rank's port is the base plus the rank
        self._replays = self._events + ranks
        if ranks > 1:
            flags = ("--dp", str(ranks), *flags)
        cache = ("--page-size", page_size, "--max-total-tokens", tokens, "--enable-cache-report", "--enable-metrics")
        self._flags = [*cache, "--served-model-name", MODEL, *flags]
        self._environment = dict(environment or {})
        self._process = ServerProcess(name, logs / f"{name}.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def running(self) -> bool:
        return self._process.running

    @property
    def events_config(self) -> dict[str, str]:
        """The text of `--kv-events-config`, parsed."""
        return {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events}",
            "replay_endpoint": f"tcp://*:{self._replays}",
            "topic": "kv-events",
        }

    def start(self) -> None:
        """Start it, without waiting for it."""
        command = [self._installation.python, "-m", "sglang.launch_server", "--model-path", self._installation.model]
        words = [*command, "--port", self._port, *_ON_CPU, *self._flags]
        words += ["--kv-events-config", json.dumps(self.events_config)]
        self._process.start([str(word) for word in words], self._installation.environment | self._environment)

    def wait_until_ready(self) -> None:
        self._process.wait_until_healthy(self.url)

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.stop()
