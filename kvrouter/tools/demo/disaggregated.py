"""The demo of disaggregation: prefill and decode workers of SGLang, then of vLLM with NIXL. One of them is killed."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml
from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.table import Table

from kvrouter.processes import KvrouterProcess, ProcessError
from kvrouter.tools.demo.run import MODEL, TURNS, Conversation, DemoError, make_conversations, samples
from router.http.client import connection_problem

ANSWER_TOKENS = 32


@dataclass(slots=True)
class Request:
    """One request; sizes in tokens. `error`: why its answer is incomplete. `begun`: whether a part of it arrived."""

    answer: str = ""
    begun: bool = False
    error: str | None = None
    prefill_worker: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def lost(self) -> bool:
        """True if the request failed before a part of its answer arrived, when another worker could have answered."""
        return self.error is not None and not self.begun


async def play(
    url: str, model: str, conversations: Sequence[Conversation], at_once: int, on_answer: Callable[[int], None]
) -> list[Request]:
    """Play all conversations, `at_once` at a time. A conversation ends with its first failed request."""
    places = asyncio.Semaphore(at_once)
    requests: list[Request] = []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def converse(conversation: Conversation) -> None:
            messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": conversation.system}]
            async with places:
                for question in conversation.questions:
                    messages.append({"role": "user", "content": question})
                    request = await _ask(client, model, messages)
                    requests.append(request)
                    on_answer(len(requests))
                    if request.error is not None:
                        return
                    messages.append({"role": "assistant", "content": request.answer})

        await asyncio.gather(*map(converse, conversations))
    return requests


async def _ask(client: AsyncOpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> Request:
    request = Request()
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        request.prefill_worker = raw.headers.get("x-kvrouter-prefill-worker")
        async for chunk in raw.parse():
            for choice in chunk.choices:
                request.answer += choice.delta.content or ""
                request.begun = request.begun or bool(request.answer)
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                request.prompt_tokens = chunk.usage.prompt_tokens
                request.cached_tokens = (details and details.cached_tokens) or 0
        if not request.prompt_tokens:
            request.error = "the stream ended early"
    except OpenAIError as error:
        request.error = str(error)
    return request


AT_ONCE = 8
_STYLES = {"sglang": "SGLang", "nixl": "vLLM NIXL"}
_ROLES = ("prefill", "prefill", "decode", "decode")
_SHOWN_ERRORS = 3


@dataclass
class _Played:
    """The run of one style. `counted` has the sums of the decode workers' counters."""

    requests: list[Request]
    killed_after: int | None
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def remote(self) -> int:
        return sum(request.prefill_worker is not None for request in self.requests)

    @property
    def passed(self) -> bool:
        """True if KV pages moved, a worker was killed, and no request failed and no page was wrong."""
        failed = any(request.error is not None for request in self.requests)
        moved = self.counted["simulated:kv_bytes_received_total"]
        wrong = self.counted["simulated:kv_pages_wrong_total"]
        return not failed and not wrong and bool(moved and self.remote) and self.killed_after is not None


def run_disaggregated_demo(conversations: int) -> bool:
    """Play conversations in each style, and print the results. Return whether nothing was lost. Raises DemoError."""
    console = Console()
    played: dict[str, _Played] = {}
    try:
        for style, name in _STYLES.items():
            console.print(f"{name}: starting 2 prefill and 2 decode workers and a router …")
            played[style] = _play_style(style, conversations, console)
    except (ProcessError, aiohttp.ClientError, TimeoutError) as error:
        raise DemoError(connection_problem(error)) from error
    console.print(_table(list(played.values())))
    for name, run in zip(_STYLES.values(), played.values(), strict=True):
        problems = [request.error for request in run.requests if request.error is not None]
        for problem in problems[:_SHOWN_ERRORS]:
            console.print(f"{name}: {problem}", style="red")
    return all(run.passed for run in played.values())


def _play_style(style: str, conversations: int, console: Console) -> _Played:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(KvrouterProcess(["simulate", "--disaggregation", style, "--role", role]))
            for role in _ROLES
        ]
        urls = [worker.wait_until_listening() for worker in workers]
        config = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        # SGLang's workers report their role; vLLM's do not.
        known = [
            {"url": url} if style == "sglang" else {"url": url, "role": role}
            for url, role in zip(urls, _ROLES, strict=True)
        ]
        Path(config.name).write_text(yaml.safe_dump({"workers": known}))
        router = stack.enter_context(
            KvrouterProcess(["serve", "--config", config.name, "--port=0", "--log-level=warning"])
        )
        url = router.wait_until_listening()
        workload = make_conversations(conversations, TURNS, seed=1)
        kill_after = conversations * TURNS // 3
        killed_after: int | None = None

        def on_answer(ended: int) -> None:
            nonlocal killed_after
            if killed_after is None and ended >= kill_after:
                killed_after = ended
                workers[0].send_signal(signal.SIGKILL)
                console.print(f"  {ended} of {conversations * TURNS} requests answered: a prefill worker is killed")

        requests = asyncio.run(play(url, MODEL, workload, AT_ONCE, on_answer))
        decodes = [url for url, role in zip(urls, _ROLES, strict=True) if role == "decode"]
        return _Played(requests, killed_after, asyncio.run(_counters(decodes)))


async def _counters(urls: Sequence[str]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for sample in await samples(urls):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _table(runs: Sequence[_Played]) -> Table:
    table = Table(title="Prefill and decode on different workers, one of 2 prefill workers killed")
    table.add_column("")
    for name in _STYLES.values():
        table.add_column(name, justify="right")

    def share(run: _Played) -> str:
        tokens = sum(request.prompt_tokens for request in run.requests)
        return f"{sum(request.cached_tokens for request in run.requests) / max(tokens, 1):.0%}"

    def pages(run: _Played) -> str:
        checked, wrong = (int(run.counted[f"simulated:kv_pages_{what}_total"]) for what in ("checked", "wrong"))
        return f"{checked} checked, {wrong} wrong"

    def row(name: str, values: Sequence[object]) -> None:
        table.add_row(name, *map(str, values))

    row("requests", [len(run.requests) for run in runs])
    row("lost before the answer began", [sum(request.lost for request in run.requests) for run in runs])
    row("interrupted", [sum(request.error is not None and request.begun for request in run.requests) for run in runs])
    row("prompt tokens from cache", [share(run) for run in runs])
    row("remote prefills / skipped", [f"{run.remote} / {len(run.requests) - run.remote}" for run in runs])
    row("KV moved", [f"{run.counted['simulated:kv_bytes_received_total'] / 2**20:.1f} MiB" for run in runs])
    row("KV pages, compared", [pages(run) for run in runs])
    return table
