"""Requests as tools of agents send them, through proxy and picker: their session, their program and their parent.

The shapes are made from the documentation of each tool.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
from constants import changed
from grpc_call import channel_to
from picker_under_test import JSON, PickerUnderTest, picker
from router_under_test import RouterUnderTest, router
from scripted_worker import MODEL, Exchange, scripted_worker

from kvrouter.policies import Candidate, Request

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CLAUDE = {"user-agent": "claude-cli/2.1.0 (external, cli)", "x-app": "cli", "anthropic-version": "2023-06-01"}
CODEX = {"originator": "codex_cli_rs", "user-agent": "codex_cli_rs/0.140.0"}
POD = "MTAuMC4wLjc6ODAwMA=="  # 10.0.0.7:8000

# Tool, path, headers, fields of the body, and the expected session, program and parent.
SHAPES: list[tuple[str, str, dict[str, str], dict[str, Any], tuple[str, str, str]]] = [
    ("own", CHAT, {"x-kvrouter-session-id": "s", "x-kvrouter-program-id": "p"}, {}, ("s", "p", "")),
    ("dynamo", CHAT, {"x-dynamo-session-id": "s"}, {}, ("s", "s", "")),
    ("dynamo-child", CHAT, {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, {}, ("s", "p", "p")),
    ("dynamo-body", CHAT, {}, {"nvext": {"session_control": {"session_id": "s", "action": "open"}}}, ("s", "s", "")),
    ("claude", MESSAGES, CLAUDE | {"x-claude-code-session-id": "run"}, {}, ("run", "run", "")),
    (
        "claude-agent",
        MESSAGES,
        CLAUDE | {"x-claude-code-session-id": "run", "x-claude-code-agent-id": "agent"},
        {},
        ("agent", "run", "run"),
    ),
    (
        "claude-nested",
        MESSAGES,
        CLAUDE
        | {
            "x-claude-code-session-id": "run",
            "x-claude-code-agent-id": "agent-2",
            "x-claude-code-parent-agent-id": "agent",
        },
        {},
        ("agent-2", "run", "agent"),
    ),
    ("claude-body", MESSAGES, CLAUDE, {"metadata": {"user_id": "u_session_1"}}, ("u_session_1", "u_session_1", "")),
    (
        "codex",
        RESPONSES,
        CODEX | {"session-id": "run", "thread-id": "run"},
        {"prompt_cache_key": "run"},
        ("run", "run", ""),
    ),
    (
        "codex-child",
        RESPONSES,
        CODEX
        | {"session-id": "run", "thread-id": "t", "x-codex-parent-thread-id": "run", "x-openai-subagent": "review"},
        {"prompt_cache_key": "t"},
        ("t", "run", "run"),
    ),
    ("codex-0.130", RESPONSES, CODEX | {"session_id": "run"}, {"prompt_cache_key": "run"}, ("run", "run", "")),
    ("opencode", CHAT, {"x-session-affinity": "s", "x-parent-session-id": "p"}, {}, ("s", "p", "p")),
    ("opencode-relay", CHAT, {"x-opencode-session": "s"}, {}, ("s", "s", "")),
    (
        "deepseek-harness",
        CHAT,
        {"x-deepseek-harness-session-id": "s", "x-deepseek-harness-parent-session-id": "p"},
        {},
        ("s", "p", "p"),
    ),
    ("litellm", CHAT, {"x-litellm-session-id": "s", "x-litellm-trace-id": "t"}, {}, ("s", "s", "")),
    ("litellm-body", CHAT, {}, {"litellm_session_id": "s"}, ("s", "s", "")),
    ("litellm-metadata", CHAT, {}, {"metadata": {"session_id": "s"}}, ("s", "s", "")),
    ("aibrix", CHAT, {"x-aibrix-session-key": "s", "x-session-id": POD}, {}, ("s", "s", "")),
    ("aibrix-gateway", CHAT, {"x-session-id": POD}, {"user": "ann"}, ("ann", "ann", "")),
    ("trainer", CHAT, {"x-session-id": "trajectory"}, {}, ("trajectory", "trajectory", "")),
    ("smg", CHAT, {"x-smg-routing-key": "s"}, {}, ("s", "s", "")),
    ("sgl-router", CHAT, {"x-sgl-routing-key": "s"}, {}, ("s", "s", "")),
    ("added", CHAT, {"x-team-chat": "s", "x-session-id": "other"}, {}, ("s", "s", "")),
]
BODIES = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]},
    MESSAGES: {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello!"}]},
    RESPONSES: {"model": MODEL, "input": "Hello!"},
}
SECTIONS: dict[str, Any] = {
    "policy": {"extra": ["seen_callers:cost"]},
    "proxy": {"session_headers": ["X-Team-Chat"]},
}


@pytest.fixture(scope="module")
def seen() -> Iterator[list[Request]]:
    """The requests that a policy of one's own receives."""
    requests: list[Request] = []

    def cost(candidates: Sequence[Candidate], request: Request) -> list[float]:
        requests.append(request)
        return [0.0] * len(candidates)

    module = ModuleType("seen_callers")
    module.__dict__["cost"] = cost
    sys.modules["seen_callers"] = module
    with changed(policy_time=10):
        yield requests
    del sys.modules["seen_callers"]


async def served(exchange: Exchange) -> None:
    await exchange.answer(b'{"choices": []}')


@pytest.fixture(scope="module")
async def proxied(seen: list[Request]) -> AsyncIterator[RouterUnderTest]:  # noqa: ARG001
    async with scripted_worker(served) as worker, router(worker.url, **SECTIONS) as routed:
        yield routed


@pytest.fixture(scope="module")
async def picked(seen: list[Request]) -> AsyncIterator[PickerUnderTest]:  # noqa: ARG001
    async with (
        scripted_worker(served) as worker,
        picker(worker.url, **SECTIONS) as (side, port),
        channel_to(port) as channel,
    ):
        yield PickerUnderTest(side, channel, [])


def names(request: Request) -> tuple[str, str, str]:
    return request.session, request.program, request.parent


@pytest.mark.parametrize(
    ("path", "headers", "fields", "expected"), [shape[1:] for shape in SHAPES], ids=[s[0] for s in SHAPES]
)
async def test_callers_are_read(
    proxied: RouterUnderTest,
    picked: PickerUnderTest,
    seen: list[Request],
    path: str,
    headers: dict[str, str],
    fields: dict[str, Any],
    expected: tuple[str, str, str],
) -> None:
    body = BODIES[path] | fields
    seen.clear()
    reply = await proxied.call(path, body, headers=headers)
    assert (reply.status, names(seen[-1])) == (200, expected)
    explained = (await proxied.call("/explain", {"path": path, "request": body}, headers=headers)).json()
    assert tuple(explained[name] or "" for name in ("session", "program", "parent")) == expected
    seen.clear()
    stream = picked.stream()
    await stream.head(path, JSON, *headers.items())
    await stream.body(json.dumps(body).encode())
    await stream.receive()
    assert names(seen[-1]) == expected


async def test_shared_user_is_no_session(proxied: RouterUnderTest, seen: list[Request]) -> None:
    body = BODIES[CHAT] | {"user": "everyone"}
    seen.clear()
    for _ in range(62):
        await proxied.call(CHAT, body)
    assert seen[0].session == "everyone"
    assert (seen[-1].session, seen[-1].program) != ("everyone", "everyone")
    assert seen[-1].program == ""
