"""A router that is stopped by signals while a request runs."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from test_command import service
from waiting import eventually

from benchmarks.ports import free_port
from kvrouter.processes import KvrouterProcess

PASSWORD = "pass-w0rd"


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    with service("simulate", "--step-ms=1") as (url, _):
        yield url


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def ask(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """The status and the body of an answer, with its headers."""
    address = urlsplit(url)
    assert address.hostname is not None
    connection = HTTPConnection(address.hostname, address.port, timeout=60)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        connection.request(method, path, data, {"content-type": "application/json"} | headers)
        answer = connection.getresponse()
        return answer.status, f"{answer.headers}{answer.read().decode()}"
    finally:
        connection.close()


def connected(url: str, data: bytes) -> socket.socket:
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    connection.sendall(data)
    return connection


COMPLETION = {"model": "simulated", "prompt": "a b c", "max_tokens": 2}


# Passwords


def test_passwords_in_urls_are_never_shown(worker: str, settings: Path) -> None:
    """Logs are checked at level debug with reachable, refusing and unknown workers."""
    host = worker.removeprefix("http://")
    urls = [
        f"http://user:{PASSWORD}@{where}" for where in (host, f"127.0.0.1:{free_port()}", "no-such-host.invalid:80")
    ]
    found = {"workers": [{"url": url} for url in urls], "replicas": {"redis": f"redis://:{PASSWORD}@127.0.0.1:1/0"}}
    settings.write_text(
        json.dumps(found | {"fleet": {"probe_timeout": 0.5, "probe_interval": 0.2}, "logs": {"access": True}})
    )
    answers, before = [], list[str]()
    options = (f"--config={settings}", "--port=0", "--log-level=debug")
    with service("serve", *options, before=before) as (url, process):
        deadline = time.monotonic() + 60
        while '"state":"new"' in ask(url, "/workers")[1].replace(" ", ""):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for _ in range(3):
            answers.append(ask(url, "/v1/completions", COMPLETION))
        paths = ("/health", "/metrics", "/workers", "/dump", "/v1/models", "/openapi.json")
        answers += [ask(url, path) for path in paths]
        answers.append(ask(url, "/explain", COMPLETION))
        answers.append(ask(url, "/workers", {"url": f"http://user:{PASSWORD}@127.0.0.1:1/../"}))
        answers.append(ask(url, "/workers", {"url": f"http://user:{PASSWORD}@169.254.169.254/"}))
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        logged = "".join(before) + process.stdout.read()
    assert [status for status, _ in answers[:3]] == [200, 200, 200]
    assert "no-such-host.invalid" in logged
    for secret in (PASSWORD, b64encode(f"user:{PASSWORD}".encode()).decode()):
        assert secret not in logged
        assert not [text for _, text in answers if secret in text]


# Two ports


@pytest.mark.parametrize("processes", [1, 2])
def test_admin_port_is_separate(worker: str, settings: Path, processes: int) -> None:
    admin = free_port()
    server = {"admin_port": admin, "processes": processes}
    settings.write_text(json.dumps({"workers": [{"url": worker}], "server": server}))
    with service("serve", f"--config={settings}", f"--port={free_port()}", "--log-level=error") as (clients, _):
        operators = f"http://127.0.0.1:{admin}"
        for path, body in (("/metrics", None), ("/workers", None), ("/ui", None), ("/reset_prefix_cache", {})):
            status, text = ask(clients, path, body)
            assert (status, "admin_port" in text) == (404, True), path
            assert ask(operators, path, body)[0] == 200, path
        question = {"model": "simulated", "token_ids": [1]}
        for _ in range(2):  # a repeated question is refused too
            assert ask(operators, "/query", question)[0] == 200
            assert ask(clients, "/query", question)[0] == 404
        for url in (clients, operators):
            assert ask(url, "/health")[0] == ask(url, "/v1/models")[0] == 200
            assert ask(url, "/v1/completions", COMPLETION)[0] == 200
        # The port is that of the connection, not that of a header.
        assert ask(clients, "/metrics", host=f"127.0.0.1:{admin}")[0] == 404
        assert ask(clients, "/metrics", **{"x-forwarded-port": str(admin), "forwarded": f"host=r:{admin}"})[0] == 404


def test_indexer_has_one_port(settings: Path) -> None:
    settings.write_text(json.dumps({"server": {"admin_port": free_port()}}))
    with service("indexer", f"--config={settings}", "--port=0", "--log-level=error") as (url, _):
        assert ask(url, "/metrics")[0] == 200


# The end


HALF_SENT = [
    b"POST /v1/comp",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nX: ",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n",
    b"POST /v1/files HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /match HTTP/1.1\r\nHost: r\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /register HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"GET /health HTTP/1.1\r\nHost: r\r\n\r\nPOST /match HTTP/1.1\r\nHost: r\r\nContent-Length: 9\r\n\r\n{",
]


@pytest.mark.parametrize("command", ["serve", "indexer"])
def test_incomplete_requests_do_not_delay_shutdown(worker: str, settings: Path, command: str) -> None:
    settings.write_text(json.dumps({"workers": [{"url": worker}]}))
    with ExitStack() as stack:
        with service(command, f"--config={settings}", "--port=0", "--log-level=error") as (url, process):
            for data in HALF_SENT:
                stack.enter_context(connected(url, data))
            assert ask(url, "/health")[0] == 200
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        assert time.monotonic() - began < 25  # the timeouts are 30 s for a head and 60 s for a body


# The index alone


def test_indexer_limits_request_size(settings: Path) -> None:
    settings.write_text(json.dumps({"server": {"max_body_bytes": 100_000, "body_timeout": 0.5}}))
    with service("indexer", f"--config={settings}", "--port=0", "--log-level=error") as (url, _):
        for path in ("/match", "/query", "/query_by_hash", "/register", "/unregister"):
            assert ask(url, path, b"x" * 100_001)[0] == 413
            head = f"POST {path} HTTP/1.1\r\nHost: r\r\n".encode()
            chunks = head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n") * 3
            slow = (head + b"Content-Length: 10\r\n\r\n{", head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
            for status, data in ((b"413", chunks), (b"408", slow[0]), (b"408", slow[1])):
                with connected(url, data) as connection:
                    assert connection.recv(4096).startswith(b"HTTP/1.1 %b " % status), (path, status)
            for body in (
                b"[" * 50_000,
                b'{"a":' * 20_000,
                b'{"model": NaN}',
                b"\xff",
                b'{"token_ids": [' + b"9" * 50_000 + b"]}",
            ):
                assert ask(url, path, body)[0] == 400, (path, body[:20])
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET /%2e%2e/health HTTP/1.1\r\nHost: r\r\n\r\n",
            b"GET * HTTP/1.1\r\n\r\n",
        ):
            with connected(url, data + b"\r\n\r\n") as connection:
                assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        assert ask(url, "/health")[0] == 200


# The page with the API


@pytest.mark.parametrize("command", ["serve", "indexer"])
def test_api_page_loads_no_external_files(worker: str, settings: Path, command: str) -> None:
    settings.write_text(json.dumps({"workers": [{"url": worker}]}))
    with service(command, f"--config={settings}", "--port=0", "--log-level=error") as (url, _):
        for path in ("/docs", "/redoc"):
            status, page = ask(url, path)
            assert status in (200, 403, 404)
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
            assert "cdn" not in page
        assert ask(url, "/docs", host="evil.example")[0] == 421


def test_api_page_needs_admin_token_with_tenants(worker: str, settings: Path) -> None:
    tenants = {"named": {"a": {"keys": ["0" * 64]}}}
    settings.write_text(json.dumps({"workers": [{"url": worker}], "server": {"token": "t"}, "tenants": tenants}))
    with service("serve", f"--config={settings}", "--port=0", "--log-level=error") as (url, _):
        for path in ("/docs", "/openapi.json"):
            assert ask(url, path)[0] == 401
            assert ask(url, path, authorization="Bearer t")[0] == 200


class Endless(BaseHTTPRequestHandler):
    """A worker whose completions never end."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/completions":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        with suppress(OSError):  # the router ends
            while True:
                self.wfile.write(b"data: {}\n\n")
                time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize(
    ("number", "drain_seconds", "processes"),
    [(signal.SIGTERM, 0, 1), (signal.SIGTERM, 60, 2), (signal.SIGINT, 60, 1), (signal.SIGINT, 0, 2)],
)
def test_a_second_signal_ends_the_router_at_once(
    number: signal.Signals, drain_seconds: int, processes: int, tmp_path: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as worker:
        worker.daemon_threads = True
        threading.Thread(target=worker.serve_forever, daemon=True).start()
        file = tmp_path / "config.yaml"
        file.write_text(
            f"server: {{port: 0, drain_seconds: {drain_seconds}, shutdown_timeout: 60, processes: {processes}}}\n"
            f"workers: [{{url: 'http://127.0.0.1:{worker.server_port}'}}]\n"
        )
        with KvrouterProcess(["serve", "--config", str(file)]) as router:
            url = router.wait_until_listening()
            body = b'{"model": "m", "prompt": "x", "stream": true}'
            with urlopen(
                Request(f"{url}/v1/completions", body, {"content-type": "application/json"}), timeout=60
            ) as stream:
                assert stream.readline() == b"data: {}\n"
                router.send_signal(number)
                with pytest.raises(subprocess.TimeoutExpired):
                    router.wait(1.0)  # the request has its time to finish
                router.send_signal(number)
                router.wait(30.0)  # not the 60 s of shutdown_timeout
            assert "Traceback" not in router.output()
        worker.shutdown()


def test_calls_that_wait_for_room_are_refused_before_a_signal_ends_the_router(settings: Path) -> None:
    small = ["simulate", "--port=0", "--step-ms=1", "--prefill-ms=0", "--blocks=256", "--max-model-len=4096"]
    with KvrouterProcess(small) as worker:
        workers = [{"url": worker.wait_until_listening()}]
        settings.write_text(json.dumps({"server": {"port": 0, "shutdown_timeout": 1}, "workers": workers}))
        with KvrouterProcess(["serve", f"--config={settings}"]) as router:
            url = router.wait_until_listening()
            answers: list[tuple[int, str]] = []

            def call(session: int, stream: bool = False) -> None:
                body = {"model": "simulated", "prompt": [session] * 3000, "max_tokens": 1, "stream": stream}
                answers.append(ask(url, "/v1/completions", body | {"session_id": f"session {session}"}))

            def closed() -> bool:  # each of two sessions evicts the other's context
                for session in (1, 2):
                    call(session)
                explained = {"request": {"model": "simulated", "prompt": [3], "session_id": "new"}}
                return '"gate":"closed"' in ask(url, "/explain", explained | {"path": "/v1/completions"})[1]

            eventually(closed)
            answers.clear()
            calls = [threading.Thread(target=call, args=(10 + number, number == 1)) for number in range(3)]
            for each in calls:
                each.start()
            eventually(lambda: '"working_set":3' in ask(url, "/health")[1])
            router.send_signal(signal.SIGTERM)
            for each in calls:
                each.join()
            assert router.wait(10.0) == 0
            for status, answer in answers:
                assert (status, '"code":"stopping"' in answer, "retry-after: 1" in answer) == (503, True, True)
            assert len(answers) == 3
            assert "were broken off" not in router.output()
