"""The examination of a running router, by its /health, /ready and /workers. Workers receive no requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from router.http.client import connection_problem, refuse_redirects

_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)

# Advice for the router's findings; docs/troubleshooting.md has more.
ROUTER_FIXES = {
    "worker_down": "Start the worker, or correct its URL. The router retries by itself.",
    "worker_key": "Correct the worker's api_key in the settings, or fleet.api_key.",
    "worker_description": "Check the worker's answers to /v1/models, /kv_event_sources and /server_info; "
    "fleet.max_ranks and fleet.allowed_networks limit how much of them is used.",
    "worker_left_out": "Check the worker's log: it fails, hangs or is slow. The router tries it again.",
    "rank_left_out": "Check this rank in the worker's log. The router tries it again.",
    "events_missing": "Switch on the engine's events, open their port to the router, and compare keys; "
    "`kvrouter doctor --worker` follows one prompt to the index.",
    "events_lost": "Set a replay endpoint of the engine, or increase its buffer_steps.",
    "drift": "See docs/troubleshooting.md; `kvrouter doctor --worker` compares tokens and events.",
    "load_not_shared": "Check Redis. The router reconnects by itself.",
    "process_down": "Check the router's log for the reason. The process is restarted.",
    "prompt_length": "Configure the tokenizer and the chat template of the engine.",
    "tokenizer_missing": "Set models: NAME: tokenizer: to the model's folder or its name on the Hub.",
    "tokenizer_incomplete": "Install the extra that the evidence names.",
    "prompts_asked": "No action is needed. To save time, configure the engine's model files and chat template.",
    "prompts_differ": "Start vLLM with --enable-scale-out, or configure the engine's model files and template.",
    "tokenizer_suspected": "The finding ends when the next prompts agree. Check the requests of clients.",
    "prompts_by_text": "Set models: NAME: tokenizer: to the model's folder or its name on the Hub.",
    "no_models": "Set model: of the worker in the settings.",
    "model_changed": "No action is needed after an intended change: the new model's prompts are probed again.",
    "not_ready": "Wait, or check the findings above. Send no requests to this router yet.",
}
_UNKNOWN = "See docs/troubleshooting.md of the router's version."


class RouterError(Exception):
    """A router that cannot be examined. The message has the reason."""


@dataclass(slots=True)
class RunningFleet:
    """The confirmed steps and findings of a running fleet, by router or worker. `about` describes the router."""

    url: str
    about: str = ""
    passed: dict[str, list[str]] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def places(self) -> list[str]:
        """The URLs of the router and its workers."""
        return list(self.passed)

    def ok(self, place: str, line: str) -> None:
        """Record a confirmed step."""
        self.passed.setdefault(place, []).append(line)


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
        _examine_tokenizer(fleet, model, report)
    fleet.findings = [_finding(fleet.url, each) for each in health["findings"]] + fleet.findings
    return fleet


async def _asked(session: aiohttp.ClientSession, url: str, path: str, also: int = 200) -> dict[str, Any]:
    try:
        async with session.get(url + path) as response:
            if response.status in (401, 403):
                raise RouterError(f"{url} needs the admin token for {path}: set --token")
            if response.status not in (200, also):
                raise RouterError(f"{url}{path} answers {response.status}: is this a router's URL?")
            return msgspec.json.decode(await response.read(), type=dict[str, Any])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RouterError(f"{url} {connection_problem(error)}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise RouterError(f"{url} is not a router: {path} {error}") from error


def _examine_router(fleet: RunningFleet, health: dict[str, Any], ready: dict[str, Any]) -> None:
    policy = health.get("policy", "?")
    fleet.about = f"kvrouter {health.get('version', 'before 0.2')}, {health.get('core', '?')} index, policy {policy}"
    fleet.ok(fleet.url, fleet.about)
    if ready["status"] == "ready":
        fleet.ok(fleet.url, f"ready; {health['workers_up']} of {health['workers']} workers answer")
    else:
        fleet.findings.append(_finding(fleet.url, {"finding": "not_ready", "detail": ready["status"]}))
    queue = ", ".join(f"{waiting} wait ({reason})" for reason, waiting in health.get("queue", {}).items() if waiting)
    fleet.ok(fleet.url, f"queue: {queue or 'empty'}")


def _examine_worker(fleet: RunningFleet, worker: dict[str, Any]) -> None:
    url = worker["worker"]
    state = worker.get("state", "registered")
    serves = f", serves {worker['model']}" if worker.get("model") else ""
    fleet.ok(url, f"{state}{serves}, {worker.get('requests_in_flight', 0)} requests in flight")
    for rank in worker["ranks"]:
        tokens = sum(rank["blocks"].values()) * max(rank["block_sizes"], default=0)
        lag = f", {1000 * rank['lag_seconds']:.0f} ms behind" if rank.get("lag_seconds") is not None else ""
        where = f" from {rank['endpoint']}" if rank.get("endpoint") else ""
        fleet.ok(url, f"rank {rank['dp_rank']}: events {rank['state']}{where}{lag}; holds {tokens} tokens")


def _examine_tokenizer(fleet: RunningFleet, model: str, report: dict[str, Any]) -> None:
    shapes = report.get("shapes", {})
    exact = sum(way == "local" for way in shapes.values())
    compared = f"; {exact} of {len(shapes)} probes have the engine's tokens" if exact else ""
    reading = f", by {report['reading']}" if report.get("reading") else ""
    fleet.ok(fleet.url, f"prompts for {model} become tokens: {report['way']}{reading}{compared}")


def _finding(router: str, found: dict[str, Any]) -> dict[str, Any]:
    """Convert a finding of the router to the doctor's form."""
    evidence = found.get("detail") or ""
    if model := found.get("model"):
        evidence = f"{model}: {evidence}"
    return {
        "cause": found["finding"],
        "worker": found.get("worker", router),
        "dp_rank": found.get("dp_rank"),
        "evidence": evidence,
        "fix": ROUTER_FIXES.get(found["finding"], _UNKNOWN),
    }
