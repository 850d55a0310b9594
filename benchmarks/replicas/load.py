"""The requests of a run and their results: equal requests at equal times for every side."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean

import aiohttp

MODEL = "simulated"
PREFIXES = 24
PREFIX_TOKENS = 768
OWN_TOKENS = 192
OUTPUT_TOKENS = 20
_SAMPLE_SECONDS = 0.25
_REQUEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned request: seconds after the start, its tokens, and a number that selects its router."""

    at: float
    tokens: list[int]
    router: int


@dataclass(slots=True)
class Answered:
    """The result of a request. Times are seconds since the start; `problem` is why it was lost."""

    began: float
    worker: str = ""
    first_byte: float | None = None
    ended: float = 0.0
    problem: str = ""


def plan(seconds: float, rate: float, seed: int = 1) -> list[Planned]:
    """Plan `rate` requests a second at random times. Some prefixes are much more popular than others."""
    random = Random(seed)
    prefixes = [[random.randrange(200) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    popularity = [1 / (rank + 1) for rank in range(PREFIXES)]
    planned, now = list[Planned](), 0.0
    while (now := now + random.expovariate(rate)) < seconds:
        own = [random.randrange(200) for _ in range(OWN_TOKENS)]
        planned.append(Planned(now, random.choices(prefixes, popularity)[0] + own, random.randrange(1 << 16)))
    return planned


async def send(planned: Sequence[Planned], routers: Sequence[str]) -> list[Answered]:
    """Send every request to its router at its time, and return the results."""
    start = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def one(request: Planned) -> Answered:
            await asyncio.sleep(max(start + request.at - time.monotonic(), 0))
            seen = Answered(time.monotonic() - start)
            url = f"{routers[request.router % len(routers)]}/v1/completions"
            body = {
                "model": MODEL,
                "prompt": request.tokens,
                "max_tokens": OUTPUT_TOKENS,
                "stream": True,
                "ignore_eos": True,
            }
            try:
                async with session.post(url, json=body) as response:
                    seen.worker = response.headers.get("x-kvrouter-worker", "")
                    last = b""
                    async for chunk in response.content.iter_any():
                        if seen.first_byte is None:
                            seen.first_byte = time.monotonic() - start
                        last = (last + chunk)[-100:]
                if response.status != 200 or not last.rstrip().endswith(b"data: [DONE]"):
                    seen.problem = f"status {response.status}: {last!r}"
            except (aiohttp.ClientError, TimeoutError) as error:
                seen.problem = str(error) or type(error).__name__
            seen.ended = time.monotonic() - start
            return seen

        return await asyncio.gather(*map(one, planned))


def ttft(answers: Sequence[Answered]) -> list[float]:
    """Return the sorted seconds to the first byte of received answers."""
    return sorted(each.first_byte - each.began for each in answers if each.first_byte is not None)


def imbalance(answers: Sequence[Answered], workers: int) -> float:
    """Return the busiest worker's requests relative to the mean of all, averaged over time; 1 is even."""
    end = max(each.began for each in answers)
    shares: list[float] = []
    for sample in range(int(end / _SAMPLE_SECONDS)):
        now = sample * _SAMPLE_SECONDS
        busy = Counter(each.worker for each in answers if each.began <= now < each.ended)
        if busy.total() >= workers:  # with fewer requests, a worker is always idle
            shares.append(max(busy.values()) * workers / busy.total())
    return mean(shares) if shares else 1.0
