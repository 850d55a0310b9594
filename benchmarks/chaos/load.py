"""Concurrent streams through a router, and their results."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import count

import aiohttp

MODEL = "simulated"
ATTEMPT_TIMEOUT = 60.0

_WORDS = " ".join(f"word{number}" for number in range(60))
_numbers = count()


@dataclass(slots=True)
class Stream:
    """One streamed completion.

    `worker` answered it after `attempts` attempts. `first_byte` is seconds, `None` without one.
    """

    began: float
    worker: str = ""
    attempts: int = 1
    first_byte: float | None = None
    complete: bool = False
    problem: str = ""


async def keep_streaming(url: str, streams: int, seconds: float, tokens: int) -> list[Stream]:
    """Keep `streams` streams of `tokens` tokens open for `seconds` seconds. Return when the last has ended."""
    seen: list[Stream] = []
    deadline = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=ATTEMPT_TIMEOUT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def client(number: int) -> None:
            await asyncio.sleep(number / streams)  # not all in one step of the engines
            while time.monotonic() < deadline:
                stream = Stream(time.monotonic())
                seen.append(stream)
                await _stream(session, url, tokens, stream)
                if stream.problem:
                    await asyncio.sleep(0.1)

        await asyncio.gather(*map(client, range(streams)))
    return seen


async def _stream(session: aiohttp.ClientSession, url: str, tokens: int, stream: Stream) -> None:
    prompt = f"{next(_numbers)} {_WORDS}"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    last = b""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                stream.problem = f"status {response.status}: {(await response.text())[:200]}"
                return
            stream.worker = response.headers["x-kvrouter-worker"]
            stream.attempts = int(response.headers.get("x-kvrouter-attempts", "1"))
            async for chunk in response.content.iter_any():
                if stream.first_byte is None:
                    stream.first_byte = time.monotonic() - stream.began
                last = (last + chunk)[-200:]
    except (aiohttp.ClientError, TimeoutError) as error:
        stream.problem = str(error) or type(error).__name__
        return
    stream.complete = last.rstrip().endswith(b"data: [DONE]")
    if not stream.complete:
        stream.problem = "broken off"


async def flood(url: str, requests: int, seconds: float) -> None:
    """Keep a worker busy with long prompts of other clients, sent without the router."""
    deadline = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=ATTEMPT_TIMEOUT)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def client() -> None:
            while time.monotonic() < deadline:
                body = {"model": MODEL, "prompt": f"{next(_numbers)} {_WORDS * 20}", "max_tokens": 20}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    await response.read()

        await asyncio.gather(*(client() for _ in range(requests)))
