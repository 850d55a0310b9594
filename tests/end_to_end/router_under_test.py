"""A real router on a free port of this process, and the ways its users talk to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
from multidict import CIMultiDictProxy
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from router.app.app import running_router
from router.server.http_server import HttpServer
from router.server.sockets import listen
from router.settings import Settings, SettingsFile

TIMEOUT = 60.0
# A machine that pauses for seconds makes no worker look dead or hung.
PATIENT = {"probe_timeout": 30.0, "stall_seconds": 30.0}
QUICK = {"probe_interval": 0.2, "retry_interval": 0.1, **PATIENT}


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error of OpenAI's error body."""
        return self.json()["error"]

    @property
    def worker(self) -> str:
        return self.headers["x-kvrouter-worker"]

    @property
    def overlap(self) -> int:
        """Tokens of the prompt that the router expected in the worker's cache."""
        return int(self.headers["x-kvrouter-overlap-tokens"])

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the worker found in its cache."""
        return int(self.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


class RouterUnderTest:
    """A running router."""

    def __init__(self, url: str, session: aiohttp.ClientSession, client: openai.AsyncOpenAI) -> None:
        self.url = url
        self.session = session
        self.openai = client

    def request(
        self, path: str, body: Any = None, method: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """A request whose answer is read as it comes; bytes are sent as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        url = URL(self.url + path, encoded=True)
        headers = {"content-type": "application/json", **(headers or {})}
        return self.session.request(method, url, data=data, headers=headers, allow_redirects=False)

    async def call(self, path: str, body: Any = None, method: str | None = None, **options: Any) -> Reply:
        """A request and its whole answer."""
        async with self.request(path, body, method, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def workers(self) -> list[dict[str, Any]]:
        """What `/workers` tells."""
        workers: list[dict[str, Any]] = (await self.call("/workers")).json()["workers"]
        return workers

    async def loads(self) -> list[Mapping[str, int]]:
        """The load of every rank of every worker."""
        return [rank["load"] for worker in await self.workers() for rank in worker["ranks"]]

    async def requests_in_flight(self) -> int:
        return sum(load["requests"] for load in await self.loads())

    async def until_released(self) -> None:
        """Wait until nothing is in flight, and see that nothing else is left of it."""

        async def released() -> bool:
            return await self.requests_in_flight() == 0

        await until(released)
        assert all(load == {"requests": 0, "pending": 0, "context": 0} for load in await self.loads())

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        text = (await self.call("/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def plain_client(url: str) -> openai.AsyncOpenAI:
    """OpenAI's own client, without the certificates that plain HTTP does not need: reading them takes 20 ms."""
    http = openai.DefaultAsyncHttpxClient(verify=False, timeout=TIMEOUT)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT, http_client=http)


@asynccontextmanager
async def router(*workers: str, file: SettingsFile | None = None, **sections: Any) -> AsyncIterator[RouterUnderTest]:
    """A router in front of workers. `sections` are those of the settings, `file` where they can be read again."""
    settings = Settings(**{"workers": [{"url": url} for url in workers], "fleet": QUICK, **sections})
    async with (
        running_router(settings, file) as app,
        serving(HttpServer(app, shutdown_timeout=1)) as url,
        aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(TIMEOUT)) as session,
        plain_client(url) as client,
    ):
        yield RouterUnderTest(url, session, client)


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[str]:
    """Run a server on a free port; its URL."""
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running


async def raw(routed: RouterUnderTest, request: bytes, half_close: bool = False) -> bytes:
    """Send bytes; everything that comes until the connection is closed."""
    address = urlsplit(routed.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request)
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - the condition is another's
            await asyncio.sleep(0.01)
