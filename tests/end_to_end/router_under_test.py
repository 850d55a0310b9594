"""A real router on a free port of this process, and clients of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
from constants import changed
from multidict import CIMultiDictProxy
from prometheus_client.parser import text_string_to_metric_families
from waiting import until
from yarl import URL

from router.app.app import running_router
from router.server.http_server import HttpServer
from router.server.sockets import listen
from router.settings import Settings, SettingsFile

TIMEOUT = 60.0
# Timeouts that a busy machine does not exceed, so that no worker counts as dead or hung.
PATIENT = {"probe_timeout": 30.0, "stall_seconds": 30.0}
QUICK = {"probe_interval": 0.2, **PATIENT}


@dataclass(frozen=True)
class Reply:
    """A complete response."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The `error` object of OpenAI's error body."""
        return self.json()["error"]

    @property
    def worker(self) -> str:
        return self.headers["x-kvrouter-worker"]

    @property
    def overlap(self) -> int:
        """The prompt tokens that the router predicted in the worker's cache."""
        return int(self.headers["x-kvrouter-overlap-tokens"])

    @property
    def cached(self) -> int:
        """The prompt tokens that the worker reports as cached."""
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
        """Send a request and return its response before the body is read. A body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        url = URL(self.url + path, encoded=True)
        headers = {"content-type": "application/json", **(headers or {})}
        return self.session.request(method, url, data=data, headers=headers, allow_redirects=False)

    async def call(self, path: str, body: Any = None, method: str | None = None, **options: Any) -> Reply:
        """Send a request and return its complete response."""
        async with self.request(path, body, method, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def workers(self) -> list[dict[str, Any]]:
        """Return the workers of the report `/workers`."""
        workers: list[dict[str, Any]] = (await self.call("/workers")).json()["workers"]
        return workers

    async def loads(self) -> list[Mapping[str, int]]:
        """Return the load of every rank of every worker."""
        return [rank["load"] for worker in await self.workers() for rank in worker["ranks"]]

    async def requests_in_flight(self) -> int:
        return sum(load["requests"] for load in await self.loads())

    async def until_released(self) -> None:
        """Wait until no request is in flight, and assert that no load is left."""
        await until(self.requests_in_flight, lambda count: count == 0)
        assert all(load == {"requests": 0, "pending": 0, "context": 0} for load in await self.loads())

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric with these labels."""
        text = (await self.call("/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until_metric(self, value: float, name: str, **labels: str) -> None:
        """Wait until a metric has a value."""
        await until(lambda: self.metric(name, **labels), lambda found: found == value)

    async def until_live(self) -> None:
        """Wait until the event stream of every rank is live, and no trial of a tokenizer runs."""

        def live(workers: list[dict[str, Any]]) -> bool:
            ranks = [each["ranks"] for each in workers]
            return bool(ranks) and all(each and all(rank["state"] == "live" for rank in each) for each in ranks)

        await until(self.workers, live)
        await self.until_tokenizers_are_tried()

    async def until_up(self, count: int = 1) -> None:
        """Wait until a number of workers answers."""
        await until(self.health, lambda health: health["workers_up"] == count)

    async def until_queued(self, count: int) -> None:
        """Wait until a number of requests waits in the queue."""
        await until(self.queued, lambda queued: queued == count)

    async def queued(self) -> int:
        """Return the number of requests in the queue."""
        return sum((await self.health())["queue"].values())

    async def health(self) -> Any:
        """Return the report `/health`."""
        return (await self.call("/health")).json()

    async def findings(self) -> list[dict[str, Any]]:
        """Return the findings of the report `/health`."""
        found: list[dict[str, Any]] = (await self.health())["findings"]
        return found

    async def until_tokenizers_are_tried(self) -> None:
        """Wait until no trial of a tokenizer runs, because prompts are routed by load until then."""
        await until(self.health, lambda health: "trial running" not in health["tokenizers"].values())


def plain_client(url: str) -> openai.AsyncOpenAI:
    """Make an OpenAI client without certificates, because reading them takes 20 ms."""
    http = openai.DefaultAsyncHttpxClient(verify=False, timeout=TIMEOUT)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT, http_client=http)


@asynccontextmanager
async def router(
    *workers: str, file: SettingsFile | None = None, constants: Mapping[str, Any] = {}, **sections: Any
) -> AsyncIterator[RouterUnderTest]:
    """Run a router in front of workers.

    `sections` are sections of the settings, `file` is a settings file that is read again when it changes. `constants`
    have other values meanwhile.
    """
    settings = Settings(**{"workers": [{"url": url} for url in workers], "fleet": QUICK, **sections})
    with changed(**constants):
        async with _running(settings, file) as routed:
            yield routed


@asynccontextmanager
async def _running(settings: Settings, file: SettingsFile | None) -> AsyncIterator[RouterUnderTest]:
    """Run a router with its clients."""
    async with (
        running_router(settings, file) as app,
        serving(HttpServer(app, shutdown_timeout=1)) as url,
        clients_of(url) as routed,
    ):
        yield routed


@asynccontextmanager
async def clients_of(url: str) -> AsyncIterator[RouterUnderTest]:
    """Connect clients to the URL of a running router."""
    async with (
        aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(TIMEOUT)) as session,
        plain_client(url) as client,
    ):
        yield RouterUnderTest(url, session, client)


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[str]:
    """Run a server on a free port and yield its URL."""
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running


async def raw(routed: RouterUnderTest, request: bytes, half_close: bool = False) -> bytes:
    """Send bytes, and return all bytes received until the connection is closed."""
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
