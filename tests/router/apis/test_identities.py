"""The names of callers: sessions, programs and parents, as tools of agents send them."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.apis.body_fields import SessionFields
from router.apis.endpoints import read_request
from router.apis.identities import AGENT_NAMES, MAX_LENGTH, Identity, find_identity, identity_headers, is_pod_address

API = Path(__file__).parents[3] / "docs" / "api.md"


def identity(headers: dict[str, str], body: dict[str, Any] | None = None, *more: bytes) -> Identity | None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    sent = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]} | (body or {})).encode()
    return read_request("POST", "/v1/chat/completions", raw, sent, identity_headers(raw, more)).identity


def test_no_name_is_no_identity() -> None:
    assert identity({}) is None
    assert identity({"x-session-id": "", "x-user-id": ""}, {"user": ""}) is None
    assert identity({"x-parent-session-id": "p"}) is None


def test_each_name_precedes_those_below_it() -> None:
    names = [name.decode() for sender in AGENT_NAMES for name in sender.session]
    for place, name in enumerate(names):
        found = identity({each: each for each in reversed(names[place:])}, {"session_id": "body", "user": "u"})
        assert found is not None
        assert found.session == name


def test_headers_precede_the_body_and_the_body_precedes_the_user() -> None:
    fields = ["session_id", "litellm_session_id", "prompt_cache_key", "user"]
    for place, field in enumerate(fields):
        found = identity({"x-user-id": "header"}, {each: each for each in fields[place:]})
        assert found == Identity(field, by_user=field == "user")
    assert identity({"x-user-id": "header"}) == Identity("header", by_user=True)


def test_first_agent_of_claude_code_is_the_program_itself() -> None:
    assert identity({"x-claude-code-session-id": "run"}) == Identity("run")


def test_own_program_precedes_those_of_tools() -> None:
    found = identity({"x-kvrouter-program-id": "mine", "x-claude-code-session-id": "run"})
    assert found == Identity("run", "mine")


def test_dynamo_session_beside_a_tool_keeps_the_run_of_the_tool() -> None:
    found = identity({"x-dynamo-session-id": "chain", "x-claude-code-session-id": "run"})
    assert found == Identity("chain", "run")


def test_parent_of_another_sender_is_ignored() -> None:
    assert identity({"x-dynamo-session-id": "chain", "x-parent-session-id": "p"}) == Identity("chain")


@pytest.mark.parametrize("address", ["10.0.0.7:8000", "[fd00::7]:8000", "fd00::7:8000", "255.255.255.255:65535"])
def test_pod_address_of_aibrix_is_no_session(address: str) -> None:
    encoded = b64encode(address.encode())
    for value in (encoded, encoded.rstrip(b"=")):
        assert is_pod_address(value)
        assert identity({"x-session-id": value.decode()}) is None
        assert identity({"x-session-id": value.decode()}, {"user": "u"}) == Identity("u", by_user=True)
        found = identity({"x-session-id": value.decode(), "x-aibrix-session-key": "mine"})
        assert found == Identity("mine")


@pytest.mark.parametrize(
    "session", ["chat-1", "10.0.0.7:8000", "MTAuMC4wLjc6", "aGVsbG86MTIz", "c2Vzc2lvbg==", "a" * 600]
)
def test_other_names_are_no_pod_addresses(session: str) -> None:
    assert identity({"x-session-id": session}) == Identity(session[:MAX_LENGTH])


def test_added_headers_rank_as_own_names() -> None:
    headers = {"x-team-chat": "t", "x-other": "o", "x-dynamo-session-id": "d"}
    assert identity(headers, None, b"x-other", b"x-team-chat") == Identity("o")
    assert identity({"x-dynamo-session-id": "d"}, None, b"x-other") == Identity("d")
    assert identity(headers | {"x-kvrouter-session-id": "k"}, None, b"x-other") == Identity("k")


def test_user_id_of_claude_code_names_a_session() -> None:
    user_id = "user_abc_account_def_session_123"
    assert identity({}, {"metadata": {"user_id": user_id}}) == Identity(user_id)
    assert identity({}, {"metadata": {"user_id": "ann"}}) == Identity("ann", by_user=True)


@given(
    st.lists(st.tuples(st.sampled_from([name for sender in AGENT_NAMES for name in sender.session]), st.binary())),
    st.recursive(
        st.none() | st.text() | st.integers(), lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner)
    ),
)
def test_any_values_name_a_caller_or_none(headers: list[tuple[bytes, bytes]], value: Any) -> None:
    found = find_identity(identity_headers(headers), SessionFields(value, value, value, value, value, value, value))
    assert found is None or (0 < len(found.session) <= MAX_LENGTH and found.program)


def test_documentation_has_the_table_of_the_code() -> None:
    table = API.read_text().split("### Sessions")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.*?) \| ?(.*?) ?\| ?(.*?) ?\|$", table, re.MULTILINE)
    documented = {
        sender: tuple(tuple(name.encode() for name in re.findall(r"`([^`]+)`", cell)) for cell in cells)
        for sender, *cells in rows
    }
    for names in AGENT_NAMES:
        sender = "own names" if names.sender == "kvrouter" else names.sender
        assert documented[sender] == (names.session, names.program, names.parent)
