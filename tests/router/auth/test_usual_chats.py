"""A chat that the check of its body reads is the one that its decoder reads, and no check is skipped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from manual_clock import Clock

from indexer.native import CORES
from router.apis.body_fields import AllMediaFields, GenerationFields
from router.apis.endpoints import CHAT, read_request
from router.apis.media_parts import media_items
from router.apis.openai_requests import decode_chat
from router.auth import AuthGate, Tenant, hashed_key
from router.auth.bodies import BodyCheck
from router.auth.routes import Routes
from router.settings import EngineFields, LimitSettings, Settings, TenantSettings

pytestmark = pytest.mark.skipif("native" not in CORES, reason="the native core was not built")

CHECK = BodyCheck(LimitSettings(prompts=6, messages=6, values=20_000))
TEXTS = st.text(max_size=30) | st.sampled_from(
    ["", '"', "\\", "\b\f\n\r\t/", "\0\x7f\x80\u07ff\u0800\uffff\U0001f642", "\ud83d"]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
MESSAGE = st.fixed_dictionaries({"role": TEXTS, "content": TEXTS})
FIELDS = sorted(
    {*GenerationFields.__struct_fields__, *AllMediaFields.__struct_fields__, "temperature", "stop", "Model"}
)
CHATS = st.fixed_dictionaries(
    {
        "model": TEXTS,
        "messages": st.lists(
            MESSAGE | st.dictionaries(st.sampled_from(["content", "role", "name"]), TEXTS | VALUES), max_size=7
        ),
    },
    optional={
        "stream": st.booleans() | st.none() | VALUES,
        "max_tokens": st.integers(-(10**17), 10**17) | VALUES,
        "max_completion_tokens": st.none() | st.integers(0, 100) | VALUES,
        "temperature": st.floats(0, 2),
    },
)
USUAL = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 5}


@given(
    CHATS,
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=1),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.integers(0, 255)), max_size=2),
)
@example({"model": "m", "messages": [{"role": "ü", "content": '\U0001f642\x7f\u0800\u07ff\n\\"/'}]}, {}, True, None, [])
@example({"messages": [{"content": "\0", "role": "user"}], "model": "m"}, {}, False, 1, [])
def test_usual_chat_is_that_of_the_decoder(
    chat: dict[str, Any], more: dict[str, Any], ascii_only: bool, indent: int | None, damage: list[tuple[int, int, int]]
) -> None:
    text = json.dumps(chat | more, ensure_ascii=ascii_only, indent=indent)
    body = bytearray(text.encode("utf-8", "surrogatepass"))
    for place, removed, byte in damage:
        body[place : place + removed] = bytes([byte])
    sent = bytes(body)
    read, named = CHECK.usual_chat(sent), CHECK.model_body(sent)
    if not isinstance(read, tuple):
        assert read == named
        return
    assert named is not None, "the same bodies are refused"
    assert read_request("POST", CHAT, [], sent, known=read) == read_request("POST", CHAT, [], sent)
    assert media_items(sent, -1) == 0


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "stream": None,
            "max_tokens": None,
            "temperature": 1.5,
            "stop": ["a"],
            "stream_options": {"include_usage": True},
        },
        {"max_completion_tokens": 7},
        {
            "model": "Ü",
            "messages": [{"role": "user", "content": '漢字 🙂 \\ " \n\t' * 50}, {"content": "", "role": ""}],
        },
    ],
)
def test_usual_chats_are_read_by_their_check(more: dict[str, Any]) -> None:
    for ascii_only in (True, False):
        body = json.dumps(USUAL | more, ensure_ascii=ascii_only).encode()
        read = CHECK.usual_chat(body)
        assert isinstance(read, tuple)
        assert read_request("POST", CHAT, [], body, known=read) == decode_chat(body)


UNUSUAL: list[dict[str, Any]] = [
    {"model": ""},
    {"model": 5},
    {"messages": []},
    {"messages": {}},
    {"messages": ["hi"]},
    {"messages": [[{"role": "user", "content": "hi"}]]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "hi", "name": "ann"}]},
    {"messages": [{"role": 1, "content": "hi"}]},
    {"stream": "true"},
    {"max_tokens": 5.0},
    {"max_tokens": "5"},
    *({name: None} for name in ("tools", "user", "cache_salt", "prompt_cache_key", "n", "input", "image_data")),
]


@pytest.mark.parametrize("more", UNUSUAL)
def test_unusual_chats_are_left_to_the_decoder(more: dict[str, Any]) -> None:
    body = json.dumps(USUAL | more).encode()
    assert CHECK.usual_chat(body) == CHECK.model_body(body) is not None


def test_long_chats_are_left_to_the_decoder() -> None:
    """Their objects would be made with the interpreter's lock, in one piece."""
    body = json.dumps(USUAL | {"messages": [{"role": "user", "content": "x" * 300_000}]}).encode()
    assert CHECK.usual_chat(body) == CHECK.model_body(body) is not None


@pytest.mark.parametrize("isolate", [True, False])
def test_salt_of_a_tenant_is_read(clock: Clock, isolate: bool) -> None:
    tenant = Tenant("a", TenantSettings(keys=[hashed_key("k")]), isolate, clock)
    sent = json.dumps(USUAL).encode()
    body, known = CHECK.checked(Routes().find("POST", CHAT), b"", sent, tenant, EngineFields.REFUSE, reads_chat=True)
    assert isinstance(known, tuple) is not isolate
    request = read_request("POST", CHAT, [], body, known=known)
    assert (request.cache_salt is not None) is isolate
    assert request == decode_chat(body)


def test_alias_is_replaced_in_a_usual_chat() -> None:
    settings = Settings.model_validate({"models": {"m": {"aliases": ["gpt"]}}})
    gate = AuthGate(settings)
    admitted = gate.admit("POST", CHAT.encode(), [], None)
    body, known = gate.body(admitted, json.dumps(USUAL | {"model": "gpt"}).encode(), reads_chat=True)
    assert json.loads(body)["model"] == "m"
    assert isinstance(known, tuple)
    assert read_request("POST", CHAT, [], body, known=known) == decode_chat(body)
