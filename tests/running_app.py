"""An aiohttp application on a free port."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def running_app(app: web.Application, ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run an application, with TLS if `ssl_context` is given. Yield its URL."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl_context).start()
        yield f"{'http' if ssl_context is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
