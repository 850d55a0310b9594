"""Clients as there should be: the official library's, each asking one thing after the other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import openai

PROMPTS = 200
_WORDS = ["river", "stone", "cloud", "market", "winter", "letter", "garden", "engine", "paper", "window"]
_THINKING = 0.2  # seconds between two requests of one client, on average


@dataclass
class Service:
    """What the clients got: seconds to the first part of an answer, and what went wrong."""

    seconds: list[float] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)

    def quantile(self, share: float) -> float:
        """The seconds within which this share of the requests were answered."""
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


async def customers(url: str, count: int, until: float, random: Random) -> Service:
    """So many clients until that time of the monotonic clock."""
    service = Service()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        await asyncio.gather(*(_one(client, service, until, Random(random.random())) for _ in range(count)))
    return service


async def _one(client: openai.AsyncOpenAI, service: Service, until: float, random: Random) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(random.expovariate(1 / _THINKING))
        begun = time.monotonic()
        try:
            service.seconds.append(await _first_part(client, random) - begun)
        except openai.APIStatusError as error:
            service.lost[f"status {error.status_code}"] += 1
        except openai.APIError as error:
            service.lost[type(error).__name__] += 1


async def _first_part(client: openai.AsyncOpenAI, random: Random) -> float:
    """Ask, read the whole answer, and tell when its first part came."""
    words = Random(random.randrange(PROMPTS)).choices(_WORDS, k=200)
    stream = await client.chat.completions.create(
        model="simulated",
        messages=[{"role": "system", "content": " ".join(words)}, {"role": "user", "content": "go on"}],
        max_tokens=random.randint(4, 40),
        stream=True,
    )
    first = 0.0
    async for _ in stream:
        first = first or time.monotonic()
    return first
