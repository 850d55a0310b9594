"""The `kvrouter` command as its users run it."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from click.testing import Result
from typer.testing import CliRunner

import kvrouter.__main__
from kvrouter.cli import app
from kvrouter.commands.options import unusable
from router.settings import PolicyName, load_settings

DEADLINE = 60.0
PLAIN = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}  # no line breaks or colours of the terminal's
SERVICES = {"serve": "Run the router", "indexer": "Run the index alone", "simulate": "Run a simulated worker"}
COMMANDS = SERVICES | {"match": "Show how much of a prompt", "demo": "Compare kv-aware routing with round robin"}


def invoke(*arguments: str) -> Result:
    """Run a command in this process; for those that end before they start anything."""
    return CliRunner().invoke(app, arguments, terminal_width=200)


def popen(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvrouter", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=PLAIN | environment
    )


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run a command to its end: its status, and all it printed."""
    with popen(*arguments, **environment) as process:
        try:
            output, _ = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, output


@contextmanager
def service(
    *arguments: str, ended_by: signal.Signals | None = signal.SIGTERM, before: list[str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running service: its URL and its process, which must end promptly and well.

    ended_by: the signal that is sent at the end; None: the test sends it itself. A second one would be legal, but kills
        a process that is past its server's end.
    before: gets what the service printed before it was ready.
    """
    with popen(*arguments) as process:
        kill_timer = threading.Timer(DEADLINE, process.kill)
        kill_timer.start()
        try:
            assert process.stdout is not None
            printed = ""
            while not (listens := re.search(r'(?:listens on|ready at) (http[^\s"]+)', printed)):
                line = process.stdout.readline()
                assert line, f"kvrouter {arguments[0]} did not start: {printed}"
                printed += line
            kill_timer.cancel()
            if before is not None:
                before.append(printed)
            yield listens.group(1), process
            if ended_by is not None:
                process.send_signal(ended_by)
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0, output
            assert "Traceback" not in output
        finally:
            kill_timer.cancel()
            process.kill()


def post(url: str, body: Any) -> Any:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return urlopen(request, timeout=DEADLINE)


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with service("simulate", "--step-ms", "20") as (url, _):
        yield url


@pytest.fixture(scope="module")
def router(worker: str) -> Iterator[str]:
    with service("serve", "--port=0", f"--worker={worker}", "--log-level=warning") as (url, _):
        yield url


# Help and mistakes


def test_command_lists_subcommands() -> None:
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert all(name in shown.output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_has_help(name: str) -> None:
    shown = invoke(name, "--help")
    assert shown.exit_code == 0
    assert COMMANDS[name] in shown.output


def test_serve_requires_workers() -> None:
    refused = invoke("serve")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("kvrouter: no workers: list them")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["serve", "--worker", "10.0.0.1:8000"], "--worker: no scheme: write http://10.0.0.1:8000 ("),
        (["serve", "--worker", "tcp://10.0.0.1:8000"], "--worker: tcp:// is not the scheme of a URL here: "),
        (["serve", "--worker", "http://w:8000/v1"], "--worker: remove /v1 from the URL: "),
        (["serve", "--policy", "kv-aware"], "--policy: unknown name; did you mean kv_aware? "),
        (["serve", "--policy", "kv-aware", "--worker", "http://w:1"], "--policy: "),
        (["serve", "--port", "70000"], "--port: expected 65535 or less (found 70000)"),
        (["record", "-o", "x", "--worker", "10.0.0.1:8000"], "no scheme: write http://10.0.0.1:8000"),
        (["replay", "nowhere.kvrec"], "nowhere.kvrec: No such file or directory"),
        (["indexer", "--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["simulate", "--blocks", "1"], "a cache of num_blocks * block_size = 16 tokens cannot hold one request"),
        (["simulate", "--kv-events", "{"], "KV events configuration: "),
    ],
)
def test_invalid_settings_are_named(arguments: list[str], message: str) -> None:
    refused = invoke(*arguments)
    assert refused.exit_code == 1
    assert f"kvrouter: {message}" in refused.stderr


@pytest.mark.parametrize("name", ["serve", "indexer"])
def test_unknown_log_level_is_rejected(name: str) -> None:
    refused = invoke(name, "--log-level", "loud")
    assert refused.exit_code == 2
    assert "'loud'" in refused.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_port_in_use_is_reported(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        workers = ["--worker=http://127.0.0.1:1"] if name == "serve" else []
        status, output = run(name, f"--port={port}", *workers)
    assert status == 1
    in_use = f"kvrouter: port {port} of 127.0.0.1 is in use by another process: choose another one with --port"
    assert in_use in output.splitlines()
    assert "Traceback" not in output


def test_address_of_another_machine_is_reported() -> None:
    status, output = run("serve", "--host=203.0.113.9", "--port=0", "--worker=http://127.0.0.1:1")
    assert (status, output) == (
        1,
        "kvrouter: 203.0.113.9 is no address of this machine: choose another one with --host\n",
    )


def test_old_python_is_named_before_any_import() -> None:
    main = Path(kvrouter.__main__.__file__)
    ast.parse(main.read_text(), feature_version=(3, 8))
    script = (
        "import runpy, sys; sys.version_info = (3, 10, 2, 'final', 0)\n"
        "sys.modules['typer'] = sys.modules['kvrouter.installation'] = None\n"  # an import of either fails
        "runpy.run_module('kvrouter', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("kvrouter: Python 3.11 or later is needed, and this is 3.10")


@pytest.mark.parametrize("name", ["serve", "picker"])
def test_fleet_of_prefill_workers_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("workers: [{url: 'http://w:1', role: prefill}]")
    for arguments in ([name, "--config", str(file)], ["config", "check", str(file)]):
        refused = invoke(*arguments)
        assert refused.exit_code == 1
        assert "workers: all of them are prefill or encode workers" in refused.stderr


@pytest.mark.parametrize("later", ["server: {token: t}", "kubernetes: {selector: app=vllm}"])
@pytest.mark.parametrize("workers", ["", "workers: [{url: 'http://w:1', role: prefill}]"])
def test_workers_may_come_later(later: str, workers: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{later}\n{workers}")
    assert invoke("config", "check", str(file)).exit_code == 0
    assert unusable(load_settings(file), None) is None


def test_router_with_token_starts_without_workers() -> None:
    with popen("serve", "--port=0", KVROUTER_SERVER__TOKEN="t") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] and "listens on" not in lines[-1]:
            lines.append(process.stdout.readline())
        process.terminate()
    assert "listens on" in lines[-1], lines
    assert any("has no workers yet: add them with POST /workers" in line for line in lines)


# Services


def test_interrupt_ends_service() -> None:
    with service("indexer", "--port=0", ended_by=signal.SIGINT) as (url, _):
        assert json.load(urlopen(f"{url}/health"))["status"] == "ok"


def test_requests_in_flight_finish_after_termination_signal(worker: str) -> None:
    body = {"model": "simulated", "prompt": "Tell me more.", "max_tokens": 50, "ignore_eos": True, "stream": True}
    with (
        service("serve", "--port=0", f"--worker={worker}", ended_by=None) as (url, process),
        post(f"{url}/v1/completions", body) as answer,
    ):
        events = [answer.readline()]
        process.terminate()
        events += answer.readlines()
        assert sum(event.startswith(b"data: {") for event in events) == 50
        assert events[-2] == b"data: [DONE]\n"


def test_settings_are_read_from_file_environment_and_options(worker: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"workers": [{"url": worker, "model": "renamed"}], "server": {"port": 1}}))
    with service("serve", f"--config={config}", "--port=0") as (url, _):
        assert [model["id"] for model in json.load(urlopen(f"{url}/v1/models"))["data"]] == ["renamed"]


# Match


def test_match_prints_holders_of_prompt(router: str, worker: str) -> None:
    question = "What holds the cache? " * 40
    messages = [{"role": "user", "content": question}]
    with post(f"{router}/v1/chat/completions", {"model": "simulated", "messages": messages, "max_tokens": 1}):
        pass
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        with post(f"{router}/match", {"model": "simulated", "messages": messages}) as answer:
            asked = json.load(answer)
        if asked["matches"][0]["matched_tokens"]:
            break
    held = asked["matches"][0]["matched_tokens"]
    assert held > 0
    for arguments in ([question], ["-"]):
        shown = CliRunner().invoke(app, ["match", "--model=simulated", f"--url={router}", *arguments], input=question)
        assert shown.exit_code == 0, shown.output
        title, *rows = shown.stdout.splitlines()
        assert title.strip() == f"{asked['tokens']} tokens of simulated"
        (row,) = [row for row in rows if worker in row]
        assert re.findall(r"\d+", row.replace(worker, "")) == ["0", str(held), str(held), "0", "0", "0"]


def test_match_accepts_plain_text(router: str) -> None:
    shown = invoke("match", "--no-chat", "--model=simulated", f"--url={router}", "hi")
    assert "1 tokens of simulated" in shown.stdout


def test_match_reports_refusal_of_router(router: str) -> None:
    refused = invoke("match", "--model=nobody", f"--url={router}", "hi")
    assert refused.exit_code == 1
    assert "404: The model 'nobody' does not exist. Send one of: simulated." in refused.stderr


@pytest.fixture(scope="module")
def foreign_server() -> Iterator[str]:
    """A server that answers anything with a page."""

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_match_reports_unreachable_router() -> None:
    refused = invoke("match", "--model=simulated", "--url=http://127.0.0.1:1", "hi")
    assert (refused.exit_code, refused.stderr) == (1, "kvrouter: http://127.0.0.1:1 refused the connection\n")


ASKING = {
    "match": ["--model=m", "hi"],
    "explain": ["--model=m", "hi"],
    "top": ["--once"],
    "doctor": [],
    "record": ["--requests=x"],
}


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:8080", "no scheme: write http://127.0.0.1:8080"),
        ("nonsense", "no scheme: write http://nonsense"),
        ("http://r:8080/v1", "remove /v1 from the URL"),
        ("", "expected a URL"),
    ],
)
def test_every_command_that_asks_a_router_checks_its_url(name: str, url: str, reason: str) -> None:
    refused = invoke(name, f"--url={url}", *ASKING[name])
    assert (refused.exit_code, refused.stderr.startswith(f"kvrouter: --url: {reason}")) == (2, True), refused.stderr


@pytest.mark.parametrize("name", ASKING)
def test_every_command_that_asks_a_router_has_the_same_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table cuts words
    shown = re.sub(r"[\s│]", "", invoke(name, "--help").output)
    for word in ("--url", "--token", "--json", "KVROUTER_URL", "KVROUTER_TOKEN", "http://127.0.0.1:8080"):
        assert word in shown, word
    monkeypatch.setenv("KVROUTER_URL", "http://127.0.0.1:1")
    refused = invoke(name, *ASKING[name])
    assert "http://127.0.0.1:1" in refused.stderr
    assert "refused the connection" in refused.stderr


@pytest.mark.parametrize("command", [["match", "--model=simulated", "hi"], ["explain", "--model=simulated", "hi"]])
def test_answers_are_printed_as_json(router: str, command: list[str]) -> None:
    shown = invoke(*command, f"--url={router}", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["model"] == "simulated"


def test_fleet_is_printed_as_json(router: str) -> None:
    shown = invoke("top", f"--url={router}", "--json")
    fleet = json.loads(shown.stdout)
    assert (len(fleet["ranks"]), fleet["totals"]["workers"]) == (1, 1)


def test_help_lists_the_policies() -> None:
    shown = " ".join(invoke("serve", "--help").output.replace("│", " ").split())
    assert ", ".join(PolicyName) in shown


def test_every_line_of_a_piped_service_is_json(worker: str) -> None:
    printed: list[str] = []
    with service("serve", "--port=0", f"--worker={worker}", ended_by=None, before=printed) as (_, process):
        process.terminate()
        assert process.stdout is not None
        lines = [*printed[0].splitlines(), *process.stdout.read().splitlines()]
    events = [json.loads(line)["event"] for line in lines]
    assert any("listens on" in event for event in events)
    assert any(event.startswith("stopping: waits for 0 requests") for event in events)


def test_match_reports_server_that_is_not_a_router(foreign_server: str) -> None:
    refused = invoke("match", "--model=simulated", f"--url={foreign_server}", "hi")
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"kvrouter: {foreign_server} ")


# Demo


def test_demo_ends_by_itself_and_ignores_files_in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    command = [str(Path(sys.executable).parent / "kvrouter"), "demo", "--workers=1", "--conversations=6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE, env=PLAIN)
    assert done.returncode == 0, done.stderr
    assert re.search(r"prompt tokens from cache .* (\d+)% .* (\d+)%", done.stdout)
    counts = [re.findall(r"\d+", line)[1:] for line in done.stdout.splitlines() if "requests to worker" in line]
    assert [sum(int(count) for count in column) for column in zip(*counts, strict=True)] == [18, 18]


def test_demo_reports_why_worker_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('no server here')")
    status, output = run("demo", "--workers=1", "--conversations=1", PYTHONPATH=str(tmp_path))
    assert status == 1
    assert "kvrouter: kvrouter simulate did not start:" in output
    assert "no server here" in output
