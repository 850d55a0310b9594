"""The path of one chat through the code: python -m benchmarks.request_path [--trace].

An interpreted router with default settings runs in this process, on uvloop, in front of a simulated worker in another
process. The client is a thread. After a warm-up, each counted chat follows another chat or a pause, because the live
page samples at most 20 chats a second. The output counts our functions that the event loop's thread calls, from the
arrival of the request to the end of its answer: calls, files, and changes of file between calls. Some requests have
additional work, and timers may fire. Therefore the figures of a row are those of its request with the fewest calls.
One row has the choice made step by step, as the specification of the native call does. `KVROUTER_INDEX_CORE=python` in
the environment replaces all native code by its Python twins. `--trace` lists the calls of each row in their order.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, pairwise, repeat
from pathlib import Path
from types import FrameType
from typing import Annotated
from unittest.mock import patch

import structlog
import typer
import uvloop

import router
from kvrouter.processes import KvrouterProcess
from router.app.app import running_router
from router.routing.native_choice import NativeChoice
from router.server.http_server import HttpServer
from router.server.sockets import listen
from router.settings import Settings

_ROOT = Path(router.__file__).parent.parent
_PACKAGES = ("indexer", "kvevents", "router")
_ROOMS = tuple(f"{_ROOT}/{package}/" for package in _PACKAGES)
_WARM_UP = 50
_REQUESTS = 60
_PAUSE = 0.06  # seconds after which the next chat is sampled
# The call that keeps a request for the live page.
_SAMPLE = "router/routing/assignment.py", "Samples.keep"
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
    """A recorder of calls of our functions while it is on.

    - `generated`: for each time that it was on, our classes whose generated constructor ran.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self.generated: list[set[str]] = []

    def on(self) -> None:
        self._steps = []
        self.generated.append(set())
        sys.setprofile(self._profile)

    def off(self) -> list[Step]:
        sys.setprofile(None)
        return self._steps

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOMS):
            self._steps.append((code.co_filename[len(str(_ROOT)) + 1 :], code.co_qualname))
        elif event == "call" and code.co_filename == "<string>" and code.co_name == "__init__":
            made = type(frame.f_locals.get("self"))
            if made.__module__.split(".")[0] in _PACKAGES:
                self.generated[-1].add(f"{made.__module__}.{made.__qualname__}")


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


def _ask(connection: http.client.HTTPConnection, question: str, stream: bool) -> None:
    messages = [{"role": "system", "content": "You are brief. " * 40}, {"role": "user", "content": question}]
    body = {"model": _MODEL, "messages": messages, "max_tokens": 4} | ({"stream": True} if stream else {})
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise RuntimeError(answer.decode())


async def _paths(
    address: str, numbers: Iterator[int], stream: bool = False, calls: _Calls | None = None, requests: int = _REQUESTS
) -> list[list[Step]]:
    """Return the paths of chats whose questions have these numbers."""
    calls, paths = calls or _Calls(), []
    connection = http.client.HTTPConnection(address)
    for _ in range(min(_WARM_UP, requests)):
        await asyncio.to_thread(_ask, connection, f"What is a radix tree? {next(numbers)}", stream)
    for number in range(requests):
        if number % 2:
            await asyncio.sleep(_PAUSE)
        else:
            await asyncio.to_thread(_ask, connection, f"What is a radix tree? {next(numbers)}", stream)
        calls.on()
        await asyncio.to_thread(_ask, connection, f"What is a radix tree? {next(numbers)}", stream)
        paths.append(calls.off())
    connection.close()
    return paths


def _is_sampled(path: list[Step]) -> bool:
    return _SAMPLE in path


async def interpreted_parts(worker: str) -> tuple[set[str], set[str]]:
    """Return the files whose functions, and the classes whose generated constructors, chats call in the interpreter.

    A whole chat and a streamed one are read: of each, what all its requests call, because timers fire during some.
    """
    files, classes = set[str](), set[str]()
    async with _running_router(worker) as address:
        for stream in (False, True):
            calls = _Calls()
            paths = await _paths(address, count(stream * 1_000_000), stream, calls, requests=20)
            files |= set.intersection(*({file for file, _ in path} for path in paths))
            classes |= set.intersection(*calls.generated)
    return files, classes


async def _measure(worker: str) -> dict[str, list[list[Step]]]:
    async with _running_router(worker) as address:
        new = await _paths(address, count())
        with patch.object(NativeChoice, "find", return_value=None):
            in_steps = await _paths(address, count(2_000_000))
        again = await _paths(address, repeat(0))
        streamed = await _paths(address, count(1_000_000), stream=True)
    return {
        "a new last message": [path for path in new if not _is_sampled(path)],
        "a new last message, sampled for the live page": [path for path in new if _is_sampled(path)],
        "a new last message, chosen step by step": [path for path in in_steps if not _is_sampled(path)],
        "a new last message, streamed": [path for path in streamed if not _is_sampled(path)],
        "the same chat again": [path for path in again if not _is_sampled(path)],
    }


def main(trace: Annotated[bool, typer.Option("--trace", help="List the calls in order.")] = False) -> None:
    """Count the calls of one chat."""
    structlog.configure(processors=[structlog.stdlib.filter_by_level], logger_factory=structlog.stdlib.LoggerFactory())
    with KvrouterProcess(["simulate", "--port", "0", "--prefill-ms", "0", "--step-ms", "1"]) as worker:
        rows = uvloop.run(_measure(worker.wait_until_listening()))
    for row, paths in rows.items():
        print(f"{row}: {_describe(min(paths, key=len)) if paths else 'no such request'}")
        for file, function in min(paths, key=len, default=[]) if trace else ():
            print(f"    {file}:{function}")


if __name__ == "__main__":
    typer.run(main)
