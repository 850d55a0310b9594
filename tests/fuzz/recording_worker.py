"""A worker that answers at once, and keeps what it got under the number that the client gave it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

_MODELS = b'{"data": [{"id": "m"}]}'
# A request's number where its head has none.
_NUMBER = re.compile(rb'\{"#": ([0-9]+),')
# What a router asks every worker by itself; clients' requests have a number.
_QUESTIONS = frozenset({b"/kv_event_sources", b"/server_info", b"/metrics", b"/tokenize"})


@dataclass(slots=True)
class Got:
    """A request as it arrived. Names of headers are in lower case."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class RecordingWorker:
    """Serves the model `m`. `got`: by number, which a header or the body has.

    `stray`: those that have none, or one that was there before.
    """

    def __init__(self) -> None:
        self.got: dict[bytes, Got] = {}
        self.stray: list[Got] = []
        self._transports: set[asyncio.Transport] = set()

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for transport in list(self._transports):
            transport.abort()
        await asyncio.sleep(0)

    def answer(self, request: Got) -> bytes:
        """Keep it, unless it is a question of the router's."""
        status, body = b"200 OK", b"{}"
        numbers = [value for name, value in request.headers if name == b"x-fuzz"]
        if in_body := _NUMBER.match(request.body):
            numbers.append(in_body[1])
        if not numbers and request.target == b"/v1/models":
            body = _MODELS
        elif not numbers and (request.target in _QUESTIONS or request.target.endswith(b"/render")):
            status = b"404 Not Found"
        elif len(numbers) == 1 and numbers[0] not in self.got:
            self.got[numbers[0]] = request
        else:
            self.stray.append(request)
        if request.method == b"HEAD":
            body = b""
        return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)

    def made(self, transport: asyncio.Transport) -> None:
        self._transports.add(transport)

    def lost(self, transport: asyncio.Transport) -> None:
        self._transports.discard(transport)


class _Connection(asyncio.Protocol):
    """Reads what this project's router sends, and nothing else: a length wherever there is a body, no pipelining."""

    def __init__(self, worker: RecordingWorker) -> None:
        self._worker = worker
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._worker.made(transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._worker.lost(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        first, *lines = head.split(b"\r\n")
        method, target, _ = first.split(b" ")
        headers = [(name.lower(), value) for name, _, value in (line.partition(b": ") for line in lines)]
        length = next((int(value) for name, value in headers if name == b"content-length"), 0)
        if len(body) < length:
            return
        self._data = b""
        request = Got(method, target, headers, body)
        if len(body) > length:  # a request within another
            self._worker.stray.append(request)
            self._transport.abort()
        else:
            self._transport.write(self._worker.answer(request))
