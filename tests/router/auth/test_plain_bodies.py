"""The quick check accepts only bodies that the whole check accepts unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from indexer.native import CORES
from router.apis.body_fields import ModelFields
from router.apis.fields import read_body
from router.auth.bodies import BodyCheck, _values_in, read_object
from router.auth.engine_fields import CARRIERS, CONTROL_FIELDS
from router.auth.routes import Routes
from router.settings import EngineFields, LimitSettings

pytestmark = pytest.mark.skipif("native" not in CORES, reason="the native core was not built")

LIMITS = LimitSettings(prompts=6, messages=6, values=20_000)
CHECK = BodyCheck(LIMITS)
CHAT = Routes().find("POST", "/v1/chat/completions")

FIELDS = ["model", "stream", "user", "messages", "prompt", "priority", *sorted(CONTROL_FIELDS)[:2], CARRIERS[0]]
names = st.sampled_from([*FIELDS, "a", "a ", "é", ""])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(names | st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)
objects = st.dictionaries(names, values, max_size=5)


_WHOLE = BodyCheck(LIMITS)
_WHOLE.model_body = lambda _: None


def is_accepted_as_it_is(body: bytes) -> bool:
    try:
        read = read_object(body, LIMITS.values)
        whole, _ = _WHOLE.checked(CHAT, b"", body, None, EngineFields.REFUSE)
    except RequestError:
        return False
    return whole is body and "priority" not in read


@given(
    objects,
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.sampled_from(list(range(256)))), max_size=3),
)
def test_whatever_is_plain_is_accepted(
    fields: dict[str, Any], ascii_only: bool, damage: list[tuple[int, int, int]]
) -> None:
    body = bytearray(json.dumps(fields, ensure_ascii=ascii_only, allow_nan=True).encode("utf-8", "surrogatepass"))
    for place, removed, byte in damage:
        body[place : place + removed] = bytes([byte])
    named = CHECK.model_body(bytes(body))
    if named is not None:
        assert is_accepted_as_it_is(bytes(body))
        assert read_body(named, ModelFields) == read_body(bytes(body), ModelFields)


@given(st.binary(max_size=60))
def test_invalid_json_is_not_plain(body: bytes) -> None:
    text = b'{"a": "' + body + b'"}'
    if CHECK.model_body(text) is not None:
        assert is_accepted_as_it_is(text)
    if CHECK.model_body(body) is not None:
        assert is_accepted_as_it_is(body)


PLAIN = [
    {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0.7,
        "stream": True,
        "max_tokens": 16,
    },
    {"prompt": list(range(1000)), "model": "m"},
    {"model": "Ü", "messages": [{"role": "user", "content": '漢字 🙂 \\ " \n' * 50}]},
    {"tools": [{"function": {"parameters": {"properties": {f"p{n}": {"type": "string"} for n in range(60)}}}}] * 3},
    {"stop": None, "seed": -12, "logit_bias": {}, "x": [[1, 2], [3]]},
]


@pytest.mark.parametrize("fields", PLAIN)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_common_bodies_are_plain(fields: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(fields, ensure_ascii=ascii_only, indent=indent).encode()
    assert CHECK.model_body(body) is not None
    assert is_accepted_as_it_is(body)


NOT_PLAIN = [
    b"",
    b"[1]",
    b"1",
    b"\xef\xbb\xbf{}",
    b"{} {}",
    b'{"a": 1, "a": 2}',
    b'{"b": {"a": 1, "a": 2}}',
    b'{"a": 1, "\\u0061": 2}',
    b'{"a": NaN}',
    b'{"a": 1e999}',
    b'{"a": 01}',
    b'{"a": -}',
    b'{"a": 1.}',
    b'{"a": .5}',
    b'{"a": +1}',
    b'{"a": 9007199254740993}',
    b'{"a": "\\ud800"}',
    b'{"a": "\\udc00\\ud800"}',
    b'{"a": "\\x"}',
    b'{"a": "\n"}',
    b'{"a": "\x7f\x80"}',
    b'{"a": "\xc0\xaf"}',
    b'{"a": "\xe0\x9f\xbf"}',
    b'{"a": "\xed\xa0\x80"}',
    b'{"a": "\xf4\x90\x80\x80"}',
    b'{"a": "\xf0\x8f\xbf\xbf"}',
    b'{"a": "\xe6\xbc"}',
    b'{"a": 1,}',
    b'{"a": [1,]}',
    b'{"a": [1 2]}',
    b'{"a" 1}',
    b"{a: 1}",
    b'{"a": tru}',
    b'{"a": 1',
    b'{"a": "',
    b'{"a": "\\',
    b'{"a": "\\u12',
    b'{"kv_transfer_params": {}}',
    b'{"vllm_xargs": {}}',
    b'{"input_ids": [1]}',
    b'{"prompt_token_ids": [1]}',
    b'{"priority": 1}',
    b'{"prompt": ["a", "b", "c", "d", "e", "f", "g"]}',
    b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"a": [' + b"[]," * 30_000 + b"[]]}",
    b"{" + b",".join(b'"%d": 1' % number for number in range(65)) + b"}",
]


@pytest.mark.parametrize("body", NOT_PLAIN)
def test_rare_bodies_are_not_plain(body: bytes) -> None:
    assert CHECK.model_body(body) is None


def test_ids_are_plain_where_they_are_the_prompt() -> None:
    """Bodies with a prompt of token ids are as quick to check as others."""
    check, body = BodyCheck(LIMITS), b'{"input_ids": [1, 2], "model": "m"}'
    for path in ("/generate", "/encode"):
        route = Routes().find("POST", path)
        assert check.checked(route, b"", body, None, EngineFields.REFUSE) == (body, b'{"model": "m"}')


@pytest.mark.parametrize("byte", [b"\x00", b"\x1f", b"\x80", b"\xff", b'"', b"\\"])
def test_control_bytes_are_found_at_every_position(byte: bytes) -> None:
    for length in range(40):
        for place in range(length + 1):
            assert CHECK.model_body(b'{"a": "' + b"a" * place + byte + b"a" * (length - place) + b'", "b": 1}') is None


def test_model_body_has_the_fields_of_routing_by_load() -> None:
    """The prompt is left out, whatever it is: reading the rest takes as long for a long one as for a short one."""
    body = json.dumps(
        {"messages": [{"content": "a" * 9000}], "model": "m", "n": 1, "stream": True, "user": "Zoë"}
    ).encode()
    assert CHECK.model_body(body) == b'{"model": "m","stream": true,"user": "Zo\\u00eb"}'
    assert CHECK.model_body(b'{ "prompt": 1 }') == b"{}"


def test_a_string_without_an_end_is_no_work() -> None:
    """The unterminated string has no values, and is read once, not once for each of its quotes."""
    body = b'{"model": "m", "x": "' + b'\\",' * 3000
    assert _values_in(body, 10) < 100


@given(values, st.integers(0, 60_000))
def test_quick_count_never_accepts_too_many_values(value: Any, spaces: int) -> None:
    """The bodies are long enough to be counted."""
    check = BodyCheck(LimitSettings(values=100_000))
    item = json.dumps(value).encode()
    body = b"[" + b",".join([item] * (70_000 // (len(item) + 1) + 1)) + b" " * spaces + b"]"
    if check.clearly_within_limits(body):
        check.check_amount(body)


def test_a_glance_tells_little_from_much() -> None:
    check = BodyCheck(LimitSettings(values=100_000))
    assert check.clearly_within_limits(b"[[{}]]")
    assert check.clearly_within_limits(b'{"model":"m","token_ids":[' + b"12345," * 15_000 + b"1]}")
    assert not check.clearly_within_limits(b"[" + b"[]," * 25_000 + b"1]")
    assert not check.clearly_within_limits(b'{"":' + b'{"a":1},' * 15_000 + b"1}")
    assert not check.clearly_within_limits(b"[" + b"1," * 60_000 + b"1]")
