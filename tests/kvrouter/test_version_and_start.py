"""The version, the lines printed at the start, and the redirect of the root path."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.metadata import version
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from indexer.api.metrics import build_info
from indexer.native import core_name
from kvrouter.cli import app
from kvrouter.processes import KvrouterProcess

SECONDS = 60
ABOUT = f"kvrouter {version('kvrouter')}"
BUILD = build_info()["build"]

pytestmark = pytest.mark.usefixtures("started_by_python")


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with KvrouterProcess(["simulate"]) as process:
        yield process.wait_until_listening()


@contextmanager
def printed(*arguments: str) -> Iterator[Iterator[str]]:
    """Run a service and yield its output line by line."""
    command = [sys.executable, "-m", "kvrouter", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        kill_timer = threading.Timer(SECONDS, process.kill)
        kill_timer.start()
        try:
            assert process.stdout is not None
            yield iter(process.stdout)
        finally:
            kill_timer.cancel()
            process.kill()


def request(method: str, url: str, path: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def test_version_names_index_core() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"{ABOUT} ({BUILD}; index core: {core_name()}; Python 3.")


@pytest.mark.parametrize("arguments", [["-h"], ["serve", "-h"], ["config", "check", "-h"]])
def test_h_is_alias_of_help(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "Usage:" in shown.stdout


def events(lines: Iterator[str]) -> Iterator[str]:
    """Yield the events of JSON lines."""
    return (json.loads(line)["event"] for line in lines)


def test_start_is_logged_before_discovery(worker: str) -> None:
    with printed("serve", "--port=0", f"--worker={worker}", "--log-level=error") as lines:
        said = events(lines)
        start = f"{ABOUT} starts, {BUILD}, with the {core_name()} index; it asks 1 worker for models"
        assert next(said).startswith(start)
        if BUILD == "interpreted":
            assert next(said).startswith("build interpreted: a compiled build serves about twice the requests")
        if core_name() == "python":
            assert next(said).startswith("build Python index: events take six times the processor time")
        listens = re.fullmatch(r"kvrouter listens on (http://\S+)", next(said))
        assert listens is not None
        assert re.fullmatch(r"model simulated on 1 worker; tokens: by \w+ in the router.*", next(said))
        assert next(said) == "policy kv_aware"
        assert next(said) == f"page {listens[1]}/ui"


def test_several_processes_log_start_once(worker: str) -> None:
    options = ("--port=0", "--processes=2", "--policy=random", "--log-level=error")
    with printed("serve", f"--worker={worker}", *options) as lines:
        announced = (event for event in events(lines) if not event.startswith("build "))
        first = [next(announced) for _ in range(5)]
    assert first[0].startswith(f"{ABOUT} starts, ")
    assert sum("model simulated" in event for event in first) == 1
    assert first[3] == "policy random"
    assert first[4].startswith("page http://")


def test_unreachable_worker_is_logged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with KvrouterProcess(["serve", "--port=0", f"--worker=http://127.0.0.1:{port}", "--log-level=error"]) as process:
        health = json.load(urlopen(f"{process.wait_until_listening()}/health", timeout=SECONDS))
    [found] = health["findings"]
    assert found["detail"] == f"http://127.0.0.1:{port}: refused the connection"


@pytest.mark.parametrize("arguments", [["serve", "--worker=http://127.0.0.1:9"], ["indexer"]])
def test_root_redirects_to_page_and_health_names_version(arguments: list[str]) -> None:
    with KvrouterProcess([*arguments, "--port=0", "--log-level=error"]) as process:
        url = process.wait_until_listening()
        status, headers, _ = request("GET", url, "/")
        assert status == 307
        status, headers, body = request("GET", url, f"/{headers['location']}")
        assert status == 200
        assert body.startswith(b"<!doctype html>")
        status, headers, body = request("HEAD", url, "/health")
        assert (status, body) == (200, b"")
        health = json.loads(request("GET", url, "/health")[2])
        assert int(headers["content-length"]) == len(request("GET", url, "/health")[2])
        assert (health["version"], health["build"], health["core"]) == (version("kvrouter"), BUILD, core_name())
        metrics = request("GET", url, "/metrics")[2].decode()
    assert f'kvrouter_build_info{{build="{BUILD}",core="{core_name()}",' in metrics
    assert "process_resident_memory_bytes " in metrics
    assert "process_start_time_seconds " in metrics


def test_shell_completes_policies() -> None:
    environment = {"_KVROUTER_COMPLETE": "complete_bash", "COMP_WORDS": "kvrouter serve --policy s", "COMP_CWORD": "3"}
    shown = CliRunner().invoke(app, prog_name="kvrouter", env=environment)
    assert shown.stdout.split() == ["session_affinity"]
