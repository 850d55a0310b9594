"""The same body once more is not read again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from http_api.errors import RequestError
from router.apis.body_cache import BodyCache, body_key
from router.apis.endpoints import ANTHROPIC, CHAT, RESPONSES, Call, read_call

USER = {"role": "user", "content": "What holds the cache?"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    ANTHROPIC: {"model": "m", "messages": [USER], "max_tokens": 1},
    RESPONSES: {"model": "m", "input": [USER]},
}


def call(path: str, naming: list[tuple[bytes, bytes]] | None = None, **fields: Any) -> Call:
    return Call("POST", path, naming or [], json.dumps(BODIES[path] | fields).encode(), naming or [])


@pytest.mark.parametrize("path", BODIES)
def test_the_same_body_is_read_twice(path: str) -> None:
    seen = BodyCache()
    first, second = read_call(call(path), seen=seen), read_call(call(path), seen=seen)
    assert second is not first
    assert second == first
    assert read_call(call(path), seen=seen) is second
    assert read_call(call(path, user="u"), seen=seen) is not second


def test_what_comes_once_is_not_kept() -> None:
    seen = BodyCache()
    for number in range(10):
        read_call(call(CHAT, user=f"{number}"), seen=seen)
    assert seen.size == 0


def test_the_same_body_elsewhere_is_another_request() -> None:
    seen, body = BodyCache(), json.dumps(BODIES[ANTHROPIC]).encode()
    first, _ = (read_call(Call("POST", CHAT, [], body), seen=seen) for _ in range(2))
    other = read_call(Call("POST", ANTHROPIC, [], body), seen=seen)
    assert other is not first
    assert other == read_call(Call("POST", ANTHROPIC, [], body))


def test_a_session_in_the_headers_counts_each_time() -> None:
    seen = BodyCache()
    for session in ("a", "b"):
        request = read_call(call(CHAT, [(b"x-session-id", session.encode())]), seen=seen)
        assert request.session == session
    assert read_call(call(CHAT), seen=seen).session is None


def test_what_is_refused_is_refused_again() -> None:
    seen = BodyCache()
    for _ in range(2):
        with pytest.raises(RequestError, match="messages is missing"):
            read_call(call(CHAT, messages=None), seen=seen)


@pytest.mark.parametrize("limit", [0, 50_000])
def test_what_is_kept_is_bounded(limit: int) -> None:
    seen = BodyCache(limit)
    for number in range(100):
        for _ in range(2):
            read_call(call(CHAT, user=f"{number}"), seen=seen)
        assert seen.size <= limit
    bodies = [call(CHAT, user=f"{number}").body for number in range(100)]
    kept = [seen.get(body_key(body), CHAT, body) is not None for body in bodies]
    assert kept[0] is False
    assert kept[-1] is (limit > 0)
