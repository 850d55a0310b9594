"""The path of one chat through the code: python -m benchmarks.request_path [--trace].

An interpreted router with default settings runs in this process, on uvloop, in front of a simulated worker in another
process. The client is a thread. After a warm-up, chats without streaming are sent one after another. The output counts
our functions that the event loop's thread calls, from the arrival of the request to the end of its answer: calls,
files, and changes of file between calls. Some requests have additional work, and timers may fire. Therefore the figures
are those of the request with the fewest calls. `--trace` lists the calls of the first row in their order.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count, pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated

import structlog
import typer
import uvloop

import router
from kvrouter.processes import KvrouterProcess
from router.app.app import running_router
from router.server.http_server import HttpServer
from router.server.sockets import listen
from router.settings import Settings

_ROOT = Path(router.__file__).parent.parent
_ROOMS = tuple(f"{_ROOT}/{room}/" for room in ("indexer", "kvevents", "router"))
_WARM_UP = 50
_REQUESTS = 21
_MODEL = "simulated"

Step = tuple[str, str]
"""A file and a function in it."""


def changes_of_file(steps: list[Step]) -> int:
    """Count the calls whose file differs from the previous one's."""
    return sum(before[0] != after[0] for before, after in pairwise(steps))


def _describe(steps: list[Step]) -> str:
    files = len({file for file, _ in steps})
    return f"{len(steps)} calls in {files} files, with {changes_of_file(steps)} changes of file"


class _Calls:
    """A recorder of calls of our functions while it is on."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def on(self) -> None:
        self._steps = []
        sys.setprofile(self._profile)

    def off(self) -> list[Step]:
        sys.setprofile(None)
        return self._steps

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOMS):
            self._steps.append((code.co_filename[len(str(_ROOT)) + 1 :], code.co_qualname))


@asynccontextmanager
async def _running_router(worker: str) -> AsyncIterator[str]:
    listening = listen("127.0.0.1", 0)
    async with running_router(Settings.model_validate({"workers": [{"url": worker}]})) as app:
        server = HttpServer(app, shutdown_timeout=1)
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def _ask(connection: http.client.HTTPConnection, question: str) -> None:
    messages = [{"role": "system", "content": "You are brief. " * 40}, {"role": "user", "content": question}]
    body = json.dumps({"model": _MODEL, "messages": messages, "max_tokens": 4})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise RuntimeError(answer.decode())


async def _shortest_path(connection: http.client.HTTPConnection, numbers: count[int] | None) -> list[Step]:
    """Return the path of a chat. With `numbers`, each chat has a new last message."""
    calls, paths = _Calls(), []
    for number in range(_WARM_UP + _REQUESTS):
        question = f"What is a radix tree? {next(numbers) if numbers else ''}"
        if number >= _WARM_UP:
            calls.on()
        await asyncio.to_thread(_ask, connection, question)
        if number >= _WARM_UP:
            paths.append(calls.off())
    return min(paths, key=len)


async def _measure(worker: str) -> tuple[list[Step], list[Step]]:
    async with _running_router(worker) as address:
        connection = http.client.HTTPConnection(address)
        new = await _shortest_path(connection, count())
        again = await _shortest_path(connection, None)
        connection.close()
    return new, again


def main(trace: Annotated[bool, typer.Option("--trace", help="List the calls in order.")] = False) -> None:
    """Count the calls of one chat."""
    structlog.configure(processors=[structlog.stdlib.filter_by_level], logger_factory=structlog.stdlib.LoggerFactory())
    with KvrouterProcess(["simulate", "--port", "0"]) as worker:
        new, again = uvloop.run(_measure(worker.wait_until_listening()))
    if trace:
        for file, function in new:
            print(f"{file}:{function}")
    print(f"a chat with a new last message: {_describe(new)}")
    print(f"the same chat again:            {_describe(again)}")


if __name__ == "__main__":
    typer.run(main)
