"""A running Envoy with the chart's configuration: its admin routes, and its answers without a picker."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.ports import free_port

pytest.importorskip("helm_python", reason="make test-helm installs it", exc_type=ImportError)
envoy = pytest.importorskip("envoy", reason="make test-helm installs it")

from chart import Object, container, named, render  # noqa: E402

pytestmark = pytest.mark.helm

CLIENTS, ADMIN, STATUS, PICKER = 8081, 19000, 19001, 9002


@dataclass
class Running:
    """An Envoy with the chart's configuration, at free ports."""

    ports: dict[int, int]

    def get(self, listener: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        with closing(HTTPConnection("127.0.0.1", self.ports[listener], timeout=60)) as connection:
            connection.request("GET", path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def until(self, listener: int, path: str, status: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                if self.get(listener, path)[0] == status:
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline, f"{path} does not answer {status}"
            time.sleep(0.05)


def moved(found: Any, ports: dict[int, int]) -> Any:
    """A configuration with other ports."""
    if isinstance(found, list):
        return [moved(each, ports) for each in found]
    if isinstance(found, dict):
        return {
            key: ports.get(value, value) if key == "port_value" else moved(value, ports) for key, value in found.items()
        }
    return found


def config(objects: list[Object]) -> Any:
    return yaml.safe_load(named(objects, "ConfigMap", "rel-kvrouter-envoy")["data"]["envoy.yaml"])


def _envoy(objects: list[Object]) -> Object:
    return container(objects, "rel-kvrouter-envoy")


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render({"envoy": {"enabled": True, "drainSeconds": 1}})


@pytest.fixture
def running(objects: list[Object], tmp_path: Path) -> Iterator[Running]:
    found = Running({port: free_port() for port in (CLIENTS, ADMIN, STATUS, PICKER)})
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(moved(config(objects), found.ports)))
    command = [
        envoy.get_envoy_path(),
        "-c",
        path,
        "--concurrency",
        "1",
        "--log-level",
        "error",
        "--use-dynamic-base-id",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found.until(STATUS, "/ready", 200)
        yield found
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("tls", ["", "tls"])
def test_envoy_accepts_the_configuration(tls: str, tmp_path: Path) -> None:
    found = config(render({"envoy": {"enabled": True, "maxConnections": 1_000_000}, "secrets": {"tls": tls}}))
    if tls:
        import trustme

        certificate = trustme.CA().issue_cert("llm.example.com")
        certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "tls.crt"))
        certificate.private_key_pem.write_to_path(str(tmp_path / "tls.key"))
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(found).replace("/etc/kvrouter/tls", str(tmp_path)))
    command = [envoy.get_envoy_path(), "--mode", "validate", "-c", path]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_envoy_answers_503_without_a_picker(running: Running) -> None:
    assert running.get(CLIENTS, "/v1/models")[0] == 503


def test_envoy_ignores_a_destination_header_of_a_client(running: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as secret:
        address = f"127.0.0.1:{secret.getsockname()[1]}"
        assert running.get(CLIENTS, "/", {"x-gateway-destination-endpoint": address})[0] == 503
        secret.settimeout(0.2)
        with pytest.raises(TimeoutError):
            secret.accept()


def test_envoy_exposes_only_readiness_and_metrics(running: Running) -> None:
    assert "envoy_server_live" in running.get(STATUS, "/stats/prometheus")[1]
    for path in ("/config_dump", "/quitquitquit", "/"):
        assert running.get(STATUS, path)[0] == 404


def test_envoy_closes_client_connections_before_shutdown(objects: list[Object], running: Running) -> None:
    command = _envoy(objects)["lifecycle"]["preStop"]["exec"]["command"]
    command = [word.replace(str(ADMIN), str(running.ports[ADMIN])) for word in command]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"PATH": os.environ["PATH"]})
    assert "200 OK" in ended.stdout
    with closing(HTTPConnection("127.0.0.1", running.ports[CLIENTS], timeout=60)) as connection:
        connection.request("GET", "/")
        assert connection.getresponse().getheader("Connection") == "close"
    assert running.get(STATUS, "/ready")[0] == 503
