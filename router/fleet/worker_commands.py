"""Commands to workers: POST requests that change an engine's state, such as putting it to sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

import aiohttp
import msgspec

from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.http.client import connection_problem, read_answer

_MOST_BYTES = 64 * 1024
# The timeout of sleep and wake: running requests may have to end first, or weights to be loaded.
_SLEEP_TIMEOUT = 600.0
_IDLE_CHECK_INTERVAL = 0.02

# The treatment of running requests when an engine is put to sleep: wait for their end, abort them, or keep them until
# the engine is woken.
SleepMode: TypeAlias = Literal["wait", "abort", "keep"]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The answer of one worker to a command. `status` is 0 if the worker did not answer."""

    worker: Worker
    status: int
    message: str

    @property
    def succeeded(self) -> bool:
        """True if the status is 2xx."""
        return 200 <= self.status < 300


async def send_command(
    session: aiohttp.ClientSession,
    worker: Worker,
    path: str,
    seconds: float,
    body: object = None,
    query: Mapping[str, str] | None = None,
) -> CommandResult:
    """POST a JSON body to a worker, with a timeout of `seconds` for the answer."""
    headers = {"Content-Type": "application/json", **worker.key.headers}
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        async with session.post(
            worker.url + path,
            data=data,
            params=query,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=seconds),
            allow_redirects=False,
        ) as response:
            answer = (await read_answer(response, _MOST_BYTES)).decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return CommandResult(worker, 0, connection_problem(error))
    worker.key.record_status(path, response.status)
    return CommandResult(worker, response.status, _message(answer))


async def put_to_sleep(
    fleet: Fleet, session: aiohttp.ClientSession, workers: Sequence[Worker], level: int, mode: SleepMode
) -> list[CommandResult]:
    """Put workers to sleep by vLLM's `/sleep`. They receive no requests from now on, unless the command fails.

    With the mode `wait`, the command is sent when this router's requests to the worker have ended, or after a timeout.
    Its engine would answer a request that arrives after the command only when it is woken.
    """

    async def one(worker: Worker) -> CommandResult:
        before, worker.sleep_in_change = worker.asleep, True
        fleet.set_asleep(worker, True)
        try:
            if mode == "wait":
                await _until_idle(worker)
            query = {"level": str(level), "mode": mode}
            result = await send_command(session, worker, "/sleep", _SLEEP_TIMEOUT, query=query)
            fleet.set_asleep(worker, result.succeeded or before, keeps_cache=not (result.succeeded and level))
        finally:
            worker.sleep_in_change = False
        return result

    return await asyncio.gather(*map(one, workers))


async def wake(fleet: Fleet, session: aiohttp.ClientSession, workers: Sequence[Worker]) -> list[CommandResult]:
    """Wake workers by vLLM's `/wake_up`."""

    async def one(worker: Worker) -> CommandResult:
        result = await send_command(session, worker, "/wake_up", _SLEEP_TIMEOUT)
        if result.succeeded:
            fleet.set_asleep(worker, False)
        return result

    return await asyncio.gather(*map(one, workers))


async def _until_idle(worker: Worker) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_SLEEP_TIMEOUT):
            while worker.health.attempts:  # noqa: ASYNC110 - an event would cost time at the end of every request
                await asyncio.sleep(_IDLE_CHECK_INTERVAL)


def _message(answer: str) -> str:
    """Return the message of an engine's answer, which is plain text or JSON with an error."""
    try:
        parsed = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return answer
    if isinstance(parsed, dict):
        error = parsed.get("error")
        if isinstance(error, dict):
            parsed = error.get("message")
        else:
            parsed = parsed.get("message") or parsed.get("error_message")
    return parsed if isinstance(parsed, str) else answer
