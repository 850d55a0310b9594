"""Sends generated requests to a router, in the process or over sockets, and judges the requests that reach its workers.

A forwarded request must mean the same as the client's bytes to an independent HTTP parser (h11) and a strict JSON
decoder.

Requests that h11 reads to their end follow each other over one connection. Another request is the last of its
connection.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from email import policy
from email.parser import BytesParser
from email.utils import collapse_rfc2231_value
from random import Random
from typing import Any
from urllib.parse import parse_qsl

import h11
from generated_requests import request as generated
from generated_requests import request_with_known_head
from recording_worker import Got
from ways import InProcess, Manner, OverSockets

from router.auth.engine_fields import CONTROL_FIELDS, CONTROL_HEADERS, control_fields, control_names
from router.auth.routes import Access, Routes
from router.http.strict_requests import canonical_path

_ROUTES = Routes()
# How large a share of connections has requests with known heads.
_ONE_BY_ONE = 0.3
# The number of other requests by the manner in which they are sent.
_MANNERS = {Manner.AT_ONCE: 75, Manner.IN_PIECES: 20, Manner.HALF_CLOSED: 3, Manner.ONE_BY_ONE: 2}
# One of `_OVER_SOCKETS` connections uses sockets.
_OVER_SOCKETS = 12
_SPACED_LINE = re.compile(rb"\A([A-Za-z]+) +([!-~]+) +(HTTP/[0-9.]+\r\n)")
_LAST = b"GET /health HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n"
# The JSON bodies of engines are read by this, whatever the content's type is said to be.
_lenient_json = json.loads


@dataclass(slots=True)
class Read:
    """A request as h11 reads it. `ends_connection`: nothing can follow it."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    ends_connection: bool


@dataclass
class Outcome:
    """The counts of a run.

    `passed` requests reached a worker. The others were refused or answered by the router, or were incomplete and
    `unanswered`. `failed` requests were answered with 5xx by the router, because its workers never do.
    """

    generated: int = 0
    sent: int = 0
    connections: int = 0
    passed: int = 0
    refused: int = 0
    failed: int = 0
    unanswered: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def answered_itself(self) -> int:
        """The number of requests that the router answered itself."""
        return self.sent - self.passed - self.refused - self.failed - self.unanswered

    def __str__(self) -> str:
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.generated} requests generated, {self.sent} sent over {self.connections} connections: "
            f"{self.passed} reached a worker, {self.refused} were refused, {self.answered_itself} answered by the "
            f"router itself, {self.unanswered} never whole, {self.failed} failed with 5xx ({statuses})"
        )

    def count(self, sent: int, statuses: list[int], passed: int) -> None:
        """Count requests that were sent."""
        self.sent += sent
        self.passed += passed
        self.refused += sum(400 <= status < 500 for status in statuses)
        self.failed += sum(status >= 500 for status in statuses)
        self.unanswered += sent - len(statuses)
        self.statuses.update(statuses)


def read_by_h11(data: bytes) -> Read | None:
    """The first request in some bytes, when it is a whole one to h11.

    The words of its first line may have several spaces between them: RFC 9112, 3, and what is sent on has one.
    """
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(_SPACED_LINE.sub(rb"\1 \2 \3", data, count=1))
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
    more = connection.their_state is not h11.DONE or bool(connection.trailing_data[0])
    return Read(head.method, head.target, list(head.headers), body, more)


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


def _as_utf8(body: bytes) -> bytes:
    """Return a client's body without its byte order mark, from UTF-16 and UTF-32 too. Raises ValueError."""
    return body.decode(json.detect_encoding(body)).encode()


def judge(read: Read | None, got: Got) -> str | None:
    """Return the problem of a request that a worker received for the one that h11 read, or None."""
    if read is None:
        return "h11 refuses what the client sent"
    path, _, query = read.target.partition(b"?")
    if (read.method, read.target if query else path) != (got.method, got.target):
        return f"h11 reads {read.method!r} {read.target!r}"
    route = _ROUTES.find(read.method.decode(), canonical_path(read.target))
    if route.own or route.access not in (Access.TENANT, Access.CALLER):
        return f"the route is {route}"
    if {name.replace(b"_", b"-") for name, _ in got.headers} & CONTROL_HEADERS:
        return "a header steers the engine"
    if not route.json and got.body == read.body:
        return _steers(got)
    try:
        asked, read_there = strict_json(_as_utf8(read.body)), strict_json(got.body)
    except ValueError as error:
        return f"the body is not strict: {error}"
    names = control_names(route.path)
    if control_fields(read_there, names):
        return "a field steers the engine"
    if not names.isdisjoint(asked) or "vllm_xargs" in asked:
        asked = {name: value for name, value in asked.items() if name not in names and name != "vllm_xargs"}
        read_there = {name: value for name, value in read_there.items() if name != "vllm_xargs"}
    return None if asked == read_there else "the body means something else"


def _steers(got: Got) -> str | None:
    """Return the control field that an engine would read in an unchanged body, as any JSON or a form, or None."""
    kind = b", ".join(value for name, value in got.headers if name == b"content-type")
    if not CONTROL_FIELDS.isdisjoint(_names_in_form(kind, got.body)):
        return "a field of a form steers the engine"
    try:
        fields = _lenient_json(got.body)
    except (ValueError, RecursionError):
        return None
    return "a field steers the engine" if isinstance(fields, dict) and control_fields(fields) else None


def _names_in_form(kind: bytes, body: bytes) -> set[str]:
    """The names of a form's fields as Python's own parser of mail has them."""
    if b"urlencoded" in kind:
        return {name for name, _ in parse_qsl(body.decode("latin-1"), keep_blank_values=True)}
    if b"multipart" not in kind:
        return set()
    message = BytesParser(policy=policy.compat32).parsebytes(b"content-type: " + kind + b"\r\n\r\n" + body)
    names = (part.get_param("name", header="content-disposition") for part in message.walk())
    return {collapse_rfc2231_value(name) for name in names if name is not None}


def statuses_in(answers: bytes, methods: list[bytes]) -> list[int]:
    """Return the statuses of a connection's responses, with 0 for a truncated or invalid one."""
    found: list[int] = []
    while answers:
        head, end, answers = answers.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        if not end or not first.startswith(b"HTTP/1.1 ") or not first[9:12].isdigit():
            return [*found, 0]
        status = int(first[9:12])
        if 100 <= status < 200:
            continue
        headers = dict(line.lower().split(b": ", 1) for line in lines if b": " in line)
        if len(found) < len(methods) and methods[len(found)] == b"HEAD":
            length = 0
        elif headers.get(b"transfer-encoding") == b"chunked":
            length = _chunked_length(answers)
        else:
            length = int(headers.get(b"content-length", b"0"))
        if not 0 <= length <= len(answers):
            return [*found, 0]
        found.append(status)
        if headers.get(b"connection") == b"close":
            return found
        answers = answers[length:]
    return found


def _chunked_length(data: bytes) -> int:
    """Return the length of a chunked body in bytes, or -1 if it is incomplete."""
    place = 0
    while (end := data.find(b"\r\n", place)) >= 0:
        size = int(data[place:end], 16)
        place = end + 2 + size + 2
        if not size:
            return place
    return -1


class Comparison:
    """The ways in to routers with the same settings, and the worker behind each; any number of connections at once."""

    def __init__(self, in_process: list[InProcess], over_sockets: list[OverSockets]) -> None:
        """Compare the routers of each list. One of `_OVER_SOCKETS` connections uses sockets."""
        self.outcome = Outcome()
        self._in_process = in_process
        self._over_sockets = over_sockets
        self._number = 0

    async def several(self, random: Random, most: int = 24) -> None:
        """Send the requests of some connections by both ways.

        Raises AssertionError that shows the request when something is wrong.
        """
        one_by_one = random.random() < _ONE_BY_ONE
        made = request_with_known_head if one_by_one else generated
        kept: list[tuple[int, bytes, Read | None]] = []
        while len(kept) < most:
            number = self._number
            self._number += 1
            data = made(random, number)
            read = read_by_h11(data)
            kept.append((number, data, read))
            if read is None or read.ends_connection:
                break
        over_sockets = random.randrange(_OVER_SOCKETS) == 0
        await self._send(kept, random, self._over_sockets if over_sockets else self._in_process, one_by_one)

    async def _send(
        self,
        requests: list[tuple[int, bytes, Read | None]],
        random: Random,
        ways: Sequence[InProcess | OverSockets],
        one_by_one: bool,
    ) -> None:
        outcome = self.outcome
        outcome.generated += len(requests)
        last = requests[-1][2]
        ended = last is None or last.ends_connection
        manner = Manner.ONE_BY_ONE if one_by_one else random.choices(list(_MANNERS), list(_MANNERS.values()))[0]
        seen: list[tuple[list[int], list[bool]]] = []
        for way in ways:
            worker = way.worker
            statuses = await self._statuses(way, [each for _, each, _ in requests], ended, random, manner)
            passed = []
            for number, each, read in requests:
                got = worker.got.pop(b"%d" % number, None)
                passed.append(got is not None)
                if got is not None and (problem := judge(read, got)) is not None:
                    raise AssertionError(f"{problem}: {each!r} became {got}")
            assert not worker.stray, worker.stray
            outcome.count(len(requests), statuses, sum(passed))
            seen.append((statuses, passed))
        for (_, each, _), *passed in zip(requests, *(passed for _, passed in seen), strict=True):
            assert len(set(passed)) == 1, f"only one way passes on {each!r}: {seen} for {requests}"

    async def _statuses(
        self, way: InProcess | OverSockets, requests: list[bytes], ended: bool, random: Random, manner: Manner
    ) -> list[int]:
        """The answers' statuses. What follows a refusal that ended its connection is sent over the next one.

        `ended`: nothing is read after the last of them. Otherwise one more request follows, which ends the connection.
        """
        found: list[int] = []
        while len(found) < len(requests):
            rest = requests[len(found) :]
            methods = [each.partition(b" ")[0] for each in rest]
            sent = rest if ended else [*rest, _LAST]

            def answered(came: bytes, methods: list[bytes] = methods) -> int:
                return len(statuses_in(came, methods))

            answers = await way.answers(sent, random, manner, answered)
            statuses = statuses_in(answers, methods)
            if len(statuses) > len(rest):
                # What follows the last one may be no request.
                assert statuses.pop() == (400 if ended else 200), f"{statuses} for {rest}"
            self.outcome.connections += 1
            if not statuses and len(rest) == 1:  # an incomplete request has no response
                break
            assert statuses, f"no answer to {rest}"
            assert all(0 < status < 500 for status in statuses), f"{statuses}, {answers!r} for {rest}"
            found += statuses
        return found
