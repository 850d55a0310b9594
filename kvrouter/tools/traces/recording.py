"""`kvrouter record --requests`: the requests of a router, as a trace in Mooncake's format.

The router reports hashes. They are numbered in the order of their arrival, so that a trace contains nothing derived
from a prompt. A line is written when its request ends; at the end, the lines are sorted by arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvevents.decoding import read_json
from router.http.client import connection_problem, refuse_redirects
from simulator.fleet.trace import BLOCK_TOKENS, TraceHead, TraceLine

SILENCE = 15.0  # seconds of silence after which the router is lost; it reports every second
LAST_SECONDS = 0.3  # seconds of reading after the stop signal
_MAX_LINE = 1 << 24


class RecordingError(Exception):
    """A router that does not report its requests. The message has the reason."""


@dataclass(slots=True)
class RecordedRequests:
    """The counts of a recording. `broken_off` is why the recording ended early."""

    requests: int = 0
    tokens: int = 0
    dropped: int = 0
    unknown: int = 0
    broken_off: str = ""

    def as_json(self, output: Path) -> dict[str, Any]:
        """Return the counts, for scripts."""
        return {
            "output": str(output),
            "requests": self.requests,
            "tokens": self.tokens,
            "dropped": self.dropped,
            "unknown": self.unknown,
            "broken_off": self.broken_off or None,
        }

    def summary(self, output: Path) -> list[str]:
        """Return the counts as lines of text."""
        lines = [f"recorded {self.requests} requests of {self.tokens} prompt tokens to {output}"]
        if self.dropped:
            lines.append(f"{self.dropped} requests are missing: they arrived faster than they were read")
        if self.unknown:
            lines.append(f"{self.unknown} requests are omitted: the router does not know their tokens")
        if self.broken_off:
            lines.append(f"the recording ended early: {self.broken_off}")
        return lines


async def record_requests(
    url: str, token: str, output: Path, block_tokens: int, stopped: asyncio.Event, on_begun: Callable[[], None]
) -> RecordedRequests:
    """Record until `stopped`. `on_begun` is called once the router answers. Raises RecordingError and OSError."""
    recorded = RecordedRequests()
    reading = asyncio.create_task(_read(url, token, output, block_tokens, recorded, on_begun))
    stopping = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():  # requests that just ended are still in transit
            await asyncio.wait((reading,), timeout=LAST_SECONDS)
    finally:
        for task in (reading, stopping):
            task.cancel()
        await asyncio.gather(reading, stopping, return_exceptions=True)
    if not reading.cancelled():
        reading.result()
    if recorded.requests:
        _sort(output)
    return recorded


async def _read(
    url: str, token: str, output: Path, block_tokens: int, recorded: RecordedRequests, on_begun: Callable[[], None]
) -> None:
    """Write the router's reports on arrival, so that an abrupt end loses little."""
    encode = msgspec.json.Encoder().encode
    numbers: dict[int, int] = {}
    begun = False
    try:
        async with aclosing(_lines(url, token, block_tokens)) as lines:
            await anext(lines)
            begun = True
            with output.open("wb") as file:
                if block_tokens != BLOCK_TOKENS:
                    file.write(encode(TraceHead(block_tokens)) + b"\n")
                on_begun()
                async for line in lines:
                    if "timestamp" not in line:
                        recorded.dropped, recorded.unknown = line["dropped"], line["unknown"]
                        file.flush()
                        continue
                    traced = msgspec.convert(line, TraceLine)
                    traced.hash_ids = [numbers.setdefault(known, len(numbers)) for known in traced.hash_ids]
                    file.write(encode(traced) + b"\n")
                    recorded.requests += 1
                    recorded.tokens += traced.input_length
        recorded.broken_off = "the router ended"
    except StopAsyncIteration:
        raise RecordingError(f"{url} sends nothing: is this a router's URL?") from None
    except RecordingError as error:
        if not begun:
            raise
        recorded.broken_off = str(error)


def _sort(output: Path) -> None:
    lines = output.read_bytes().splitlines(keepends=True)
    head = [line for line in lines[:1] if line.startswith(b'{"block_tokens"')]
    beside = output.with_name(f"{output.name}.sorted")
    beside.write_bytes(b"".join(head + sorted(lines[len(head) :], key=_timestamp)))
    beside.replace(output)


def _timestamp(line: bytes) -> float:
    return read_json(line, TraceLine).timestamp


async def _lines(url: str, token: str, block_tokens: int) -> AsyncGenerator[dict[str, Any], None]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE)
    try:
        async with (
            aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=timeout, read_bufsize=_MAX_LINE) as session,
            session.get(
                f"{url.rstrip('/')}/requests", params={"block_tokens": block_tokens}, headers=headers
            ) as response,
        ):
            if response.status in (401, 403):
                raise RecordingError(f"{url} needs the admin token: set --token")
            if response.status != 200 or response.content_type != "application/x-ndjson":
                raise RecordingError(f"{url} answers {response.status}: {await _reason(response)}")
            async for line in response.content:
                yield read_json(line)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise RecordingError(f"{url}: {connection_problem(error)}") from error


async def _reason(response: aiohttp.ClientResponse) -> str:
    with suppress(Exception):
        return str(read_json(await response.read())["error"]["message"])
    return "is this a router's URL?"
