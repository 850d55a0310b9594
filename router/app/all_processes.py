"""The answers of one process for all processes of a port: figures are merged, and changes reach every process.

- `/metrics`: every sample, with a label `process`.
- `/workers`, `/health`: sums, and the worst state of each worker.
- `POST /workers` and other changes: applied here, and then by all other processes.
- `/selection/reservations`: answered by the process that has the reservation.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvevents.decoding import read_json
from router.fleet.fleet import Fleet
from router.fleet.worker import WorkerState
from router.http.headers import Headers
from router.observability.advice import about
from router.sharing.worker_processes import CHANGES_PATH, ProcessAnswer, WorkerProcesses, api_changes

log = structlog.get_logger()

_MERGED = frozenset({"/metrics", "/workers", "/health"})
_RELAYED = frozenset(
    {
        ("POST", "/workers"),
        ("DELETE", "/workers"),
        ("POST", "/add_worker"),
        ("POST", "/remove_worker"),
        ("POST", "/workers/drain"),
        ("POST", "/workers/undrain"),
        ("POST", "/register"),
        ("POST", "/unregister"),
        ("POST", "/selection/workers"),
    }
)
# Paths of one worker, which end with its id.
_RELAYED_PATHS = ("/workers/", "/selection/workers/")
_RESERVATIONS = "/selection/reservations"
_MERGE_SECONDS = 1.0
_RELAY_SECONDS = 15.0
_MAX_BODY_BYTES = 8 << 20

# If processes report different states of a worker, the first of these is shown. `DRAINED` needs all processes.
_WORST_FIRST = [
    WorkerState.DRAINING,
    WorkerState.DOWN,
    WorkerState.EJECTED,
    WorkerState.HALF_OPEN,
    WorkerState.WARMING,
    WorkerState.NEW,
    WorkerState.DRAINED,
    WorkerState.ASLEEP,
    WorkerState.PAUSED,
    WorkerState.READY,
]


class AllProcesses:
    """The ASGI application of one of several processes. It merges and relays the requests that concern all of them."""

    def __init__(
        self, app: ASGIApp, worker_processes: WorkerProcesses, fleet: Fleet, selected: Callable[[], list[Any]]
    ) -> None:
        """Answer for all processes. `selected`: returns the workers that were registered below `/selection`."""
        self._app = app
        self._worker_processes = worker_processes
        self._fleet = fleet
        self._selected = selected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        if (scope.get("server") or ("",))[0] == str(self._worker_processes.path):  # a request of another process
            if path == CHANGES_PATH:
                await _answer(
                    send, 200, [(b"content-type", b"application/json")], api_changes(self._fleet, self._selected())
                )
            else:
                await self._app(scope, receive, send)
        elif method == "GET" and path in _MERGED:
            await self._merged(scope, receive, send)
        elif (method, path) in _RELAYED or (method in ("DELETE", "PATCH") and path.startswith(_RELAYED_PATHS)):
            await self._relayed(scope, receive, send)
        elif path.startswith(_RESERVATIONS):
            await self._found(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _merged(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = await _captured(self._app, scope, receive)
        if own.status != 200:
            await _answer(send, own.status, own.headers, own.body)
            return
        others = await self._worker_processes.ask("GET", scope["path"], scope["headers"], b"", _MERGE_SECONDS)
        answers = [
            ProcessAnswer(self._worker_processes.number, 200, own.body),
            *(each for each in others if each.status == 200),
        ]
        match scope["path"]:
            case "/metrics":
                body = merged_metrics(answers, self._worker_processes.processes)
            case "/workers":
                body = msgspec.json.encode({"workers": merged_workers([_workers(each) for each in answers])})
            case _:
                body = msgspec.json.encode(merged_health(answers, self._worker_processes.processes))
        await _answer(send, 200, own.headers, body)

    async def _relayed(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if body is None:
            await self._app(scope, _replay(b"", receive), send)  # the application refuses it, because it is too large
            return
        own = await _captured(self._app, scope, _replay(body, receive))
        if own.status < 300:
            query = scope["query_string"].decode("latin-1")
            target = scope["path"] + (f"?{query}" if query else "")
            others = await self._worker_processes.ask(scope["method"], target, scope["headers"], body, _RELAY_SECONDS)
            for each in others:
                if each.status >= 300:
                    log.warning("another process refused a change", process=each.number, change=scope["path"])
        await _answer(send, own.status, own.headers, own.body)

    async def _found(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a reservation or a selection that another process may have."""
        body = await _read(receive)
        if body is None:
            await self._app(scope, _replay(b"", receive), send)
            return
        answer = await _captured(self._app, scope, _replay(body, receive))
        status, content = answer.status, answer.body
        if status == 404:
            asked = self._worker_processes.ask(scope["method"], scope["path"], scope["headers"], body, _RELAY_SECONDS)
            for each in await asked:
                if each.status != 404:
                    status, content = each.status, each.body
        await _answer(send, status, answer.headers, content)


def merged_metrics(answers: list[ProcessAnswer], processes: int) -> bytes:
    """Return the Prometheus text of several processes as one text, with a label `process`."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for answer in answers:
        family: tuple[list[str], list[str]] = ([], [])
        for line in answer.body.decode().splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], ([], []))
            if not line.startswith("#"):
                family[1].append(_labelled(line, answer.number))
            elif len(family[0]) < 2:
                family[0].append(line)
    up = {answer.number for answer in answers}
    lines = [
        "# HELP kvrouter_process_up 1 while a process answers",
        "# TYPE kvrouter_process_up gauge",
        *(f'kvrouter_process_up{{process="{number}"}} {float(number in up)}' for number in range(processes)),
    ]
    for head, samples in families.values():
        lines += head + samples
    return "\n".join([*lines, ""]).encode()


def _labelled(sample: str, process: int) -> str:
    name = sample.split(" ", 1)[0].split("{", 1)[0]
    rest = sample[len(name) :]
    label = f'process="{process}"'
    return f"{name}{{{label},{rest[1:]}" if rest.startswith("{") else f"{name}{{{label}}}{rest}"


def merged_workers(reports: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the workers that several processes report, with the sum of their loads and the worst state."""
    merged = reports[0]
    others = [{(each["worker"], each.get("model")): each for each in report} for report in reports[1:]]
    for worker in merged:
        same = [worker, *(known[key] for known in others if (key := (worker["worker"], worker.get("model"))) in known)]
        reported = [each for each in same if "state" in each]
        if reported:
            worst = min(reported, key=lambda each: _WORST_FIRST.index(WorkerState(each["state"])))
            requests = sum(each["requests_in_flight"] for each in reported)
            worker |= {name: worst[name] for name in ("up", "state", "problem", "reason", "share")}
            worker["requests_in_flight"] = requests
        ranks = [{rank["dp_rank"]: rank for rank in each["ranks"]} for each in same]
        for rank in worker["ranks"]:
            _add_load(rank, [known[rank["dp_rank"]] for known in ranks if rank["dp_rank"] in known])
    return merged


def _add_load(rank: dict[str, Any], same: list[dict[str, Any]]) -> None:
    """Set a rank's load to the sum of all processes, and its load elsewhere to what is left."""
    if "load" not in rank:
        return
    known = {name: rank["load"][name] + rank["elsewhere"][name] for name in rank["load"]}
    rank["load"] = {name: sum(each["load"][name] for each in same if "load" in each) for name in known}
    rank["elsewhere"] = {name: max(known[name] - rank["load"][name], 0) for name in known}


def merged_health(answers: list[ProcessAnswer], processes: int) -> dict[str, Any]:
    """Return the health of all processes. A finding that not all report names the processes that do."""
    reports = {answer.number: read_json(answer.body) for answer in answers}
    health: dict[str, Any] = next(iter(reports.values()))
    found: dict[tuple[object, ...], tuple[dict[str, Any], list[int]]] = {}
    for number, report in reports.items():
        for finding in report["findings"]:
            same = tuple(str(value) for name, value in finding.items() if name != "detail")
            found.setdefault(same, (finding, []))[1].append(number)
    health["findings"] = [
        finding | ({} if len(numbers) == len(reports) else {"processes": numbers})
        for finding, numbers in found.values()
    ]
    health["findings"] += [
        {
            "finding": "process_down",
            "process": number,
            "detail": "It does not answer. If it has ended, a new process is started.",
            **about("process_down"),
        }
        for number in range(processes)
        if number not in reports
    ]
    if len(reports) < processes and health["status"] == "ok":
        health["status"] = "degraded"
    health["queue"] = dict(sum((Counter(report["queue"]) for report in reports.values()), Counter()))
    health["processes"] = {"running": len(reports), "of": processes}
    return health


def _workers(answer: ProcessAnswer) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = read_json(answer.body)["workers"]
    return workers


class _Captured:
    def __init__(self) -> None:
        self.status = 500
        self.headers: Headers = []
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", []))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")


async def _captured(app: ASGIApp, scope: Scope, receive: Receive) -> _Captured:
    captured = _Captured()
    await app(scope, receive, captured.send)
    return captured


async def _read(receive: Receive) -> bytes | None:
    """Return a request's body; None if it is too large, or not complete after `_RELAY_SECONDS` seconds."""
    body: bytes = b""
    try:
        async with asyncio.timeout(_RELAY_SECONDS):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > _MAX_BODY_BYTES:
                    return None
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return body
    except TimeoutError:
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that returns a body that was already read, and then continues with `receive`."""
    left = [body]

    async def again() -> Message:
        return {"type": "http.request", "body": left.pop()} if left else await receive()

    return again


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    length = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": kept + length})
    await send({"type": "http.response.body", "body": body})
