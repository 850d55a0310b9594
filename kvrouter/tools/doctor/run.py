"""The examination of a fleet and its report."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from pydantic import SecretStr
from rich.console import Console
from rich.markup import escape

from kvevents.curve import load_key_pair
from kvrouter.tools.doctor.examination import Examination
from kvrouter.tools.doctor.running_fleet import examine_running
from router.app.embedded_index import running_indexer
from router.fleet.kubernetes import ClusterAccess
from router.fleet.source_watch import workers_of_cluster
from router.http.client import refuse_redirects
from router.settings import Settings, WorkerSettings
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers

_AT_ONCE = 16  # workers
_REQUEST_TIMEOUT = 60.0  # seconds


class NoWorkersError(Exception):
    """A fleet without workers to examine. The message has the reason."""


async def run_doctor(settings: Settings, api_key: str | None, patience: float, as_json: bool) -> bool:
    """Examine the settings' workers and print the findings. Return whether there are no findings.

    Raises NoWorkersError, and KubernetesError if the settings search for workers in a cluster.
    """
    if settings.kubernetes.used:
        settings = settings.model_copy(update={"workers": [*settings.workers, *await _of_the_cluster(settings)]})
    examined = await examine(settings, api_key, patience)
    findings = [finding.as_json() for each in examined for finding in each.findings]
    _print({each.name: each.passed for each in examined}, findings, as_json)
    return not findings


async def run_doctor_on_router(url: str, token: str, as_json: bool) -> bool:
    """Examine a router's fleet and print the findings. Return whether there are no findings. Raises RouterError."""
    fleet = await examine_running(url, token)
    _print(fleet.passed, fleet.findings, as_json)
    return not fleet.findings


async def _of_the_cluster(settings: Settings) -> list[WorkerSettings]:
    access = ClusterAccess.in_cluster(settings.kubernetes.namespace)
    async with aiohttp.ClientSession(middlewares=(refuse_redirects,)) as session:
        found = await workers_of_cluster(settings.kubernetes, access, session)
    if not found and not settings.workers:
        looked_for = settings.kubernetes.selector or settings.kubernetes.service
        raise NoWorkersError(f"kubernetes: namespace {access.namespace} has no workers for {looked_for!r}")
    return found


def _print(passed: dict[str, list[str]], findings: list[dict[str, Any]], as_json: bool) -> None:
    """Print confirmed steps and findings of each worker."""
    if as_json:
        print(json.dumps({"workers": list(passed), "findings": findings}))
        return
    console = Console(soft_wrap=True, highlight=False)
    for place in dict.fromkeys([*passed, *(found["worker"] for found in findings)]):
        console.print(f"[bold]{escape(place)}[/bold]")
        for line in passed.get(place, ()):
            console.print(f"  [green]ok[/green]  {escape(line)}")
        for found in findings:
            if found["worker"] == place:
                rank = "" if found["dp_rank"] is None else f"rank {found['dp_rank']}: "
                console.print(f"  [red]{found['cause']}[/red]  {rank}{escape(found['evidence'])}")
                console.print(f"      {escape(found['fix'])}")
    count = len(findings)
    console.print(f"{count} finding{'s' * (count != 1)}" if findings else "no findings")


async def examine(settings: Settings, api_key: str | None, patience: float) -> list[Examination]:
    """Examine the settings' workers, several at once. `api_key`: for workers without one; `patience`: in seconds."""
    key_file = settings.events.curve_secret_key_file
    keys = load_key_pair(key_file, "events.curve_secret_key_file") if key_file else None
    # The router's saved index must be neither read nor written.
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
