"""The interface of hooks: what their functions receive and return. `kvrouter.hooks` exports it.

- A function of `hooks.before` receives a `Request`, may change it, and returns None, or a `Refusal`.
- A function of `hooks.after` receives an `Answer`. Its result is ignored.

A function may be a coroutine function. Plain functions run in threads, and may block until `hooks.deadline`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from router.apis.json_edit import SpliceError, with_field, without_fields
from router.http.headers import HOP_BY_HOP, Header, Headers, are_headers

# Fields may be added to a version. A field is removed, or changes its meaning, only in a new version.
VERSION: Final = 1

_SESSION: Final = "x-kvrouter-session-id"
_PROGRAM: Final = "x-kvrouter-program-id"
# Headers that say how a request is read. The router has checked them before.
_FIXED: Final = HOP_BY_HOP | {b"content-encoding", b"content-length", b"content-type", b"expect", b"host"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a request.

    - `status`: the HTTP status, from 400 to 599.
    - `message`, `code`: the text for the client, and a reason for programs.
    - `retry_after`: seconds after which the client may try again.
    """

    status: int
    message: str
    code: str | None = None
    retry_after: int | None = None

    def __post_init__(self) -> None:
        if not 400 <= self.status <= 599:
            raise ValueError(f"status: {self.status} is not from 400 to 599")


class Request:
    """A request before it is routed. Changes of a function that fails or is late are dropped.

    - `id`, `method`, `path`: its id, method and path.
    - `key`: the API key that it has; "" without one.
    - `tenant`: the tenant whose key it has. A function may set another name. "" means no tenant.
    - `notes`: values for functions after the answer, which `Answer.notes` has.
    """

    def __init__(
        self,
        id: str,
        method: str,
        path: str,
        headers: Headers,
        body: bytes,
        key: str = "",
        tenant: str = "",
        notes: dict[str, Any] | None = None,
    ) -> None:
        self.id = id
        self.method = method
        self.path = path
        self.key = key
        self.tenant = tenant
        self.notes: dict[str, Any] = {} if notes is None else notes
        self._headers = headers
        self._body = body
        self._fields: dict[str, Any] | None = None
        self._changed_headers: dict[bytes, Header | None] = {}
        self._changed_fields: dict[str, bytes | None] = {}

    @property
    def headers(self) -> dict[str, str]:
        """A copy of the headers. Names are in lower case; of equal names the last counts."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._applied_headers()}

    @property
    def body(self) -> bytes:
        """The body, without changes of its fields."""
        return self._body

    @property
    def fields(self) -> dict[str, Any]:
        """A copy of the fields of the body; empty if the body is not one JSON object."""
        if self._fields is None:
            try:
                found = json.loads(self._body)
            except (ValueError, RecursionError):
                found = None
            self._fields = found if isinstance(found, dict) else {}
        changed = {name: value for name, value in self._changed_fields.items() if value is not None}
        fields = {name: value for name, value in self._fields.items() if name not in self._changed_fields}
        return fields | {name: json.loads(value) for name, value in changed.items()}

    @property
    def session(self) -> str:
        """The session that a function has chosen, or that kvrouter's own header names; "" without one."""
        return self.headers.get(_SESSION, "")

    @session.setter
    def session(self, name: str) -> None:
        self.set_header(_SESSION, name)

    @property
    def program(self) -> str:
        """The run that a function has chosen, or that kvrouter's own header names; "" without one."""
        return self.headers.get(_PROGRAM, "")

    @program.setter
    def program(self, name: str) -> None:
        self.set_header(_PROGRAM, name)

    def set_header(self, name: str, value: str) -> None:
        """Replace a header. Raises ValueError for invalid text, and for headers that say how a request is read."""
        header = (_changeable(name), value.encode("latin-1", "replace"))
        if not are_headers([header]):
            raise ValueError(f"{name}: a header has a name without spaces, and a value of one line")
        self._changed_headers[header[0]] = header

    def remove_header(self, name: str) -> None:
        """Remove a header. Raises ValueError for headers that say how a request is read."""
        self._changed_headers[_changeable(name)] = None

    def set_field(self, name: str, value: Any) -> None:
        """Set a field of the body to a JSON value. Without effect if the body is not one JSON object."""
        self._changed_fields[name] = json.dumps(value, allow_nan=False).encode()

    def remove_field(self, name: str) -> None:
        """Remove a field of the body."""
        self._changed_fields[name] = None

    @property
    def has_changed_fields(self) -> bool:
        """True if a function changed fields of the body."""
        return bool(self._changed_fields)

    def changed(self) -> Request:
        """Return the request with its changes, which later ones do not reach."""
        headers, body = self._applied_headers(), self._applied_fields()
        return Request(self.id, self.method, self.path, headers, body, self.key, self.tenant, self.notes)

    def received_headers(self) -> Headers:
        """Return the headers without changes."""
        return self._headers

    def _applied_headers(self) -> Headers:
        if not self._changed_headers:
            return self._headers
        kept = [header for header in self._headers if header[0] not in self._changed_headers]
        return kept + [header for header in self._changed_headers.values() if header is not None]

    def _applied_fields(self) -> bytes:
        body = self._body
        try:
            for name, value in self._changed_fields.items():
                body = without_fields(body, [name]) if value is None else with_field(body, name, value)
        except SpliceError:
            return self._body  # the check of the body answers what it is
        return body


def _changeable(name: str) -> bytes:
    encoded = name.lower().encode("latin-1", "replace")
    if encoded in _FIXED:
        raise ValueError(f"{name}: this header says how the request is read, and cannot be changed")
    return encoded


@dataclass(frozen=True, slots=True)
class Answer:
    """An answered request. Times are in seconds. None means that a value is unknown.

    - `status`: of the worker's answer, or of the router's refusal; 499 if the client left before.
    - `problem`: why it failed; None after success.
    - `tenant`, `session`, `program`: its tenant and its caller; "" without one.
    - `worker`, `dp_rank`, `prefill_worker`: where it was computed. None if no worker answered.
    - `prompt_tokens`, `completion_tokens`, `cached_tokens`: as the engine counted them.
    - `routed_tokens`: tokens of the prompt as the router counted them.
    - `received`: when it was complete, since the epoch.
    - `first_byte`, `duration`: seconds from then to the first byte of the answer, and to its end.
    - `notes`: what functions before it noted.
    """

    id: str
    method: str
    path: str
    status: int
    model: str
    tenant: str
    session: str
    program: str
    worker: str | None
    dp_rank: int | None
    prefill_worker: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    routed_tokens: int
    received: float
    first_byte: float | None
    duration: float
    problem: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)


Before: TypeAlias = Callable[[Request], Any]
After: TypeAlias = Callable[[Answer], Any]
