"""The state of a fleet, assembled from the updates of a router's `/live`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from router.http.client import connection_problem, refuse_redirects

SILENCE = 10.0  # seconds without an update; usually one arrives every second
_MAX_LINE = 64 * 2**20  # the first update has all ranks


class FeedError(Exception):
    """A feed that cannot be read. The message has the reason."""


@dataclass(slots=True)
class Fleet:
    """The fleet after its last update: ranks by their key, totals, the last point of the series, and requests."""

    ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    point: dict[str, Any] = field(default_factory=dict)
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def take(self, update: dict[str, Any]) -> None:
        """Apply an update."""
        for key in update["gone"]:
            self.ranks.pop(key, None)
        self.ranks |= update["ranks"]
        self.totals = update["totals"]
        self.about = update.get("about", self.about)
        self.findings = update.get("findings", self.findings)
        if update["series"]:
            self.point = update["series"][-1]
        self.requests |= {seen["number"]: seen for seen in update["requests"]}
        while len(self.requests) > 64:
            del self.requests[min(self.requests)]


async def follow(url: str, token: str) -> AsyncIterator[Fleet]:
    """Yield the fleet after each update, until the router ends. Raises FeedError."""
    fleet = Fleet()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE)
    try:
        async with (
            aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=timeout, read_bufsize=_MAX_LINE) as session,
            session.get(f"{url.rstrip('/')}/live", headers=headers) as response,
        ):
            if response.status in (401, 403):
                raise FeedError(f"{url} needs the admin token: set --token")
            if response.status != 200 or response.content_type != "text/event-stream":
                raise FeedError(f"{url} answers {response.status}: is this a router's URL?")
            async for line in response.content:
                if line.startswith(b"data: "):
                    fleet.take(msgspec.json.decode(line[6:]))
                    yield fleet
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise FeedError(f"{url}: {connection_problem(error)}") from error
