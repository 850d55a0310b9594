"""What the requests of one conversation, or of one user, have in common: their session.

The first of these that is there, from the most to the least specific: the headers `x-session-id` and
`x-dynamo-session-id`, the body's `session_id`, `nvext.session_control.session_id`, `vllm_xargs.session_id`,
`metadata.session_id`, `prompt_cache_key`, `metadata.user_id`, `user`, and the header `x-user-id`.
"""

from __future__ import annotations

from typing import Any

from router.apis.agent_hints import session_in_body
from router.apis.body_fields import SessionFields
from router.http.headers import HeaderItems, Headers

_SESSION_HEADER = b"x-session-id"
_DYNAMO_HEADER = b"x-dynamo-session-id"
_USER_HEADER = b"x-user-id"
_HEADERS = frozenset((_SESSION_HEADER, _DYNAMO_HEADER, _USER_HEADER))

_NOTHING = (None, None, None)

# The longest session that is kept.
MAX_LENGTH = 512


def only_naming(headers: HeaderItems) -> Headers:
    """The headers that a session may be named by: all others are passed over."""
    return [header for header in headers if header[0] in _HEADERS]


def session_of(headers: HeaderItems, fields: SessionFields) -> str | None:
    """The session of a request, by what `only_naming` leaves of its headers, and its body."""
    found: tuple[Any, ...]
    if fields.vllm_xargs is None and fields.metadata is None and fields.nvext is None:
        found = (fields.session_id, fields.prompt_cache_key, fields.user)
        if not headers and found == _NOTHING:
            return None
    else:
        found = (
            fields.session_id,
            session_in_body(fields.nvext),
            _inner(fields.vllm_xargs, "session_id"),
            _inner(fields.metadata, "session_id"),
            fields.prompt_cache_key,
            _inner(fields.metadata, "user_id"),
            fields.user,
        )
    named = {name: value.decode("latin-1") for name, value in headers}
    for value in (named.get(_SESSION_HEADER), named.get(_DYNAMO_HEADER), *found, named.get(_USER_HEADER)):
        if isinstance(value, str) and value:
            return value[:MAX_LENGTH]
    return None


def _inner(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
