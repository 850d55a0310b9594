"""A real Mooncake master, and vLLMs that share its pool over TCP."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import urlopen

from benchmarks.ports import free_ports
from engine.installation import Installation
from engine.processes import ServerProcess
from engine.servers import VllmWorker
from engine.web import answers

CLIENT_TTL = 5  # seconds without a ping after which a client is suspected, and as long again until it is offline
DEVICE_BLOCKS = 80
WATERMARK = 0.2  # share of the pool from which objects are evicted
_SEGMENT = "16MB"
_TRANSFER = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"enable_group_semantics": True},
}


class PoolMaster:
    """A Mooncake master. Started again, it has the same ports and an empty pool."""

    def __init__(self, installation: Installation, logs: Path) -> None:
        self._installation = installation
        self._rpc, self._http, self._events = free_ports(3)
        self._process = ServerProcess("mooncake_master", logs / "mooncake_master.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http}"

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self._events}"

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self._rpc}"

    def start(self) -> None:
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._rpc,
            "metrics_host": "127.0.0.1",
            "metrics_port": self._http,
            "enable_kv_events": "true",
            "kv_events_bind_endpoint": self.events,
            "kv_events_backend_id": "pool",
            "default_kv_lease_ttl": 5000,
            "client_ttl": CLIENT_TTL,
            "eviction_high_watermark_ratio": WATERMARK,
        }
        command = [str(self._installation.pool_master), *(f"--{name}={value}" for name, value in options.items())]
        self._process.start(command)

    def wait_until_ready(self) -> None:
        self._process.wait_for(lambda: answers(f"{self.url}/health"), 30.0, "answers /health")

    def stop(self) -> None:
        self._process.stop()

    def segments(self) -> int:
        """Return the number of segments, one for each worker."""
        return len(self.asked("/get_all_segments").split())

    def keys(self) -> int:
        """Return the number of objects in the pool."""
        return len(self.asked("/get_all_keys").split())

    def asked(self, path: str) -> str:
        """Return the text of an answer."""
        with urlopen(self.url + path, timeout=10) as answer:
            text: str = answer.read().decode()
        return text


def pool_worker(name: str, installation: Installation, logs: Path, master: PoolMaster) -> VllmWorker:
    """Return a vLLM with a segment of the pool and a small device cache."""
    config = logs / f"{name}.mooncake.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    store = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master.address,
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": _SEGMENT,
        "local_buffer_size": "32MB",
    }
    config.write_text(json.dumps(store))
    environment = {
        "MOONCAKE_CONFIG_PATH": str(config),
        "PYTHONPATH": str(Path(__file__).with_name("without_cuda")),
        "PYTHONHASHSEED": "0",
    }
    flags = ["--kv-transfer-config", json.dumps(_TRANSFER), "--num-gpu-blocks-override", str(DEVICE_BLOCKS)]
    flags += ["--max-model-len", "2048"]
    python = installation.other_python
    return VllmWorker(name, installation, logs, flags=flags, environment=environment, python=python)
