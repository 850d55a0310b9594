"""Requests that come by ASGI: their bodies are collected, and their answers sent as they come. Nothing is buffered."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from http_api.errors import RequestError
from router.forwarding.failover.resumable_proxied_request import new_proxied_request
from router.forwarding.proxied_request import ProxiedRequest
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContexts, context_of
from router.forwarding.response_writer import ResponseWriter
from router.forwarding.routing_headers import RoutingHeaders
from router.http.response_head import LENGTH, WITHOUT_BODY
from router.settings import ServerSettings
from router.upstream import ResponseHead

# An answer of which more is held for a client that does not read is not read on.
_HELD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ProxyContext:
    """What a server needs to take in requests for workers."""

    contexts: RequestContexts
    services: ProxyServices
    settings: ServerSettings


class Proxy:
    """An ASGI application that forwards requests to workers."""

    def __init__(self, proxy_context: ProxyContext) -> None:
        self._services = proxy_context.services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer()
        proxied = new_proxied_request(self._services, context_of(scope), answer)
        answer.proxied = proxied
        try:
            body = await _read_body(receive)
        except RequestError as error:
            proxied.refuse(error)
        else:
            if body is None:
                proxied.client_left()
                return
            proxied.start(body)
        leaving = asyncio.create_task(_disconnected(receive))
        leaving.add_done_callback(lambda _: answer.client_left())
        try:
            while (message := await answer.next_message()) is not None:
                await send(message)
        finally:
            proxied.client_left()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            # They know each other: nothing of the request is to wait for the garbage collector.
            answer.proxied = None


class _Answer(ResponseWriter):
    """An answer on its way from the proxied request to ASGI's `send`."""

    def __init__(self) -> None:
        self.proxied: ProxiedRequest | None = None
        self._messages: deque[Message] = deque()
        self._held = 0
        self._paused = False
        self._over = False
        self._something = asyncio.Event()

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:
        headers = [*head.passed_on, *(ours.headers() if ours is not None else ())]
        if ended and not head.length and head.status not in WITHOUT_BODY:
            headers.append((LENGTH, b"%d" % len(data)))
        self._messages.append({"type": "http.response.start", "status": head.status, "headers": headers})
        self.more(data, ended)

    def more(self, data: bytes, ended: bool) -> None:
        if data or ended:
            self._messages.append({"type": "http.response.body", "body": data, "more_body": not ended})
        self._held += len(data)
        self._over = ended
        if self._held > _HELD_BYTES and not ended and not self._paused and self.proxied is not None:
            self._paused = True
            self.proxied.pause()
        self._something.set()

    def break_off(self) -> None:
        self._over = True  # returning before the end of the body makes the server close the connection
        self._something.set()

    def client_left(self) -> None:
        """The rest is not wanted any more."""
        if self.proxied is not None:
            self.proxied.client_left()
        self._messages.clear()
        self.break_off()

    async def next_message(self) -> Message | None:
        """What to send next; None at the end."""
        while not self._messages:
            if self._over:
                return None
            self._something.clear()
            await self._something.wait()
        message = self._messages.popleft()
        self._held -= len(message.get("body", b""))
        if self._paused and not self._messages and self.proxied is not None:
            self._paused = False
            self.proxied.resume()
        return message


async def _read_body(receive: Receive) -> bytes | None:
    """A request's body; None when the client left before its end. Raises RequestError as `ArrivingBody` does."""
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
