"""The two kinds of servers under test: a vLLM worker and the router, each as a user starts it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.request import urlopen

from benchmarks.ports import free_ports
from engine.installation import Installation
from engine.processes import ServerProcess, wait_for
from engine.web import answers, get_json, post_json

MODEL = "tiny"
BLOCK_SIZE = 32  # the smallest one on CPU

ROUTER_START_SECONDS = 60.0
CONSTANTS = Path(__file__).parents[2] / "constants.py"

_WORKER_ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",  # where `tcp://*:0` takes its free port
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class Startable(Protocol):
    """A server that takes its time to start."""

    def start(self) -> None: ...

    def wait_until_ready(self) -> None: ...

    def stop(self) -> None: ...


@contextmanager
def running(*servers: Startable) -> Iterator[None]:
    """Run servers at the same time."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield


class VllmWorker:
    """One vLLM on loopback with KV events. Started again, it has the same ports.

    `model`: its folder, if not the usual one's; `flags`, `environment`: what else it is started with; `api_key`: what
    it wants; `python`: that of another environment that sees vLLM; `core`: the only one that it runs on.
    """

    def __init__(
        self,
        name: str,
        installation: Installation,
        logs: Path,
        model: Path | None = None,
        flags: Iterable[str] = (),
        api_key: str = "",
        environment: Mapping[str, str] | None = None,
        python: Path | None = None,
        core: int | None = None,
    ) -> None:
        self.api_key = api_key
        self._core = core
        self._vllm = [installation.vllm] if python is None else [python, "-m", "vllm.entrypoints.cli.main"]
        self._environment = _WORKER_ENVIRONMENT | dict(environment or {})
        self.installation = installation
        self._model = model or installation.model(MODEL)
        self._flags = list(flags)
        self._port, self._replay_port = free_ports(2)
        self._process = ServerProcess(name, logs / f"{name}.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def running(self) -> bool:
        return self._process.running

    def start(self) -> None:
        """Start it, without waiting for it."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:0",
            "replay_endpoint": f"tcp://127.0.0.1:{self._replay_port}",
            "topic": "kv-events",
        }
        command: list[str | int | Path] = [*self._vllm, "serve", self._model]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", self._port]
        command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", 4096, "--max-num-seqs", 16]
        command += ["--enable-prefix-caching", "--block-size", BLOCK_SIZE, "--num-gpu-blocks-override", 1000]
        command += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
        if self.api_key:
            command += ["--api-key", self.api_key]
        self._process.start([str(word) for word in [*command, *self._flags]], self._environment)
        if self._core is not None:
            self._process.keep_to(self._core)

    def swap(self, model: Path) -> None:
        """Another model, from the next start on."""
        self._model = model

    def add_flags(self, *flags: str) -> None:
        """More of them, from the next start on."""
        self._flags += flags

    def wait_until_ready(self) -> None:
        self._process.wait_until_healthy(self.url)

    def kill(self) -> None:
        self._process.kill()

    def pause(self) -> None:
        """Stop the process with SIGSTOP. Its connections stay open."""
        self._process.pause()

    def go_on(self) -> None:
        self._process.go_on()

    def stop(self) -> None:
        self._process.stop()


class Worker(Protocol):
    """A worker that a router is given."""

    api_key: str

    @property
    def url(self) -> str: ...


class RouterProcess:
    """`kvrouter serve`, given nothing but the workers' URLs and what a test asks for. A context manager.

    `patience`: the seconds of silence after which a worker counts as hung, if not the default. `failovers`: how often a
    stream may go on elsewhere; `token`: the operator's; `constants`: other values of the router's constants;
    `forward_tokens`: send token ids with chats.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        logs: Path,
        *options: str,
        patience: float | None = None,
        failovers: int = 0,
        token: str = "",
        constants: Mapping[str, Any] = {},
        forward_tokens: bool = False,
    ) -> None:
        self._process = ServerProcess("kvrouter", logs / "kvrouter.log")
        self._command = [str(Path(sys.executable).with_name("kvrouter"))]
        if constants:
            self._command = [sys.executable, str(CONSTANTS), json.dumps(constants)]
        self._command += ["serve", "--port", "0", *options]
        for worker in workers:
            self._command += ["--worker", worker.url]
        self._environment = {} if patience is None else {"KVROUTER_FLEET__STALL_SECONDS": str(patience)}
        if failovers:
            self._environment["KVROUTER_PROXY__STREAM_FAILOVERS"] = str(failovers)
        if forward_tokens:
            self._environment["KVROUTER_PROXY__FORWARD_TOKENS"] = "auto"
        if token:
            self._environment["KVROUTER_SERVER__TOKEN"] = token
        if keys := {worker.api_key for worker in workers} - {""}:
            (self._environment["KVROUTER_FLEET__API_KEY"],) = keys
        self.url = ""

    def __enter__(self) -> RouterProcess:
        self._process.log.unlink(missing_ok=True)
        self._process.start(self._command, self._environment)
        try:
            self.url = self._process.wait_for(self._listening_on, ROUTER_START_SECONDS, "says where it listens")
            self._process.wait_for(lambda: answers(f"{self.url}/health"), ROUTER_START_SECONDS, "answers /health")
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def health(self) -> Any:
        return get_json(f"{self.url}/health")

    def workers(self) -> dict[str, Any]:
        """Return the router's report of each worker, by URL."""
        return {worker["worker"]: worker for worker in get_json(f"{self.url}/workers")["workers"]}

    def matched(self, messages: list[dict[str, str]]) -> dict[str, int]:
        """The tokens of a conversation that each worker holds, by URL."""
        matches = post_json(f"{self.url}/match", {"model": MODEL, "messages": messages})["matches"]
        return {match["worker"]: match["matched_tokens"] for match in matches}

    def tokenizer(self) -> dict[str, Any]:
        """Return the router's report of its tokenizer."""
        report: dict[str, Any] = get_json(f"{self.url}/workers")["tokenizers"][MODEL]
        return report

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series."""
        with urlopen(f"{self.url}/metrics", timeout=30) as response:
            found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", response.read().decode(), re.M)
        return sum(map(float, found))

    def wait_until_compared(self) -> None:
        """Wait until the router has compared its tokens with the engine's."""
        wait_for(self._shapes, ROUTER_START_SECONDS, "its tokens are compared")

    def _shapes(self) -> Any:
        """Return the compared shapes of prompts; nothing before the model is known."""
        return get_json(f"{self.url}/workers")["tokenizers"].get(MODEL, {}).get("probes")

    def reset_caches(self) -> None:
        reset = post_json(f"{self.url}/reset_prefix_cache")["workers"]
        assert {each["status"] for each in reset} == {200}, reset

    def _listening_on(self) -> str | None:
        found = re.search(r'listens on ([^\s"]+)', self._process.log.read_text())
        return found and found[1]
