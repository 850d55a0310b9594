"""A router that is stopped by signals while a request runs."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from kvrouter.processes import KvrouterProcess


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
