"""`kvrouter demo`: one workload, routed by KV cache and by round robin, and a table of both runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import quantiles
from threading import Event

import aiohttp
from openai import OpenAIError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrouter.processes import KvrouterProcess, ProcessError
from kvrouter.tools.demo.conversations import Conversation, Outcome, make_conversations, play
from router.http.client import refuse_redirects


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run: the share of prompt tokens from cache, and times to the first token in seconds."""

    cached_share: float
    ttft_p50: float
    ttft_p90: float
    seconds: float
    requests_by_worker: dict[str, int]


def summarise(outcomes: Sequence[Outcome], workers: Sequence[str], seconds: float) -> Summary:
    """Return the figures of a run with at least two outcomes."""
    deciles = quantiles((outcome.first_token for outcome in outcomes), n=10, method="inclusive")
    counted = Counter(outcome.worker for outcome in outcomes)
    return Summary(
        sum(outcome.cached_tokens for outcome in outcomes) / sum(outcome.prompt_tokens for outcome in outcomes),
        deciles[4],
        deciles[8],
        seconds,
        {worker: counted[worker] for worker in workers},
    )


def comparison(kv_aware: Summary, round_robin: Summary) -> Table:
    """Return a table of both runs."""
    table = Table(title="One workload, routed twice")
    table.add_column("")
    table.add_column("kv-aware", justify="right")
    table.add_column("round robin", justify="right")

    def row(name: str, show: str, value: str) -> None:
        table.add_row(name, *(show.format(getattr(summary, value)) for summary in (kv_aware, round_robin)))

    row("prompt tokens from cache", "{:.0%}", "cached_share")
    row("time to first token, p50", "{:.3f} s", "ttft_p50")
    row("time to first token, p90", "{:.3f} s", "ttft_p90")
    row("whole workload", "{:.1f} s", "seconds")
    for number, worker in enumerate(kv_aware.requests_by_worker, 1):
        counts = (summary.requests_by_worker[worker] for summary in (kv_aware, round_robin))
        table.add_row(f"requests to worker {number}", *map(str, counts))
    return table


MODEL = "simulated"
TURNS = 3
AT_ONCE = 8
# The cache of one worker holds about two of the eight system prompts and their conversations. All workers together hold
# all of them, if requests of one conversation stay on one worker.
_WORKER = ("simulate", "--blocks", "640", "--max-model-len", "8192")


class DemoError(Exception):
    """A failure of the demo before its end."""


def run_demo(workers: int, conversations: int, keep: bool) -> None:
    """Play a workload through the router, then by round robin, and print both. Raises DemoError."""
    console = Console()
    workload = make_conversations(conversations, TURNS, seed=1)
    console.print(f"Starting {workers} simulated workers and two routers …")
    try:
        with ExitStack() as stack:
            urls = _start(stack, [_WORKER] * workers)
            serve = ["serve", "--port=0", "--log-level=warning", *(f"--worker={url}" for url in urls)]
            kv_aware, round_robin = _start(stack, [serve, [*serve, "--policy=round_robin"]])
            with Progress(
                TextColumn("{task.description:<11}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
            ) as progress:
                first = asyncio.run(_measure("kv-aware", kv_aware, urls, workload, progress))
                second = asyncio.run(_measure("round robin", round_robin, urls, workload, progress))
            console.print(comparison(first, second))
            if keep:
                console.print(f"The kv-aware router keeps running at {kv_aware}/v1 (model {MODEL!r}). Ctrl-C ends it.")
                with suppress(KeyboardInterrupt):
                    Event().wait()
    except (ProcessError, OpenAIError, aiohttp.ClientError) as error:
        raise DemoError(str(error)) from error


def _start(stack: ExitStack, commands: Sequence[Sequence[str]]) -> list[str]:
    """Start processes in parallel, and return their URLs."""
    started = [stack.enter_context(KvrouterProcess(command)) for command in commands]
    return [process.wait_until_listening() for process in started]


async def _measure(
    name: str, router: str, workers: Sequence[str], workload: Sequence[Conversation], progress: Progress
) -> Summary:
    """Play the workload on empty caches."""
    async with (
        aiohttp.ClientSession(middlewares=(refuse_redirects,)) as session,
        session.post(f"{router}/reset_prefix_cache") as response,
    ):
        response.raise_for_status()
    task = progress.add_task(name, total=sum(len(conversation.questions) for conversation in workload))
    started = time.monotonic()
    outcomes = await play(router, MODEL, workload, AT_ONCE, lambda: progress.advance(task))
    return summarise(outcomes, workers, time.monotonic() - started)
