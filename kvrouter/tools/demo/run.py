"""The demo from start to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from threading import Event

import aiohttp
from openai import OpenAIError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrouter.processes import KvrouterProcess, ProcessError
from kvrouter.tools.demo.play import play
from kvrouter.tools.demo.report import Summary, comparison, summarise
from kvrouter.tools.demo.workload import Conversation, make_conversations
from router.http.client import refuse_redirects

MODEL = "simulated"
TURNS = 3
AT_ONCE = 8
# A worker's cache holds about two of the eight system prompts with their conversations: together the workers hold all,
# if what belongs together stays together.
_WORKER = ("simulate", "--blocks", "640", "--max-model-len", "8192")


class DemoError(Exception):
    """The demo could not be run to its end."""


def run_demo(workers: int, conversations: int, keep: bool) -> None:
    """Play a workload through the router, then round robin, and print both. Raises DemoError."""
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
                console.print(f"The kv-aware router stays up at {kv_aware}/v1 (model {MODEL!r}). Ctrl-C ends it.")
                with suppress(KeyboardInterrupt):
                    Event().wait()
    except (ProcessError, OpenAIError, aiohttp.ClientError) as error:
        raise DemoError(str(error)) from error


def _start(stack: ExitStack, commands: Sequence[Sequence[str]]) -> list[str]:
    """Start processes side by side; their URLs."""
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
