"""Idle workers beside a warm one, with real processes: `python -m benchmarks.light_load`.

- A hot prefix: every prompt begins with the same 2,000 tokens. Requests arrive at random times.
- Sessions in turn: prompts that fit into the caches of two workers and not into one, one after the other.
- Growing sessions by turns: at first, these fit into one cache, too. They share their first tokens.

Each policy has a router and workers of its own.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Annotated

import aiohttp
import typer
import yaml

from kvrouter.processes import KvrouterProcess

_MODEL, _VOCABULARY = "simulated", 4096
_POLICIES = ("kv_aware", "session_affinity", "cache_aware", "least_loaded")
_SHARED, _OWN, _ANSWER = 2000, 40, 20
_SESSIONS, _ROUNDS, _SESSION_TOKENS, _CACHE_BLOCKS = 19, 8, 3200, 2048  # ten sessions of 202 blocks fit into a cache
_LONGEST = 4096  # tokens of a prompt and its answer
_GROWING_SHARED, _GROWING_OWN, _MORE, _GROWING_BLOCKS = 64, 500, 32, 600


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: its seconds from the request to its end, the tokens of its prompt, and those that were cached."""

    seconds: float
    tokens: int
    cached: int


def main(
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a second with the hot prefix.")] = 20.0,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds with the hot prefix.")] = 10.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 3,
) -> None:
    """Measure the mean seconds of answers with one hot prefix, and the hits of sessions one after the other."""
    typer.echo(
        "| policy | one hot prefix, 4 workers | sessions in turn, 2 workers | growing sessions by turns, two caches |"
    )
    typer.echo("|---|---:|---:|---:|")
    for policy in _POLICIES:
        hot, turns, growing = list[Answered](), list[Answered](), list[Answered]()
        for seed in range(seeds):
            with _router(policy, 4, 8192) as url:
                hot += asyncio.run(_hot_prefix(url, rate, seconds, Random(seed)))
            with _router(policy, 2, _CACHE_BLOCKS) as url:
                turns += asyncio.run(_in_turn(url, Random(seed)))
            with _router(policy, 2, _GROWING_BLOCKS) as url:
                growing += asyncio.run(_growing(url, Random(seed)))
        hits = " | ".join(f"{_hits(answers):.3f}" for answers in (turns, growing))
        typer.echo(f"| `{policy}` | {mean(answer.seconds for answer in hot):.3f} s | {hits} |")


def _hits(answers: list[Answered]) -> float:
    """Return the share of the prompts' tokens that were cached."""
    return sum(answer.cached for answer in answers) / sum(answer.tokens for answer in answers)


@contextmanager
def _router(policy: str, workers: int, blocks: int) -> Iterator[str]:
    """Run a router before workers whose caches have `blocks` blocks, and yield its URL."""
    with ExitStack() as stack:
        limit = ["--max-model-len", str(_LONGEST)]
        command = ["simulate", "--port", "0", "--blocks", str(blocks), *limit]
        fleet = [stack.enter_context(KvrouterProcess(command)) for _ in range(workers)]
        urls = [worker.wait_until_listening() for worker in fleet]
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.yaml"
        config.write_text(yaml.safe_dump({"workers": [{"url": url} for url in urls], "policy": {"name": policy}}))
        yield stack.enter_context(
            KvrouterProcess(["serve", "--config", str(config), "--port", "0"])
        ).wait_until_listening()


async def _hot_prefix(url: str, rate: float, seconds: float, random: Random) -> list[Answered]:
    end = time.monotonic() + seconds
    tasks = list[asyncio.Task[Answered]]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while time.monotonic() < end:
            own = [random.randrange(_VOCABULARY) for _ in range(_OWN)]
            tasks.append(asyncio.create_task(_ask(session, url, [*range(_SHARED), *own])))
            await asyncio.sleep(random.expovariate(rate))
        return await asyncio.gather(*tasks)


async def _in_turn(url: str, random: Random) -> list[Answered]:
    prompts = [[random.randrange(_VOCABULARY) for _ in range(_SESSION_TOKENS)] for _ in range(_SESSIONS)]
    async with aiohttp.ClientSession() as session:
        return [await _ask(session, url, prompt) for _ in range(_ROUNDS) for prompt in prompts]


async def _growing(url: str, random: Random) -> list[Answered]:
    """Return the answers from the second turn of each session on."""
    shared = [random.randrange(_VOCABULARY) for _ in range(_GROWING_SHARED)]
    longest = _GROWING_OWN + _MORE * (_ROUNDS - 1)
    sessions = [shared + [random.randrange(_VOCABULARY) for _ in range(longest)] for _ in range(_SESSIONS)]
    answers = list[Answered]()
    async with aiohttp.ClientSession() as client:
        for number in range(_ROUNDS):
            length = _GROWING_SHARED + _GROWING_OWN + _MORE * number
            answers += [await _ask(client, url, tokens[:length], 1) for tokens in sessions]
    return answers[_SESSIONS:]


async def _ask(session: aiohttp.ClientSession, url: str, prompt: list[int], answer: int = _ANSWER) -> Answered:
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    begun, cached = time.monotonic(), 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if b'"usage"' in line and (usage := json.loads(line.removeprefix(b"data: ")).get("usage")):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answered(time.monotonic() - begun, len(prompt), cached)


if __name__ == "__main__":
    typer.run(main)
