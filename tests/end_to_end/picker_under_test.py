"""A real picker on free ports of this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from envoy_client import DESTINATION, EnvoyStream, set_headers
from router_under_test import QUICK, RouterUnderTest, clients_of, serving
from scripted_worker import MODEL

from router.app.app import running_router
from router.picker import running_picker
from router.server.http_server import HttpServer
from router.settings import Settings

PATH = "/v1/completions"
JSON = ("content-type", "application/json")
STREAM = ("content-type", "text/event-stream")
Headers = Iterable[tuple[str, str]]
BODY = json.dumps({"model": MODEL, "prompt": "some words", "stream": True}).encode()


@dataclass
class PickerUnderTest:
    """A picker, a channel to it, and the addresses of its workers."""

    side: RouterUnderTest
    channel: Any
    addresses: list[str]

    def stream(self, *modes: int, **options: Any) -> EnvoyStream:
        return EnvoyStream(self.channel, *modes, **options)

    async def sent(
        self, *modes: int, path: str = PATH, body: bytes = BODY, headers: Headers = (), **options: Any
    ) -> EnvoyStream:
        """Open a stream and send the head and the body of a request."""
        stream = self.stream(*modes, **options)
        await stream.head(path, JSON, *headers)
        await stream.body(body)
        return stream

    async def routed(self, *modes: int, body: bytes = BODY, **options: Any) -> tuple[EnvoyStream, str]:
        """Return a stream whose request has been routed, and the chosen endpoints."""
        stream = await self.sent(*modes, body=body, **options)
        head = await stream.receive()
        assert head.HasField("request_headers"), head
        await stream.receive()
        return stream, set_headers(head.request_headers.response.header_mutation)[DESTINATION]


@asynccontextmanager
async def picker(*workers: str, **sections: Any) -> AsyncIterator[tuple[RouterUnderTest, int]]:
    """Run a picker in front of workers, and yield its HTTP side and its port for Envoy."""
    sections["picker"] = {"port": 0, **sections.get("picker", {})}
    sections["server"] = {"shutdown_timeout": 0, **sections.get("server", {})}
    settings = Settings(**{"workers": [{"url": url} for url in workers], "fleet": QUICK, **sections})
    async with (
        running_router(settings) as app,
        running_picker(app, settings) as port,
        serving(HttpServer(app, shutdown_timeout=1)) as url,
        clients_of(url) as side,
    ):
        yield side, port
