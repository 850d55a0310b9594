"""Commands to workers: how one is sent and answered, and those for LoRA adapters.

LoRA adapters are loaded and unloaded on all workers of a model, or on chosen ones. Those that were loaded on all
workers are remembered until the process ends. Workers that are added or restarted later load them too. Adapters that
shall outlive the router belong in the engines' own arguments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import structlog

from kvevents.decoding import read_json
from router.fleet.discovery import Engine, ServedModel
from router.fleet.worker import Worker
from router.http.client import connection_problem, read_answer

_MOST_BYTES = 1024 * 1024
log = structlog.get_logger()
# Seconds for a command: the engine may have to download the adapter.
_TIMEOUT = 300.0
_RETRY_SECONDS = 60.0
# Maximum number of adapters that are remembered.
_MOST_KEPT = 1000


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The answer of one worker to a command. `status` is 0 if the worker did not answer.

    - `answer`: the answer's JSON; None if it has none.
    """

    worker: Worker
    status: int
    message: str
    answer: Any = None

    @property
    def succeeded(self) -> bool:
        """True if the status is 2xx, and the engine does not report `success: false`."""
        refused = isinstance(self.answer, dict) and self.answer.get("success") is False
        return 200 <= self.status < 300 and not refused


async def send_command(
    session: aiohttp.ClientSession,
    worker: Worker,
    path: str,
    seconds: float,
    body: object = None,
    query: Sequence[tuple[str, str]] = (),
    method: str = "POST",
) -> CommandResult:
    """Send a JSON body to a worker, with a timeout of `seconds` for the answer."""
    headers = {"Content-Type": "application/json", **worker.key.headers}
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        async with session.request(
            method,
            worker.url + path,
            data=data,
            params=list(query),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=seconds),
            allow_redirects=False,
        ) as response:
            answer = (await read_answer(response, _MOST_BYTES)).decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return CommandResult(worker, 0, connection_problem(error))
    worker.key.record_status(path, response.status)
    try:
        parsed = read_json(answer)
    except msgspec.DecodeError:
        parsed = None
    return CommandResult(worker, response.status, _message(answer, parsed), parsed)


def _message(answer: str, parsed: Any) -> str:
    """Return what an answer says, in words."""
    if isinstance(parsed, dict):
        error = parsed.get("error")
        if isinstance(error, dict):
            parsed = error.get("message")
        else:
            parsed = parsed.get("message") or parsed.get("error_message") or ""
    return parsed if isinstance(parsed, str) else answer if parsed is None else ""


@dataclass(frozen=True, slots=True)
class _KeptAdapter:
    """An adapter that all workers of a model load, and the body of the command that loads it."""

    model: str
    body: dict[str, Any]


class Adapters:
    """Commands to load and unload adapters, and the adapters that workers load when they are added."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._kept: dict[str, _KeptAdapter] = {}
        self._tried: dict[tuple[str, str], float] = {}  # time of the last attempt, by worker and adapter
        self._loading: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel the commands to added workers."""
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)

    async def load(self, workers: Sequence[Worker], body: dict[str, Any], model: str | None) -> list[CommandResult]:
        """Load an adapter on workers, and on future workers of the base model `model`, if it is given."""
        results = await asyncio.gather(*(self._send(worker, "load_lora_adapter", body) for worker in workers))
        if model is not None and any(each.succeeded for each in results) and len(self._kept) < _MOST_KEPT:
            self._kept[body["lora_name"]] = _KeptAdapter(model, body)
        return results

    async def unload(self, workers: Sequence[Worker], body: dict[str, Any]) -> list[CommandResult]:
        """Unload an adapter from workers. Future workers do not load it."""
        self._kept.pop(body["lora_name"], None)
        return await asyncio.gather(*(self._send(worker, "unload_lora_adapter", body) for worker in workers))

    def provide(self, worker: Worker, model: ServedModel) -> None:
        """Load the remembered adapters of a model on a worker that serves it without them."""
        for name, kept in list(self._kept.items()):
            if kept.model != model.name or worker.served(name) is not None:
                continue
            now = time.monotonic()
            if now - self._tried.get((worker.url, name), -_RETRY_SECONDS) < _RETRY_SECONDS:
                continue
            self._tried[worker.url, name] = now
            loading = asyncio.create_task(self._provide(worker, name, kept), name=f"load {name} at {worker.name}")
            self._loading.add(loading)
            loading.add_done_callback(self._loading.discard)

    def removed(self, worker: Worker) -> None:
        """Forget a removed worker."""
        for key in [key for key in self._tried if key[0] == worker.url]:
            del self._tried[key]

    async def _provide(self, worker: Worker, name: str, kept: _KeptAdapter) -> None:
        result = await self._send(worker, "load_lora_adapter", kept.body)
        if result.succeeded and self._kept.get(name) is not kept:  # The adapter was unloaded meanwhile.
            await self._send(worker, "unload_lora_adapter", {"lora_name": name})
        log.info(
            "adapter loaded" if result.succeeded else "adapter not loaded",
            worker=worker.name,
            adapter=name,
            status=result.status,
            message=result.message,
        )
        worker.probe_now.set()

    async def _send(self, worker: Worker, command: str, body: dict[str, Any]) -> CommandResult:
        is_sglang = worker.description is not None and worker.description.engine is Engine.SGLANG
        path = f"/{command}" if is_sglang else f"/v1/{command}"
        return await send_command(self._session, worker, path, _TIMEOUT, body)
