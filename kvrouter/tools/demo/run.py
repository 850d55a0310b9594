"""`kvrouter demo`: conversations, routed by KV cache and by round robin, and a table of both runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from random import Random
from statistics import quantiles
from threading import Event

import aiohttp
from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrouter.processes import KvrouterProcess, ProcessError
from router.http.client import refuse_redirects

_TOPICS = (
    "invoices",
    "flight bookings",
    "lab results",
    "support tickets",
    "insurance claims",
    "code reviews",
    "rental contracts",
    "parcel tracking",
)
_VERBS = ("check", "summarise", "compare", "explain", "translate", "file", "escalate", "archive")
_THINGS = ("the last entry", "every open case", "the oldest record", "two duplicates", "a missing field", "the totals")
_RULES_A_PROMPT = 110  # about 1800 tokens


async def samples(urls: Sequence[str]) -> list[Sample]:
    """Return the samples in the metrics of workers. Raises aiohttp.ClientError and TimeoutError."""
    found: list[Sample] = []
    timeout = aiohttp.ClientTimeout(10)
    async with aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=timeout) as session:
        for url in urls:
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
            found += [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return found


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and the user's messages, each sent after the answer to the previous one."""

    system: str
    questions: list[str]


def make_conversations(count: int, turns: int, seed: int) -> list[Conversation]:
    """Return conversations in the order of their start. Neighbours seldom share a system prompt."""
    random = Random(seed)
    systems = [_system_prompt(topic, random) for topic in _TOPICS]
    return [
        Conversation(random.choice(systems), [_question(number, random) for _ in range(turns)])
        for number in range(count)
    ]


def _system_prompt(topic: str, random: Random) -> str:
    rules = (
        f"{number}. When asked to {random.choice(_VERBS)} {random.choice(_THINGS)}, do so only for {topic}."
        for number in range(1, _RULES_A_PROMPT + 1)
    )
    return f"You help with {topic}. Your rules:\n" + "\n".join(rules)


def _question(number: int, random: Random) -> str:
    wishes = ", then ".join(f"{random.choice(_VERBS)} {random.choice(_THINGS)}" for _ in range(8))
    return f"Case {number}-{random.randrange(10_000)}: please {wishes}."


ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answered request. `first_token`: in seconds; `expected_tokens`: cached tokens that the router expected."""

    worker: str
    first_token: float
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: int


async def play(
    url: str, model: str, conversations: Sequence[Conversation], at_once: int, on_answer: Callable[[], None]
) -> list[Outcome]:
    """Play all conversations, `at_once` at a time. Raises openai.OpenAIError if a request fails."""
    places = asyncio.Semaphore(at_once)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def converse(conversation: Conversation) -> list[Outcome]:
            async with places:
                return await _converse(client, model, conversation, on_answer)

        played = await asyncio.gather(*map(converse, conversations))
    return [outcome for outcomes in played for outcome in outcomes]


async def _converse(
    client: AsyncOpenAI, model: str, conversation: Conversation, on_answer: Callable[[], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": conversation.system}]
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        answer, outcome = await _ask(client, model, messages)
        messages.append({"role": "assistant", "content": answer})
        outcomes.append(outcome)
        on_answer()
    return outcomes


async def _ask(client: AsyncOpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> tuple[str, Outcome]:
    sent = time.monotonic()
    first_token: float | None = None
    answer: list[str] = []
    prompt_tokens = cached_tokens = 0
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in raw.parse():
        for choice in chunk.choices:
            if choice.delta.content:
                first_token = first_token or time.monotonic() - sent
                answer.append(choice.delta.content)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            prompt_tokens = chunk.usage.prompt_tokens
            cached_tokens = (details and details.cached_tokens) or 0
    outcome = Outcome(
        raw.headers["x-kvrouter-worker"],
        first_token or time.monotonic() - sent,
        prompt_tokens,
        cached_tokens,
        int(raw.headers["x-kvrouter-overlap-tokens"]),
    )
    return "".join(answer), outcome


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
