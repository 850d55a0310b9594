"""Simulated prefill and decode workers, and their metrics after a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from router_under_test import RouterUnderTest, router, until
from simulated_workers import simulated_workers

MODEL = "simulated"
STYLES = ["sglang", "nixl"]


@dataclass
class Pairs:
    """The URLs of prefill and decode workers of one style, and a client session."""

    style: str
    prefills: list[str]
    decodes: list[str]
    session: aiohttp.ClientSession

    @property
    def known(self) -> list[dict[str, str]]:
        """The workers as in the router's settings. SGLang's workers report their role themselves."""
        roles = {url: role for role, urls in (("prefill", self.prefills), ("decode", self.decodes)) for url in urls}
        return [{"url": url} if self.style == "sglang" else {"url": url, "role": role} for url, role in roles.items()]

    async def ask(self, url: str, **body: Any) -> tuple[int, Any]:
        """Send a completion to one worker, and return the status and the answer."""
        async with self.session.post(f"{url}/v1/completions", json={"model": MODEL, **body}) as response:
            return response.status, await response.json()

    async def room(self, number: int | list[int]) -> dict[str, Any]:
        """Return the fields that an SGLang router adds to a request for the first prefill worker."""
        async with self.session.get(f"{self.prefills[0]}/server_info") as response:
            port = (await response.json())["disaggregation_bootstrap_port"]
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": number}

    async def metric(self, name: str, *urls: str) -> float:
        """Return the sum of a metric over the given workers, or over all."""
        total = 0.0
        for url in urls or (*self.prefills, *self.decodes):
            async with self.session.get(f"{url}/metrics") as response:
                text = await response.text()
            families = text_string_to_metric_families(text)
            total += sum(sample.value for family in families for sample in family.samples if sample.name == name)
        return total

    async def until_nothing_is_left(self, seconds: float = 60) -> None:
        """Wait until no request, room, block in use or quarantined page is left."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        names += ("simulated:kv_rooms", "simulated:kv_pages_quarantined")

        async def nothing() -> bool:
            return not any([await self.metric(name) for name in names])

        await until(nothing, seconds=seconds)


def new_session() -> aiohttp.ClientSession:
    """Return a session for direct requests to workers, which opens a connection for each.

    A kept connection may be closed by the worker as it is used again.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(20))


@asynccontextmanager
async def simulated_pairs(
    style: str, prefills: int = 1, decodes: int = 1, prefill: Any = None, decode: Any = None, **settings: Any
) -> AsyncIterator[Pairs]:
    """Run workers on this event loop. `prefill` and `decode` are settings of one role only."""
    async with AsyncExitStack() as stack:
        urls: dict[str, list[str]] = {}
        for role, count, more in (("prefill", prefills, prefill), ("decode", decodes, decode)):
            each = settings | (more or {}) | {"disaggregation": style, "role": role}
            urls[role] = await stack.enter_async_context(simulated_workers(count, **each))
        session = await stack.enter_async_context(new_session())
        yield Pairs(style, urls["prefill"], urls["decode"], session)


@asynccontextmanager
async def routed(pairs: Pairs, **sections: Any) -> AsyncIterator[RouterUnderTest]:
    """Run a router in front of pairs, and wait until it follows their events. Short prompts have pairs as well."""
    forced = {"disaggregation": {"decode_computes": False}}
    async with router(**{"workers": pairs.known, **forced, **sections}) as front:
        await front.until_live()
        yield front
