"""A real picker on free ports of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
from router_under_test import QUICK, RouterUnderTest, serving

from router.app import running_router
from router.picker import running_picker
from router.server.http_server import HttpServer
from router.settings import Settings


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
        aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(20)) as session,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield RouterUnderTest(url, session, client), port
