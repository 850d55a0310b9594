"""What a worker is told to do to itself, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from router.fleet.worker import Worker
from router.http.client import connection_problem, read_answer

_MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Told:
    """How it went at one worker. `status`: what it answered with; 0 when it did not."""

    worker: Worker
    status: int
    message: str

    @property
    def well(self) -> bool:
        return 200 <= self.status < 300


async def tell(
    session: aiohttp.ClientSession,
    worker: Worker,
    path: str,
    seconds: float,
    body: object = None,
    query: Mapping[str, str] | None = None,
) -> Told:
    """POST a body to a worker, within some seconds."""
    headers = {"Content-Type": "application/json", **worker.key.headers}
    timeout = aiohttp.ClientTimeout(total=seconds)
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        async with session.post(
            worker.url + path, data=data, params=query, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            answer = (await read_answer(response, _MOST_BYTES)).decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Told(worker, 0, connection_problem(error))
    worker.key.answered(path, response.status)
    return Told(worker, response.status, _message(answer))


def _message(answer: str) -> str:
    """What an engine says: a text, or JSON that has one."""
    try:
        said = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return answer
    if isinstance(said, dict):
        error = said.get("error")
        said = error.get("message") if isinstance(error, dict) else said.get("message") or said.get("error_message")
    return said if isinstance(said, str) else answer
