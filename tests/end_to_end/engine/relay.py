"""An address behind which an engine can be exchanged for another, while no connection breaks."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

# Paths that the first engine always answers: its process and its streams would reveal the other engine.
_SIGNS = ("/metrics", "/kv_event_sources")
_NOT_RELAYED = ("connection", "content-length", "transfer-encoding", "host")
_SECONDS = 60.0


class Relay(ThreadingHTTPServer):
    """A server that sends requests to `engine`, the URL of one of two engines."""

    daemon_threads = True

    def __init__(self, first: str) -> None:
        super().__init__(("127.0.0.1", 0), _Exchange)
        self.first = self.engine = first

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def running(self) -> Iterator[Relay]:
        """Serve until the context ends."""
        thread = Thread(target=self.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def do_GET(self) -> None:
        self._relay()

    def do_POST(self) -> None:
        self._relay()

    def _relay(self) -> None:
        """Send a request on, and its whole answer back."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        engine = self.server.first if self.path in _SIGNS else self.server.engine
        connection = http.client.HTTPConnection(urlsplit(engine).netloc, timeout=_SECONDS)
        try:
            connection.request(self.command, self.path, body, _relayed(self.headers.items()))
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        self.send_response_only(response.status)
        for name, value in _relayed(response.getheaders()).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def _relayed(headers: list[tuple[str, str]]) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _NOT_RELAYED}
