"""A worker with minimal work: python -m benchmarks.proxy.raw_worker CORE PORT…

It reports its model, and answers every POST: whole with a few words, or streamed in `CHUNKS` events, `PAUSE` apart. A
request of one token is answered with one event.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys

import uvloop

from benchmarks.proxy.prompts import MODEL

CHUNKS = 64
PAUSE = 0.01
# Without prompt_tokens: one number for all prompts would count as a tokenizer that differs from the router's.
ANSWER = (
    b'{"id":"chat-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":" hello there"},"finish_reason":"length"}],"usage":{"completion_tokens":3}}'
)
MODELS = b'{"object":"list","data":[{"id":"%b","object":"model"}]}' % MODEL.encode()
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chat-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"content":" word"},"finish_reason":null}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"
# The end of a stream: in chunks, or with a length if all of it was sent at once.
STREAM_ENDS = (b"0\r\n\r\n", _DONE)
_ONE_TOKEN = re.compile(rb'"max_tokens": ?1[,}]')


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class _Worker(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._loop = asyncio.get_running_loop()
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            place = head.find(b"content-length:")
            length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self._received) < end + 4 + length:
                return
            body = self._received[end + 4 : end + 4 + length]
            self._received = self._received[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post") and (
            b'"stream": true' in body or b'"stream":true' in body
        ):  # some routers encode the body again
            self._transport.write(_STREAM + _chunk(EVENT))
            self._loop.call_later(PAUSE, self._next, 0 if _ONE_TOKEN.search(body) else CHUNKS - 1)
        elif head.startswith(b"post"):
            self._transport.write(_whole(ANSWER))
        elif b"/v1/models" in head:
            self._transport.write(_whole(MODELS))
        elif head.startswith(b"get /health"):
            self._transport.write(_whole(b"{}"))
        else:
            self._transport.write(_whole(b"{}", b"404 Not Found"))

    def _next(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(_chunk(EVENT))
            self._loop.call_later(PAUSE, self._next, left - 1)
        else:
            self._transport.write(_chunk(_DONE) + b"0\r\n\r\n")


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Worker, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    uvloop.run(_serve([int(port) for port in sys.argv[2:]]))
