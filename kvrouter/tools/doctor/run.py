"""Examining a fleet, and telling of it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
from pydantic import SecretStr
from rich.console import Console
from rich.markup import escape

from kvevents.curve import load_key_pair
from kvrouter.tools.doctor.examination import Examination
from router.embedded_index import running_indexer
from router.fleet.redirects import refuse_redirects
from router.settings import Settings
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers

_AT_ONCE = 16  # workers
_REQUEST_TIMEOUT = 60.0  # seconds


async def run_doctor(settings: Settings, api_key: str | None, patience: float, as_json: bool) -> bool:
    """Examine the settings' workers and print what was found. Whether the fleet is sound."""
    examined = await examine(settings, api_key, patience)
    findings = [finding for each in examined for finding in each.findings]
    if as_json:
        print(json.dumps({"workers": [each.name for each in examined], "findings": [f.as_json() for f in findings]}))
        return not findings
    console = Console(soft_wrap=True, highlight=False)
    for each in examined:
        console.print(f"[bold]{escape(each.name)}[/bold]")
        for line in each.passed:
            console.print(f"  [green]ok[/green]  {escape(line)}")
        for found in each.findings:
            rank = "" if found.dp_rank is None else f"rank {found.dp_rank}: "
            console.print(f"  [red]{found.cause}[/red]  {rank}{escape(found.evidence)}")
            console.print(f"      {escape(found.fix)}")
    console.print(f"{len(findings)} findings" if findings else "nothing is wrong")
    return not findings


async def examine(settings: Settings, api_key: str | None, patience: float) -> list[Examination]:
    """Examine the settings' workers, several at once. `patience`: seconds that events may take to come.

    `api_key`: of workers for which the settings have none.
    """
    key_file = settings.events.curve_secret_key_file
    keys = load_key_pair(key_file, "events.curve_secret_key_file") if key_file else None
    # What the router has saved is not to be read or written here.
    alone = settings.model_copy(update={"index": settings.index.model_copy(update={"snapshot": None, "peer": None})})
    fleet = settings.fleet
    if api_key and not fleet.has_key:
        fleet = fleet.model_copy(update={"api_key": SecretStr(api_key)})
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT, sock_connect=settings.proxy.connect_timeout)
    tokenizers = Tokenizers(settings.tokenizer.threads, settings.tokenizer.timeout)
    at_once = asyncio.Semaphore(_AT_ONCE)
    with running_indexer(alone) as indexer:
        async with aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=timeout) as session:
            source = TokenizerSource(tokenizers, settings.models, session, settings.tokenizer)
            examinations = [
                Examination(worker, session, indexer, tokenizers, source, keys, fleet, patience)
                for worker in settings.workers
            ]

            async def run(each: Examination) -> None:
                async with at_once:
                    await each.run()

            try:
                await asyncio.gather(*map(run, examinations))
            finally:
                await source.close()
                await tokenizers.close()
    return examinations
