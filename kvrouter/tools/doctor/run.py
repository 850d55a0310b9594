"""The examination of a fleet and its report.

A running router is examined by its /health, /ready and /workers. Its workers receive no requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from pydantic import SecretStr
from rich.console import Console
from rich.markup import escape

from kvevents.curve import load_key_pair
from kvevents.decoding import read_json
from kvrouter.tools.doctor.examination import Examination, tokenizer_line
from kvrouter.tools.doctor.findings import Finding
from kvrouter.tools.doctor.pools import PoolExamination, SharedPrompt
from router.app.embedded_index import running_indexer
from router.fleet.kubernetes import ClusterAccess
from router.fleet.source_watch import workers_of_cluster
from router.http.client import connection_problem, refuse_redirects
from router.settings import ForwardTokens, Settings, WorkerSettings
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers

_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
_REQUEST_TIMEOUT = 60.0  # seconds
_AT_ONCE = 16  # workers
_MOST_RANKS = 4  # of a worker, that have a line each
_STYLES = {"error": "red", "warning": "yellow", "info": "cyan"}


class NoWorkersError(Exception):
    """A fleet without workers to examine. The message has the reason."""


class RouterError(Exception):
    """A router that cannot be examined. The message has the reason."""


@dataclass(slots=True)
class RunningFleet:
    """The confirmed steps, states and findings of a running fleet, by router or worker. `about` describes the router.

    `states` are lines that confirm nothing, such as those of a worker that is down.
    """

    url: str
    about: str = ""
    passed: dict[str, list[str]] = field(default_factory=dict)
    states: dict[str, list[str]] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def places(self) -> list[str]:
        """The URLs of the router and its workers."""
        return list(self.passed)

    def ok(self, place: str, line: str, confirmed: bool = True) -> None:
        """Record a confirmed step, or a state that confirms nothing."""
        self.passed.setdefault(place, [])
        (self.passed if confirmed else self.states).setdefault(place, []).append(line)


async def examine_running(url: str, token: str) -> RunningFleet:
    """Examine a router. Raises RouterError."""
    fleet = RunningFleet(url.rstrip("/"))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=_TIMEOUT, headers=headers) as session:
        health = await _asked(session, fleet.url, "/health")
        ready = await _asked(session, fleet.url, "/ready", also=503)
        described = await _asked(session, fleet.url, "/workers")
    if "findings" not in health or "workers_up" not in health:
        raise RouterError(f"{url} is not a router: its /health has no findings")
    _examine_router(fleet, health, ready)
    for worker in described["workers"]:
        _examine_worker(fleet, worker)
    for model, report in described.get("tokenizers", {}).items():
        fleet.ok(fleet.url, f"prompts for {model} become tokens: {tokenizer_line(report)}")
    fleet.findings = [_finding(fleet.url, each) for each in health["findings"]] + fleet.findings
    return fleet


async def _asked(session: aiohttp.ClientSession, url: str, path: str, also: int = 200) -> dict[str, Any]:
    try:
        async with session.get(url + path) as response:
            if response.status in (401, 403):
                raise RouterError(f"{url} needs the admin token for {path}: set --token")
            if response.status not in (200, also):
                raise RouterError(f"{url}{path} answers {response.status}: is this a router's URL?")
            return read_json(await response.read(), dict[str, Any])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RouterError(f"{url} {connection_problem(error)}") from error
    except msgspec.DecodeError as error:
        raise RouterError(f"{url} is not a router: {path} {error}") from error


def _examine_router(fleet: RunningFleet, health: dict[str, Any], ready: dict[str, Any]) -> None:
    policy = health.get("policy", "?")
    fleet.about = f"kvrouter {health.get('version', 'before 0.2')}, {health.get('core', '?')} index, policy {policy}"
    fleet.ok(fleet.url, fleet.about)
    if ready["status"] == "ready":
        up, workers = health["workers_up"], health["workers"]
        fleet.ok(fleet.url, f"ready; {up} of {workers} workers answer", confirmed=up == workers)
    else:
        fleet.findings.append(_finding(fleet.url, {"finding": "not_ready", "detail": ready["status"]}))
    queue = ", ".join(f"{waiting} wait ({reason})" for reason, waiting in health.get("queue", {}).items() if waiting)
    fleet.ok(fleet.url, f"queue: {queue or 'empty'}")


def _examine_worker(fleet: RunningFleet, worker: dict[str, Any]) -> None:
    url = worker["worker"]
    state = worker.get("state", "registered")
    serves = f", serves {worker['model']}" if worker.get("model") else ""
    well = state not in ("down", "ejected", "half_open")
    fleet.ok(url, f"{state}{serves}, {worker.get('requests_in_flight', 0)} requests in flight", confirmed=well)
    alike: dict[tuple[str, int, bool], list[dict[str, Any]]] = {}
    for number, rank in enumerate(worker["ranks"]):
        # Ranks in one state are one line if there are many.
        key = rank["state"], number if len(worker["ranks"]) <= _MOST_RANKS else -1, bool(rank.get("endpoint"))
        alike.setdefault(key, []).append(rank)
    for (state, _, _), ranks in alike.items():
        fleet.ok(url, _ranks_line(state, ranks), confirmed=state == "live")


def _ranks_line(state: str, ranks: list[dict[str, Any]]) -> str:
    """Describe ranks whose streams are in one state."""
    tokens = sum(sum(rank["blocks"].values()) * max(rank["block_sizes"], default=0) for rank in ranks)
    lags = [rank["lag_seconds"] for rank in ranks if rank.get("lag_seconds") is not None]
    lag = f", {1000 * max(lags):.0f} ms behind" if lags else ""
    where = f" from {ranks[0]['endpoint']}" if ranks[0].get("endpoint") else ""
    more = " and others" if where and len(ranks) > 1 else ""
    named = f"rank{'s' * (len(ranks) > 1)} {spans([rank['dp_rank'] for rank in ranks])}"
    return f"{named}: events {state}{where}{more}{lag}; holds {tokens} tokens"


def _finding(router: str, found: dict[str, Any]) -> dict[str, Any]:
    evidence = found.get("detail") or ""
    if model := found.get("model"):
        evidence = f"{model}: {evidence}"
    return Finding(found["finding"], found.get("worker", router), evidence, found.get("dp_rank")).as_json(found)


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
    _print(fleet.passed, fleet.findings, as_json, fleet.states)
    return not fleet.findings


async def _of_the_cluster(settings: Settings) -> list[WorkerSettings]:
    access = ClusterAccess.in_cluster(settings.kubernetes.namespace)
    async with aiohttp.ClientSession(middlewares=(refuse_redirects,)) as session:
        found = await workers_of_cluster(settings.kubernetes, access, session)
    if not found and not settings.workers:
        looked_for = settings.kubernetes.selector or settings.kubernetes.service
        raise NoWorkersError(f"kubernetes: namespace {access.namespace} has no workers for {looked_for!r}")
    return found


def _print(
    passed: dict[str, list[str]],
    findings: list[dict[str, Any]],
    as_json: bool,
    states: Mapping[str, Sequence[str]] = {},
) -> None:
    """Print confirmed steps, states and findings of each worker."""
    if as_json:
        print(json.dumps({"workers": list(passed), "findings": findings}))
        return
    console = Console(soft_wrap=True, highlight=False)
    for place in dict.fromkeys([*passed, *(found["worker"] for found in findings)]):
        console.print(f"[bold]{escape(place)}[/bold]")
        for line in passed.get(place, ()):
            console.print(f"  [green]ok[/green]  {escape(line)}")
        for line in states.get(place, ()):
            console.print(f"  --  {escape(line)}")
        for found in findings:
            if found["worker"] == place:
                style = _STYLES.get(found["severity"], "yellow")
                console.print(f"  [{style}]{found['severity']}: {found['cause']}[/{style}]  {escape(_evidence(found))}")
                console.print(f"      {escape(found['fix'])} See {found['link']}")
    count = len(findings)
    console.print(f"{count} finding{'s' * (count != 1)}" if findings else "no findings")


def _evidence(found: dict[str, Any]) -> str:
    """Return the evidence of a finding after the ranks that it is about."""
    ranks = found.get("dp_ranks") or [found["dp_rank"]]
    if ranks == [None]:
        return str(found["evidence"])
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}: {found['evidence']}"


def spans(numbers: Sequence[int]) -> str:
    """Return numbers in words, such as 0-3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


async def examine(settings: Settings, api_key: str | None, patience: float) -> list[Examination | PoolExamination]:
    """Examine the settings' workers and pools, several at once.

    - `api_key`: the key for workers without one.
    - `patience`: the wait for events, in seconds.
    """
    key_file = settings.events.curve_secret_key_file
    keys = load_key_pair(key_file, "events.curve_secret_key_file") if key_file else None
    # The router's saved index must be neither read nor written, and its addresses not bound.
    without = settings.index.model_copy(update={"snapshot": None, "peer": None})
    unbound = settings.events.model_copy(update={"bind": []})
    alone = settings.model_copy(update={"index": without, "events": unbound})
    fleet = settings.fleet
    if api_key and not fleet.has_key:
        fleet = fleet.model_copy(update={"api_key": SecretStr(api_key)})
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT, sock_connect=settings.proxy.connect_timeout)
    tokenizers = Tokenizers(settings.tokenizer.threads)
    at_once = asyncio.Semaphore(_AT_ONCE)
    with running_indexer(alone) as indexer:
        async with aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=timeout) as session:
            forwards = settings.proxy.forward_tokens is ForwardTokens.AUTO
            source = TokenizerSource(tokenizers, settings.models, session, settings.tokenizer, forwards=forwards)
            shared = SharedPrompt(pulls=settings.pulls.protocol is not None)
            examinations: list[Examination | PoolExamination] = [
                Examination(worker, session, indexer, tokenizers, source, keys, fleet, patience, shared)
                for worker in settings.workers
            ]
            examinations += [PoolExamination(pool, session) for pool in settings.pools]

            async def run(each: Examination | PoolExamination) -> None:
                async with at_once:
                    await each.run()

            try:
                await asyncio.gather(*map(run, examinations))
            finally:
                await source.close()
                await tokenizers.close()
    for finding in shared.findings():
        next(each for each in examinations if each.name == finding.worker).findings.append(finding)
    return examinations
