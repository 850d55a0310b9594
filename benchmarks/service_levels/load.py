"""Clients of three classes, and their SLOs. Prompts are token IDs; agents share the start of their prompts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from random import Random

import aiohttp

MODEL = "simulated"
_TIMEOUT = 120.0
_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Class:
    """Requests of one kind.

    - `share`: the share of all requests.
    - `shared`, `output`: tokens.
    - `ttft`, `tpot`: the SLO in seconds.
    - `hurried`: whether a user waits for the answer.
    """

    name: str
    share: float
    prompt: int
    shared: int  # tokens of the prompt that all requests of the class share
    output: int
    ttft: float
    tpot: float
    hurried: bool


CLASSES = (
    Class("interactive", 0.5, 400, 0, 40, 1.5, 0.1, True),
    Class("agent", 0.25, 2000, 1600, 20, 3.0, 0.2, True),
    Class("batch", 0.25, 3000, 0, 40, 20.0, 0.4, False),
)


class Telling(StrEnum):
    """The needs that a run's clients report to the router."""

    NOTHING = "not reported"
    NEEDS = "reported"
    NEEDS_OR_REFUSAL = "reported, late ones refused"

    def level(self, asked: Class) -> str | None:
        """Return the service level that a request names.

        Only clients that cannot use a late answer accept a refusal.
        """
        if self is Telling.NOTHING:
            return None
        return refusing(asked.name) if self is Telling.NEEDS_OR_REFUSAL and asked.hurried else asked.name


def refusing(name: str) -> str:
    """Return the service level with the same SLO that refuses late requests."""
    return f"{name}-or-refused"


@dataclass(slots=True)
class Answer:
    """The result of a client in seconds; `None`: no answer."""

    asked: Class
    ttft: float | None = None
    tpot: float = 0.0
    refused: bool = False

    @property
    def in_time(self) -> bool:
        """Return whether the SLO was met."""
        return self.ttft is not None and self.ttft <= self.asked.ttft and self.tpot <= self.asked.tpot


async def arrivals(url: str, rate: float, seconds: float, telling: Telling, seed: int) -> list[Answer]:
    """Send requests at random times, `rate` a second, independent of earlier ones. Return when all have ended."""
    random, answers, tasks = Random(seed), list[Answer](), list[asyncio.Task[None]]()
    end = time.monotonic() + seconds
    async with _session() as session:
        while (now := time.monotonic()) < end:
            answer = Answer(random.choices(CLASSES, [each.share for each in CLASSES])[0])
            answers.append(answer)
            tasks.append(asyncio.create_task(_ask(session, url, answer, telling, random)))
            await asyncio.sleep(max(random.expovariate(rate) - (time.monotonic() - now), 0.0))
        await asyncio.gather(*tasks)
    return answers


async def capacity(url: str, clients: int, seconds: float) -> float:
    """Measure the answers a second of a fleet with `clients` busy clients. Raises RuntimeError without answers."""
    random, ended = Random(0), 0
    end = time.monotonic() + seconds
    async with _session() as session:

        async def client() -> None:
            nonlocal ended
            while time.monotonic() < end:
                answer = Answer(random.choices(CLASSES, [each.share for each in CLASSES])[0])
                await _ask(session, url, answer, Telling.NOTHING, random)
                ended += answer.ttft is not None and time.monotonic() < end

        await asyncio.gather(*(client() for _ in range(clients)))
    if not ended:
        raise RuntimeError(f"{url} answers nothing")
    return ended / seconds


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _ask(session: aiohttp.ClientSession, url: str, answer: Answer, telling: Telling, random: Random) -> None:
    asked = answer.asked
    own = [random.randrange(_VOCABULARY) for _ in range(asked.prompt - asked.shared)]
    body = {
        "model": MODEL,
        "prompt": [*range(asked.shared), *own],
        "max_tokens": asked.output,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    level = telling.level(asked)
    headers = {"x-kvrouter-service-level": level} if level else {}
    begun, first, last = time.monotonic(), None, 0.0
    try:
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            answer.refused = response.status == HTTPStatus.TOO_MANY_REQUESTS
            response.raise_for_status()
            async for _ in response.content.iter_any():
                last = time.monotonic()
                first = first or last
    except (aiohttp.ClientError, TimeoutError):
        return
    if first is not None:
        answer.ttft, answer.tpot = first - begun, (last - first) / (asked.output - 1)
