"""A real picker on free ports of this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from envoy_client import DESTINATION, EnvoyStream, set_headers
from router_under_test import QUICK, TIMEOUT, RouterUnderTest, plain_client, serving
from scripted_worker import MODEL

from router.app.app import running_router
from router.picker import running_picker
from router.server.http_server import HttpServer
from router.settings import Settings

PATH = "/v1/completions"
JSON = ("content-type", "application/json")
STREAM = ("content-type", "text/event-stream")
BODY = json.dumps({"model": MODEL, "prompt": "some words", "stream": True}).encode()


@dataclass
class Asked:
    """A picker, a channel to it, and the addresses of its workers."""

    side: RouterUnderTest
    channel: Any
    addresses: list[str]

    def stream(self, *modes: int, **options: Any) -> EnvoyStream:
        return EnvoyStream(self.channel, *modes, **options)

    async def routed(self, *modes: int, body: bytes = BODY, **options: Any) -> tuple[EnvoyStream, str]:
        """A stream whose request has been sent somewhere, and where."""
        stream = self.stream(*modes, **options)
        await stream.head(PATH, JSON)
        await stream.body(body)
        head = await stream.hears()
        assert head.HasField("request_headers"), head
        await stream.hears()
        return stream, set_headers(head.request_headers.response.header_mutation)[DESTINATION]


@asynccontextmanager
async def picker(*workers: str, **sections: Any) -> AsyncIterator[tuple[RouterUnderTest, int]]:
    """A picker in front of workers: its HTTP side, and the port for Envoy."""
    sections["picker"] = {"port": 0, **sections.get("picker", {})}
    sections["server"] = {"shutdown_timeout": 0, **sections.get("server", {})}
    settings = Settings(**{"workers": [{"url": url} for url in workers], "fleet": QUICK, **sections})
    async with (
        running_router(settings) as app,
        running_picker(app, settings) as port,
        serving(HttpServer(app, shutdown_timeout=1)) as url,
        aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(TIMEOUT)) as session,
        plain_client(url) as client,
    ):
        yield RouterUnderTest(url, session, client), port
