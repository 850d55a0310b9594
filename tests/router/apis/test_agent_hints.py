"""Hints of agents: headers, Dynamo's fields, and refused values."""

from __future__ import annotations

from typing import Any

import pytest

from http_api.errors import RequestError
from router.admission.ticket import read_ticket, urgent
from router.apis.agent_hints import AgentHints, hints_in_body, hints_in_headers
from router.apis.endpoints import read_request

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": %s}'


@pytest.mark.parametrize(
    ("headers", "hints"),
    [
        ({}, None),
        ({"x-kvrouter-output-tokens": "12"}, AgentHints(12)),
        ({"x-kvrouter-output-tokens": "0"}, AgentHints()),
        ({"x-kvrouter-next-call-ms": "2500"}, AgentHints(None, 2.5)),
        ({"x-kvrouter-session-final": "false"}, AgentHints(final=False)),
        ({"x-dynamo-session-final": "True"}, AgentHints(final=True)),
        ({"x-dynamo-session-final": "true", "x-kvrouter-session-final": "0"}, AgentHints(final=False)),
    ],
)
def test_headers_tell(headers: dict[str, str], hints: AgentHints | None) -> None:
    came = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert hints_in_headers(came) == hints
    assert read_ticket(urgent([*came, (b"accept", b"*/*")]), 0).hints == hints


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-kvrouter-output-tokens", "many"),
        ("x-kvrouter-output-tokens", "1.5"),
        ("x-kvrouter-output-tokens", "-1"),
        ("x-kvrouter-next-call-ms", "soon"),
        ("x-kvrouter-next-call-ms", "nan"),
        ("x-kvrouter-next-call-ms", "86400001"),
        ("x-kvrouter-session-final", "perhaps"),
        ("x-dynamo-session-final", ""),
    ],
)
def test_invalid_hint_header_is_refused_by_name(header: str, value: str) -> None:
    with pytest.raises(RequestError) as refused:
        hints_in_headers([(header.encode(), value.encode())])
    assert (refused.value.status, refused.value.param) == (400, header)


@pytest.mark.parametrize(
    ("nvext", "hints", "session"),
    [
        ("null", None, None),
        ("[]", None, None),  # whatever that is, the worker judges it
        ('{"agent_hints": {"osl": 1024, "priority": 5, "speculative_prefill": true}}', AgentHints(1024), None),
        ('{"agent_hints": {"osl": 0}}', None, None),
        ('{"session_control": {"session_id": "s"}}', AgentHints(final=False), "s"),
        ('{"session_control": {"session_id": "s", "action": "open", "timeout": 60}}', AgentHints(final=False), "s"),
        ('{"session_control": {"session_id": "s", "action": "close"}}', AgentHints(final=True), "s"),
    ],
)
def test_hints_in_body_follow_dynamo(nvext: str, hints: AgentHints | None, session: str | None) -> None:
    request = read_request("POST", "/v1/chat/completions", [], CHAT % nvext.encode())
    assert (request.hints, request.session) == (hints, session)


@pytest.mark.parametrize(
    ("nvext", "param"),
    [
        ({"agent_hints": 3}, "nvext.agent_hints"),
        ({"agent_hints": {"osl": "long"}}, "nvext.agent_hints.osl"),
        ({"agent_hints": {"osl": True}}, "nvext.agent_hints.osl"),
        ({"agent_hints": {"osl": -1}}, "nvext.agent_hints.osl"),
        ({"session_control": []}, "nvext.session_control"),
        ({"session_control": {"action": "pause"}}, "nvext.session_control.action"),
        ({"session_control": {"action": []}}, "nvext.session_control.action"),
    ],
)
def test_invalid_hint_field_is_refused_by_name(nvext: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        hints_in_body(nvext)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_hints_in_headers_override_the_body_and_each_states_the_end_of_session() -> None:
    assert AgentHints(5).before(AgentHints(7, 1.0, True)) == AgentHints(5, 1.0, True)
    assert AgentHints(5).before(None) == AgentHints(5)
    assert [AgentHints(5).returns, AgentHints(final=True, next_call=1.0).returns] == [False, False]
    assert [AgentHints(final=False).returns, AgentHints(next_call=0.0).returns] == [True, True]
