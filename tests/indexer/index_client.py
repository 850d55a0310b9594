"""The index API served over HTTP, and a client of it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import uvicorn
from waiting import eventually

from http_api.errors import RequestError
from indexer import Indexer, MatchQuery, Registration
from indexer.api.questions import Questions
from indexer.api.routes import indexer_app


class Client:
    """A client that sends and receives JSON over one HTTP connection."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def get(self, path: str) -> tuple[int, Any]:
        status, body = self.request("GET", path)
        return status, json.loads(body)

    def post(self, path: str, body: Any, authorization: str = "") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = self.request("POST", path, data, authorization)
        return status, json.loads(answer)

    def request(self, method: str, path: str, body: bytes | None = None, authorization: str = "") -> tuple[int, bytes]:
        headers = {"content-type": "application/json"} | ({"authorization": authorization} if authorization else {})
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


async def read_match(body: bytes) -> MatchQuery:
    """Decode a `/match` body with the prompt's token ids."""
    try:
        return MatchQuery(**msgspec.json.decode(body))
    except msgspec.DecodeError as error:
        raise RequestError(str(error)) from error


async def admit(registration: Registration) -> Registration:
    """Allow every registration."""
    return registration


@contextmanager
def served(indexer: Indexer) -> Iterator[Client]:
    """Serve an indexer, which the caller starts and stops, and yield a client."""
    app = indexer_app(indexer, Questions(indexer, read_match), admit)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", ws="none", timeout_keep_alive=600)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        with closing(Client(server.servers[0].sockets[0].getsockname()[1])) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
