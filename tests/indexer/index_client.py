"""A client of the index API."""

from __future__ import annotations

import http.client
import json
from typing import Any


class Client:
    """JSON over one HTTP connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=15)

    def get(self, path: str) -> tuple[int, Any]:
        status, body = self.request("GET", path)
        return status, json.loads(body)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, answer = self.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())
        return status, json.loads(answer)

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self._connection.request(method, path, body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()
