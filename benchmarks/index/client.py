"""One keep-alive connection with as little of its own in the measured time as Python allows."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec


class HttpError(Exception):
    """An answer that is not 2xx."""


def post_request(path: str, body: Any) -> bytes:
    """A whole POST request with a JSON body, ready to be sent again and again."""
    content = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


# Servers close connections that nobody uses for longer.
_IDLE_SECONDS = 2.0


class Client:
    """Sends whole requests, reads whole answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._used = time.monotonic()

    def exchange(self, request: bytes) -> bytes:
        """Send a request; the body of its answer. Raises HttpError."""
        now = time.monotonic()
        if now - self._used > _IDLE_SECONDS:
            self._socket.close()
            self._connect()
        self._used = now
        self._socket.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._receive()
        head = data[:end].lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        while len(data) < end + 4 + length:
            data += self._receive()
        body = data[end + 4 :]
        if not head.startswith(b"http/1.1 2"):
            raise HttpError(f"{head[:80].decode()}: {body[:300].decode(errors='replace')}")
        return body

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the indexer closed the connection")
        return data
