"""The caller of a request: its session, its program and its parent, as tools of agents name them.

- The *session* is one chain of prompts: a conversation, an agent, a thread. Affinity, hints and retained tokens use it.
- The *program* is a whole run, which subagents share. A session without one is its own program.
- The *parent* is the session that started this one.

`AGENT_NAMES` has the headers, in their order of precedence. Fields of the body follow, then `x-user-id`:
`session_id`, `litellm_session_id`, `nvext.session_control.session_id`, `vllm_xargs.session_id`, `metadata.session_id`,
`prompt_cache_key`, `metadata.user_id`, `user`. Names decide about placement only, never about access.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, NamedTuple

from router.apis.body_fields import SessionFields
from router.http.headers import HeaderItems, Headers, whole_number

_OWN_SESSION: Final = b"x-kvrouter-session-id"
_PLAIN_SESSION: Final = b"x-session-id"
_USER: Final = b"x-user-id"
# Longer names are cut to this many characters.
MAX_LENGTH: Final = 512
# AIBrix's gateway writes a pod's address, at most an IPv6 one with its port, as base64.
_LONGEST_ADDRESS: Final = 64


class AgentNames(NamedTuple):
    """The headers of one sender, each list in its order of precedence."""

    sender: str
    session: tuple[bytes, ...]
    program: tuple[bytes, ...] = ()
    parent: tuple[bytes, ...] = ()


# Claude Code and Codex name the whole run in every request, and the agent or thread beside it.
AGENT_NAMES: Final = (
    AgentNames("kvrouter", (_OWN_SESSION,), (b"x-kvrouter-program-id",), (b"x-kvrouter-parent-session-id",)),
    AgentNames("Dynamo", (b"x-dynamo-session-id",), (), (b"x-dynamo-parent-session-id",)),
    AgentNames(
        "Claude Code",
        (b"x-claude-code-agent-id", b"x-claude-code-session-id"),
        (b"x-claude-code-session-id",),
        (b"x-claude-code-parent-agent-id", b"x-claude-code-session-id"),
    ),
    AgentNames(
        "Codex",
        (b"thread-id", b"session-id", b"session_id"),
        (b"session-id", b"session_id"),
        (b"x-codex-parent-thread-id",),
    ),
    AgentNames("DeepSeek Harness", (b"x-deepseek-harness-session-id",), (), (b"x-deepseek-harness-parent-session-id",)),
    AgentNames("LiteLLM", (b"x-litellm-session-id", b"x-litellm-trace-id")),
    AgentNames("AIBrix", (b"x-aibrix-session-key",)),
    AgentNames("smg, slime, SGLang", (b"x-smg-routing-key", b"x-sgl-routing-key")),
    AgentNames(
        "OpenCode, llm-d, trainers",
        (b"x-session-affinity", b"x-opencode-session", _PLAIN_SESSION),
        (),
        (b"x-parent-session-id",),
    ),
)

_PROGRAMS: Final = tuple(name for names in AGENT_NAMES for name in names.program)
_ALL: Final = frozenset(
    [name for names in AGENT_NAMES for name in (*names.session, *names.program, *names.parent)] + [_USER]
)


@dataclass(slots=True, init=False)
class Identity:
    """The caller of a request. `by_user`: the session is a user's name, which many conversations may share."""

    session: str
    program: str
    parent: str | None
    by_user: bool

    def __init__(
        self, session: str, program: str | None = None, parent: str | None = None, by_user: bool = False
    ) -> None:
        self.session = session
        self.program = session if program is None else program
        self.parent = parent
        self.by_user = by_user


def identity_headers(headers: HeaderItems, more: Collection[bytes] = ()) -> Headers:
    """Return the headers that may name the caller, without addresses of pods.

    - `more`: names of further headers with a session (`proxy.session_headers`), which rank as kvrouter's own.
    """
    found = [
        (name, value)
        for name, value in headers
        if name in _ALL and not (name == _PLAIN_SESSION and is_pod_address(value))
    ]
    if more:
        given = dict(headers)
        for name in more:
            if given.get(name) and not given.get(_OWN_SESSION):
                return [(_OWN_SESSION, given[name]), *[header for header in found if header[0] != _OWN_SESSION]]
    return found


def is_pod_address(value: bytes) -> bool:
    """Return whether a session's name is the base64 form of `IP:port`, which AIBrix's gateway makes."""
    if not 8 <= len(value) <= _LONGEST_ADDRESS:
        return False
    try:
        host, _, port = b64decode(value + b"=" * (-len(value) % 4), validate=True).decode("ascii").rpartition(":")
        ip_address(host.removeprefix("[").removesuffix("]"))
    except (binascii.Error, ValueError):
        return False
    return whole_number(port.encode()) is not None


def find_identity(headers: HeaderItems, fields: SessionFields) -> Identity | None:
    """Return the caller that the identity headers and the body's fields name; None if they name none."""
    if not headers:
        return _in_body(fields, None)
    given: dict[bytes, bytes] = {}
    for name, value in headers:
        if value:
            given[name] = value
    for names in AGENT_NAMES:
        for name in names.session:
            if name in given:
                session = _text(given[name])
                parent = _first(given, names.parent)
                return _named(given, session, None if parent == session else parent)
    user = given.get(_USER)
    found = _in_body(fields, None if user is None else _text(user))
    return None if found is None else _named(given, found.session, None, found.by_user)


def _named(given: dict[bytes, bytes], session: str, parent: str | None, by_user: bool = False) -> Identity:
    return Identity(session, _first(given, _PROGRAMS) or parent, parent, by_user)


def _first(given: dict[bytes, bytes], names: tuple[bytes, ...]) -> str | None:
    for name in names:
        if name in given:
            return _text(given[name])
    return None


def _text(value: bytes) -> str:
    return value.decode("latin-1")[:MAX_LENGTH]


def _in_body(fields: SessionFields, user: str | None) -> Identity | None:
    """Return the caller that a body names, or the user that a header names."""
    named: Any = None
    users: tuple[Any, ...]
    if fields.vllm_xargs is None and fields.metadata is None and fields.nvext is None:
        sessions: tuple[Any, ...] = (fields.session_id, fields.litellm_session_id, fields.prompt_cache_key)
        users = (fields.user, user)
    else:
        user_id = _inner(fields.metadata, "user_id")
        sessions = (
            fields.session_id,
            fields.litellm_session_id,
            session_in_body(fields.nvext),
            _inner(fields.vllm_xargs, "session_id"),
            _inner(fields.metadata, "session_id"),
            fields.prompt_cache_key,
            # Claude Code writes its session into it.
            user_id if isinstance(user_id, str) and "session" in user_id else None,
        )
        users = (user_id, fields.user, user)
    for named in sessions:
        if isinstance(named, str) and named:
            return Identity(named[:MAX_LENGTH])
    for named in users:
        if isinstance(named, str) and named:
            return Identity(named[:MAX_LENGTH], by_user=True)
    return None


def session_in_body(nvext: Any) -> Any:
    """Return the session that a body's `nvext` names; None if it names none."""
    return _inner(_inner(nvext, "session_control"), "session_id")


def _inner(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
