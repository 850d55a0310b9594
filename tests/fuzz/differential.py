"""Sends generated requests to a router by both ways in, and judges what reached its worker.

Whatever a worker gets has to be what an independent HTTP parser (h11) and a strict JSON decoder read in the bytes that
the client sent; and both ways in must agree on whether anything was passed on.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any
from urllib.parse import urlsplit

import h11
from generated_requests import request as generated
from scripted_worker import Exchange, ScriptedWorker

from router.access.routes import Access, Routes
from router.access.steering import FIELDS, HEADERS, steering_fields
from router.http.target import canonical_path

_ROUTES = Routes()
_ANSWER_SECONDS = 10.0


@dataclass
class Read:
    """A request as h11 reads it; None where that refuses it."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass
class Outcome:
    """What became of the requests, by the status of the answer; `passed`: how many reached the worker."""

    requests: int = 0
    passed: int = 0
    statuses: dict[int, int] = field(default_factory=dict)

    def count(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


def read_by_h11(data: bytes) -> Read | None:
    """The first request in some bytes, when it is a whole one to h11."""
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(data)
        head = connection.next_event()
        if not isinstance(head, h11.Request):
            return None
        body = b""
        while isinstance(part := connection.next_event(), h11.Data):
            body += bytes(part.data)
        if not isinstance(part, h11.EndOfMessage):
            return None
    except h11.RemoteProtocolError:
        return None
    return Read(head.method.decode(), head.target, list(head.headers), body)


def strict_json(body: bytes) -> Any:
    """A body as the strictest decoder has it. Raises ValueError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a name twice")
        return dict(pairs)

    def never(constant: str) -> Any:
        raise ValueError(constant)

    found = json.loads(body.decode("utf-8"), object_pairs_hook=once, parse_constant=never)
    json.dumps(found, ensure_ascii=False).encode()  # no lone surrogates
    return found


def judge(sent: bytes, got: Exchange) -> str | None:
    """What is wrong with a worker's getting this request for those bytes; None when it is right."""
    read = read_by_h11(sent)
    if read is None:
        return "h11 refuses what the client sent"
    if (read.method, read.target) != (got.method, got.target.encode("latin-1")):
        return f"h11 reads {read.method} {read.target!r}"
    route = _ROUTES.find(read.method, canonical_path(read.target))
    if route.own or route.access not in (Access.TENANT, Access.CALLER):
        return f"the route is {route}"
    if {name for name, _ in got.headers} & {name.decode() for name in HEADERS}:
        return "a header steers the engine"
    if not route.json and got.body == read.body:
        return None
    try:
        asked, read_there = strict_json(read.body), strict_json(got.body)
    except ValueError as error:
        return f"the body is not strict: {error}"
    if steering_fields(read_there):
        return "a field steers the engine"
    if not FIELDS.isdisjoint(asked) or "vllm_xargs" in asked:
        asked = {name: value for name, value in asked.items() if name not in FIELDS and name != "vllm_xargs"}
        read_there = {name: value for name, value in read_there.items() if name != "vllm_xargs"}
    return None if asked == read_there else "the body means something else"


async def answer_to(url: str, data: bytes) -> int:
    """Send bytes; the status of the answer, 0 when there is none."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(_ANSWER_SECONDS):
            answer = await reader.read()
    except (ConnectionError, TimeoutError):
        return 0
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


class Comparison:
    """A router's two ways in, and the worker behind both; any number of requests are compared at once."""

    def __init__(self, fast: str, asgi: str, worker: ScriptedWorker) -> None:
        self.outcome = Outcome()
        self._urls = (fast, asgi)
        self._numbers = count()
        self._got: dict[bytes, Exchange] = {}
        self._worker = worker
        worker.script = self._answer

    async def _answer(self, exchange: Exchange) -> None:
        self._worker.exchanges.clear()
        numbers = exchange.header("x-fuzz")
        if len(numbers) == 1 and numbers[0] not in self._got:
            self._got[numbers[0]] = exchange
        else:
            self._got[b"stray"] = exchange
        await exchange.answer()

    async def one(self, random: Random) -> None:
        """Send one generated request by both ways. Raises AssertionError that shows it when something is wrong."""
        state = random.getstate()
        statuses, passed = [], []
        for url in self._urls:
            random.setstate(state)
            number = next(self._numbers)
            data = generated(random, number)
            statuses.append(await answer_to(url, data))
            got = self._got.pop(b"%d" % number, None)
            passed.append(got is not None)
            if got is not None and (problem := judge(data, got)) is not None:
                raise AssertionError(f"{problem}: {data!r} became {got}")
        assert b"stray" not in self._got, self._got
        assert passed[0] == passed[1], f"only one way passes on {data!r}: {statuses}"
        assert all(status < 500 for status in statuses), f"{statuses} for {data!r}"
        self.outcome.requests += 2
        self.outcome.passed += sum(passed)
        for status in statuses:
            self.outcome.count(status)
