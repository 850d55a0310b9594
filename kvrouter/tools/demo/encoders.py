"""The demo of encode workers: chats with images, by the router and by round robin. Then one encode worker is killed."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import aiohttp
import yaml
from rich.console import Console
from rich.table import Table

from kvevents.decoding import read_json
from kvrouter.processes import KvrouterProcess, ProcessError
from kvrouter.tools.demo.run import MODEL, DemoError, samples
from router.http.client import connection_problem, refuse_redirects

ENCODERS, WORKERS = 3, 2
AT_ONCE = 12
_PATH = "/v1/chat/completions"
_CHATS_PER_CONVERSATION = 5
# All images together fit into the caches of all encode workers, and not into one of them.
_IMAGES, _CACHED_ITEMS = 60, 24
_MOST_IMAGES = 3  # in one chat

Body = dict[str, Any]
Ask = Callable[[aiohttp.ClientSession, Body], Awaitable[None]]


def make_chats(count: int, name: str, seed: int) -> list[Body]:
    """Return chats about images, of which a few are popular. Chats of other names have other images."""
    random = Random(seed)
    weights = [1 / (rank + 1) for rank in range(_IMAGES)]

    def part(number: int) -> Body:
        return {"type": "image_url", "image_url": {"url": f"https://images.example/{name}/{number}.png"}}

    chats = []
    for number in range(count):
        images = {random.choices(range(_IMAGES), weights)[0] for _ in range(random.randint(1, _MOST_IMAGES))}
        question = {"type": "text", "text": f"Question {number}: what do these images have in common?"}
        messages = [{"role": "user", "content": [*map(part, sorted(images)), question]}]
        chats.append({"model": MODEL, "messages": messages, "max_tokens": 1})  # so an answer takes a TTFT
    return chats


@dataclass
class Run:
    """One workload: its times to the first token in seconds, its failures, and the items of each kind."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    encoders: Counter[str] = field(default_factory=Counter)
    workers: Counter[str] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        """The share of items that encode workers had in their caches."""
        return self.encoders["cached"] / max(self.encoders.total(), 1)

    def percentile(self, tenths: int) -> float:
        return quantiles(self.seconds, n=10, method="inclusive")[tenths - 1]


async def play(ask: Ask, chats: Sequence[Body], on_answer: Callable[[int], None] = lambda _: None) -> Run:
    """Send all chats, `AT_ONCE` at a time."""
    run, places = Run(), asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=aiohttp.ClientTimeout(60)) as session:

        async def one(chat: Body) -> None:
            async with places:
                sent = time.monotonic()
                try:
                    await ask(session, chat)
                    run.seconds.append(time.monotonic() - sent)
                except (aiohttp.ClientError, TimeoutError) as error:
                    run.failures.append(connection_problem(error))
                on_answer(len(run.seconds))

        await asyncio.gather(*map(one, chats))
    return run


def by_router(url: str) -> Ask:
    """Return a function that sends a chat to the router."""

    async def ask(session: aiohttp.ClientSession, chat: Body) -> None:
        await _post(session, url, chat)

    return ask


def by_round_robin(encoders: Sequence[str], workers: Sequence[str]) -> Ask:
    """Return a function that sends items and chats in turn, as the example proxy of vLLM does."""
    next_encoder, next_worker = cycle(encoders), cycle(workers)

    async def ask(session: aiohttp.ClientSession, chat: Body) -> None:
        parts = [part for part in chat["messages"][0]["content"] if part["type"] == "image_url"]
        alone = [{**chat, "messages": [{"role": "user", "content": [part]}]} for part in parts]
        answers = await asyncio.gather(*(_post(session, next(next_encoder), each) for each in alone))
        params = {name: value for answer in answers for name, value in answer["ec_transfer_params"].items()}
        await _post(session, next(next_worker), {**chat, "ec_transfer_params": params})

    return ask


async def _post(session: aiohttp.ClientSession, url: str, body: Body) -> Body:
    async with session.post(url + _PATH, json=body) as response:
        response.raise_for_status()
        answer: Body = read_json(await response.read())
        return answer


def run_encoders_demo(conversations: int) -> bool:
    """Play chats with images three times, and print the results. Return whether nothing was lost. Raises DemoError."""
    console, count = Console(), conversations * _CHATS_PER_CONVERSATION
    console.print(f"Starting {ENCODERS} encode workers, {WORKERS} other workers and a router …")
    try:
        with ExitStack() as stack:
            encode = ["simulate", "--role", "encode", "--encoder-items", str(_CACHED_ITEMS)]
            processes = [stack.enter_context(KvrouterProcess(encode)) for _ in range(ENCODERS)]
            processes += [stack.enter_context(KvrouterProcess(["simulate"])) for _ in range(WORKERS)]
            urls = [process.wait_until_listening() for process in processes]
            encoders, workers = urls[:ENCODERS], urls[ENCODERS:]
            config = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
            known = [{"url": url, "role": "encode"} for url in encoders] + [{"url": url} for url in workers]
            Path(config.name).write_text(yaml.safe_dump({"workers": known}))
            serve = ["serve", "--config", config.name, "--port=0", "--log-level=warning"]
            router = by_router(stack.enter_context(KvrouterProcess(serve)).wait_until_listening())
            fleet = Fleet(encoders, workers)
            robin = asyncio.run(fleet.play(by_round_robin(encoders, workers), make_chats(count, "robin", 1)))
            hashed = asyncio.run(fleet.play(router, make_chats(count, "router", 1)))
            killed: list[int] = []

            def kill(answered: int) -> None:
                if not killed and answered >= count // 3:
                    killed.append(answered)
                    processes[0].send_signal(signal.SIGKILL)
                    console.print(f"  {answered} of {count} chats answered: an encode worker is killed")

            lost = asyncio.run(Fleet(encoders[1:], workers).play(router, make_chats(count, "killed", 1), kill))
    except (ProcessError, aiohttp.ClientError, TimeoutError) as error:
        raise DemoError(connection_problem(error)) from error
    console.print(_table(robin, hashed, lost))
    for problem in {*robin.failures, *hashed.failures, *lost.failures}:
        console.print(problem, style="red")
    return bool(killed) and not (hashed.failures or lost.failures) and hashed.hit_rate > robin.hit_rate


@dataclass(frozen=True)
class Fleet:
    """The workers whose counters are read."""

    encoders: Sequence[str]
    workers: Sequence[str]

    async def play(self, ask: Ask, chats: Sequence[Body], on_answer: Callable[[int], None] = lambda _: None) -> Run:
        """Play chats, and add the items that the workers counted meanwhile."""
        before = await _items(self.encoders), await _items(self.workers)
        run = await play(ask, chats, on_answer)
        run.encoders = await _items(self.encoders) - before[0]
        run.workers = await _items(self.workers) - before[1]
        return run


async def _items(urls: Sequence[str]) -> Counter[str]:
    """Return the media items that workers counted, by result."""
    items: Counter[str] = Counter()
    for sample in await samples(urls):
        if sample.name == "simulated:media_items_total":
            items[sample.labels["result"]] += int(sample.value)
    return items


def _table(robin: Run, hashed: Run, lost: Run) -> Table:
    runs = robin, hashed, lost
    table = Table(title=f"Chats with images on {ENCODERS} encode workers and {WORKERS} others")
    for name in ("", "round robin", "router", "router, one killed"):
        table.add_column(name, justify="right" if name else "left")

    def row(name: str, value: Callable[[Run], str]) -> None:
        table.add_row(name, *map(value, runs))

    row("chats", lambda run: str(len(run.seconds) + len(run.failures)))
    row("lost", lambda run: str(len(run.failures)))
    row("items that encode workers had cached", lambda run: f"{run.hit_rate:.0%}")
    row("items that other workers encoded", lambda run: str(run.workers["encoded"]))
    row("time to first token, p50", lambda run: f"{run.percentile(5):.3f} s")
    row("time to first token, p90", lambda run: f"{run.percentile(9):.3f} s")
    return table
