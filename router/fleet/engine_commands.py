"""Commands to the engines of many workers at once: pauses, new weights, resets, memory, profiles, and reports.

    client ──▶ router ──▶ every worker, in its engine's words ──▶ one answer with the answers of all
                 └──▶ what the command changes: blocks held, requests received, at all routers

A command has the names of both engines, and each worker receives the name that its engine knows. Parameters are
forwarded as they are. Where vLLM reads them from the query, fields of the body are moved there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import aiohttp
import structlog

from router.fleet.discovery import Engine
from router.fleet.fleet import Fleet
from router.fleet.worker import EngineState, Worker
from router.fleet.worker_commands import CommandResult, send_command

log = structlog.get_logger()

# The timeout of a command: running requests may have to end first, or weights to be loaded.
_TIMEOUT = 1800.0
_REPORT_TIMEOUT = 10.0
_IDLE_TIMEOUT = 600.0
_IDLE_CHECK_INTERVAL = 0.02
# What is released if a command names no tags, and must be resumed before a worker can compute.
_ALL_TAGS = frozenset({"kv_cache", "weights"})
_NO_SUCH_ROUTE = (404, 405, 501)
# The treatment of running requests by a pause or by sleep, in both engines' words.
MODES = ("wait", "abort", "keep", "retract", "in_place")


class Effect(Enum):
    """A change of the router's state by a command."""

    NONE = auto()
    PAUSE = auto()  # the worker receives no requests
    CONTINUE = auto()
    WEIGHTS = auto()  # the blocks that it holds are of old weights
    FLUSH = auto()  # it holds no blocks
    RELEASE = auto()  # it receives no requests, and holds no blocks unless the KV cache is kept
    RESUME = auto()


# Effects of commands whose parameters vLLM reads from the query.
_BY_QUERY = (Effect.PAUSE, Effect.CONTINUE, Effect.FLUSH, Effect.RELEASE, Effect.RESUME)


@dataclass(frozen=True, slots=True)
class Command:
    """A command, with its paths at each engine in the order in which they are tried. An engine without paths lacks it.

    - `names`: the paths by which clients request it.
    - `open_on_loopback`: without `server.token`, a router on loopback accepts it.
    """

    summary: str
    names: tuple[str, ...]
    vllm: tuple[str, ...] = ()
    sglang: tuple[str, ...] = ()
    effect: Effect = Effect.NONE
    method: str = "POST"
    open_on_loopback: bool = False

    def paths(self, worker: Worker) -> tuple[str, ...]:
        """Return its paths at a worker."""
        return self.sglang if _is_sglang(worker) else self.vllm


COMMANDS = (
    Command(
        "Pause generation. Paused workers receive no requests.",
        ("/pause_generation", "/pause"),
        ("/pause",),
        ("/pause_generation",),
        Effect.PAUSE,
    ),
    Command(
        "Continue generation after a pause.",
        ("/continue_generation", "/resume"),
        ("/resume",),
        ("/continue_generation",),
        Effect.CONTINUE,
    ),
    Command(
        "Load new weights from a folder or a hub. The workers then hold no blocks.",
        ("/update_weights_from_disk",),
        ("/collective_rpc",),
        ("/update_weights_from_disk",),
        Effect.WEIGHTS,
    ),
    Command(
        "Receive new weights from a distributed source. The workers then hold no blocks.",
        ("/update_weights_from_distributed", "/update_weights"),
        ("/update_weights",),
        ("/update_weights_from_distributed",),
        Effect.WEIGHTS,
    ),
    Command(
        "Receive new weights as tensors. The workers then hold no blocks.",
        ("/update_weights_from_tensor",),
        (),
        ("/update_weights_from_tensor",),
        Effect.WEIGHTS,
    ),
    Command("Begin an update of weights in parts.", ("/start_weight_update",), ("/start_weight_update",)),
    Command(
        "End an update of weights in parts. The workers then hold no blocks.",
        ("/finish_weight_update",),
        ("/finish_weight_update",),
        (),
        Effect.WEIGHTS,
    ),
    Command(
        "Join a group that sends weights.",
        ("/init_weights_update_group", "/init_weight_transfer_engine"),
        ("/init_weight_transfer_engine",),
        ("/init_weights_update_group",),
    ),
    Command(
        "Leave a group that sends weights.", ("/destroy_weights_update_group",), (), ("/destroy_weights_update_group",)
    ),
    Command(
        "Set the version of the weights.",
        ("/update_weight_version",),
        ("/update_weight_version",),
        ("/update_weight_version",),
    ),
    Command(
        "Reset the prefix caches. The workers then hold no blocks.",
        ("/reset_prefix_cache", "/flush_cache"),
        ("/reset_prefix_cache",),
        ("/flush_cache",),
        Effect.FLUSH,
        open_on_loopback=True,
    ),
    Command(
        "Release memory. The workers receive no requests until they resume.",
        ("/sleep", "/release_memory_occupation"),
        ("/sleep",),
        ("/release_memory_occupation",),
        Effect.RELEASE,
    ),
    Command(
        "Resume after memory was released.",
        ("/wake_up", "/resume_memory_occupation"),
        ("/wake_up",),
        ("/resume_memory_occupation",),
        Effect.RESUME,
    ),
    Command("Start the profilers.", ("/start_profile",), ("/start_profile",), ("/start_profile",)),
    Command("Stop the profilers.", ("/stop_profile",), ("/stop_profile",), ("/stop_profile",)),
    Command("Abort requests.", ("/abort_request",), ("/abort_requests",), ("/abort_request",)),
    Command(
        "Return the loads that the engines report.",
        ("/loads", "/get_loads"),
        ("/load",),
        ("/v1/loads", "/get_load"),
        method="GET",
    ),
    Command(
        "Return the engines' own settings.",
        ("/get_server_info", "/server_info"),
        ("/server_info",),
        ("/server_info", "/get_server_info"),
        method="GET",
    ),
)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a command: pairs of the query, and the fields of its body."""

    query: list[tuple[str, str]] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Return a parameter; None if it is missing."""
        return self.body.get(name, dict(self.query).get(name))

    def tags(self) -> frozenset[str]:
        """Return the tags of memory that it names; empty: it names none."""
        named = self.body.get("tags") or [value for name, value in self.query if name == "tags"]
        return frozenset(map(str, named)) if isinstance(named, list) else frozenset()

    def for_engine(self, command: Command, worker: Worker) -> tuple[list[tuple[str, str]], dict[str, Any] | None]:
        """Return the query and the body for a worker. A body of None is not sent."""
        query, body = self.query, self.body
        if command.method == "GET":
            return query, None
        if _is_sglang(worker):
            fields = {**dict(query), **body}
            return [], fields | {"tags": sorted(self.tags())} if self.tags() else fields
        if command.effect in _BY_QUERY:
            return [*query, *_as_query(body)], None
        if command.vllm == ("/collective_rpc",):
            path = {"kwargs": {"weights_path": self.get("model_path")}} if self.get("model_path") else {}
            return [], {"method": "reload_weights", **path}
        return query, body


class EngineCommands:
    """Sends commands to workers, and applies their effects. `on_changed`: called with a worker whose state changed."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self.on_changed: list[Callable[[Worker], None]] = []
        self._fleet = fleet
        self._session = session

    async def run(self, command: Command, workers: Sequence[Worker], parameters: Parameters) -> list[CommandResult]:
        """Send a command to workers at the same time, and return their answers in the same order."""
        send = {
            Effect.PAUSE: self._pause,
            Effect.CONTINUE: self._continue,
            Effect.RELEASE: self._release,
            Effect.RESUME: self._resume,
        }.get(command.effect, self._plain)
        return await asyncio.gather(*(send(command, worker, parameters) for worker in workers))

    def apply_elsewhere(self, url: str, state: EngineState) -> None:
        """Apply the state of a worker that another router set, if it is newer than the known one."""
        worker = self._fleet.at(url)
        if worker is None or state.at <= worker.engine.at:
            return
        lost = state.lost_at > worker.engine.lost_at
        self._apply(worker, state, lost)

    async def _plain(self, command: Command, worker: Worker, parameters: Parameters) -> CommandResult:
        result = await self._send(command, worker, parameters)
        if command.effect is Effect.FLUSH:
            lost = result.succeeded
        else:  # A failed update may have replaced some of the weights.
            lost = command.effect is Effect.WEIGHTS and not 400 <= result.status < 500 and result.status != 501
        if lost:
            self._change(worker, lost=True)
        return result

    async def _pause(self, command: Command, worker: Worker, parameters: Parameters) -> CommandResult:
        before = worker.engine.paused
        self._change(worker, paused=True)
        result = await self._send(command, worker, parameters)
        if not result.succeeded:
            self._change(worker, paused=before)
        elif not _is_sglang(worker) and parameters.get("mode") != "keep" and not _is_false(parameters, "clear_cache"):
            self._change(worker, lost=True)
        return result

    async def _continue(self, command: Command, worker: Worker, parameters: Parameters) -> CommandResult:
        result = await self._send(command, worker, parameters)
        if result.succeeded:
            self._change(worker, paused=False)
        return result

    async def _release(self, command: Command, worker: Worker, parameters: Parameters) -> CommandResult:
        """Put a worker to sleep, after its requests have ended, unless another mode than `wait` is requested.

        Its engine would answer a request that arrives after the command only when it is woken.
        """
        mode = parameters.get("mode") or "wait"
        tags = parameters.tags() or _ALL_TAGS
        keeps_cache = "kv_cache" not in tags or (not _is_sglang(worker) and str(parameters.get("level")) == "0")
        before, worker.sleep_in_change = worker.engine.released, True
        was_asleep = worker.asleep
        self._change(worker, released=before | tags, asleep=True)
        try:
            if mode == "wait":
                await _until_idle(worker)
            if not _is_sglang(worker) and parameters.get("mode") is None:
                parameters = Parameters([*parameters.query, ("mode", mode)], parameters.body)
            result = await self._send(command, worker, parameters)
            if not result.succeeded:
                self._change(worker, released=before, asleep=was_asleep)
            elif not keeps_cache:
                self._change(worker, lost=True)
        finally:
            worker.sleep_in_change = False
        return result

    async def _resume(self, command: Command, worker: Worker, parameters: Parameters) -> CommandResult:
        result = await self._send(command, worker, parameters)
        if result.succeeded:
            tags = parameters.tags()
            self._change(worker, released=worker.engine.released - tags if tags else frozenset())
        return result

    async def _send(self, command: Command, worker: Worker, parameters: Parameters) -> CommandResult:
        paths = command.paths(worker)
        engine = worker.description.engine if worker.description else Engine.OTHER
        result = CommandResult(worker, 501, f"{engine} has no counterpart of {command.names[0]}.")
        query, body = parameters.for_engine(command, worker)
        timeout = _REPORT_TIMEOUT if command.method == "GET" else _TIMEOUT
        for path in paths:
            result = await send_command(self._session, worker, path, timeout, body, query, command.method)
            if result.status not in _NO_SUCH_ROUTE:
                break
        return result

    def _change(
        self,
        worker: Worker,
        *,
        paused: bool | None = None,
        released: frozenset[str] | None = None,
        asleep: bool | None = None,
        lost: bool = False,
    ) -> None:
        """Apply a change of a worker's state, and report it to listeners."""
        known = worker.engine
        at = max(time.time_ns(), known.at + 1)  # later than any known change, whatever the clock of its router
        state = EngineState(
            at,
            known.paused if paused is None else paused,
            known.released if released is None else released,
            at if lost else known.lost_at,
        )
        self._apply(worker, state, lost, asleep)
        for on_changed in self.on_changed:
            on_changed(worker)

    def _apply(self, worker: Worker, state: EngineState, lost: bool, asleep: bool | None = None) -> None:
        before, worker.engine = worker.engine, state
        if lost:
            self._fleet.notify_cache_lost(worker)
        if asleep is not None or state.released != before.released:
            self._fleet.set_asleep(worker, bool(state.released) if asleep is None else asleep)
        if state.paused is not before.paused:
            log.info("worker paused" if state.paused else "worker continued", worker=worker.name)
            self._fleet.changed()


def _is_sglang(worker: Worker) -> bool:
    return worker.description is not None and worker.description.engine is Engine.SGLANG


def _is_false(parameters: Parameters, name: str) -> bool:
    return str(parameters.get(name)).lower() in ("false", "0")


def _as_query(body: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in body.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                yield name, str(each).lower() if isinstance(each, bool) else str(each)


async def _until_idle(worker: Worker) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_IDLE_TIMEOUT):
            while worker.health.attempts:  # noqa: ASYNC110 - an event would cost time at the end of every request
                await asyncio.sleep(_IDLE_CHECK_INTERVAL)
