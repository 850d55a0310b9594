"""One field of a JSON object changed in its bytes, and the outline of a long body.

An outline is the body with empty strings.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from indexer.native import CORES
from router.apis.json_edit import LONG, SpliceError, field, read_outline, strict_json, with_field, without_fields
from router.auth.bodies import read_object

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
infinity = st.sampled_from([float("inf"), float("-inf")])
values = st.recursive(
    scalars | infinity, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10
)
small_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
names = st.text() | st.sampled_from(["salt", "salt ", "Salt", "prompt"])


@given(st.dictionaries(names, values), st.booleans(), st.sampled_from([None, 0, 2]), values)
def test_edit_changes_only_its_field(body: dict[str, Any], ascii_only: bool, indent: Any, value: Any) -> None:
    sent = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    changed = with_field(sent, "salt", json.dumps(value).encode())
    assert json.loads(changed.decode(errors="surrogatepass")) == body | {"salt": value}
    assert json.loads(field(changed, "salt") or b"") == value
    if "salt" not in body:
        added = len(changed) - len(sent)
        assert any(changed[:at] + changed[at + added :] == sent for at in range(len(sent) + 1))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"{}", b'{"salt":1}'),
        (b" { } ", b' {"salt":1 } '),
        (b'{"a" : "\xc3\xa9\\u0041" }\n', b'{"a" : "\xc3\xa9\\u0041","salt":1 }\n'),
        (b'{"salt": "x", "a": 1}', b'{"salt": 1, "a": 1}'),
        (b'{"salt": "x", "a": {"salt": 3}, "s\\u0061lt": []}', b'{"salt": 1, "a": {"salt": 3}, "s\\u0061lt": 1}'),
        (b'{"a": "\\"salt\\": 3}"}', b'{"a": "\\"salt\\": 3}","salt":1}'),
    ],
)
def test_field_is_set_without_changing_other_bytes(sent: bytes, expected: bytes) -> None:
    assert with_field(sent, "salt", b"1") == expected


def test_last_of_duplicate_fields_counts() -> None:
    assert field(b'{"salt": 1, "salt":  [2] }', "salt") == b"[2]"
    assert field(b'{"a": {"salt": 1}}', "salt") is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"salt"',
        b"{",
        b'{"a"',
        b'{"a":}',
        b'{"a":1',
        b'{"a":1,}',
        b"{}x",
        b"{}{}",
        b"{'a':1}",
        b'{"a":"\n"}',
    ],
)
def test_bodies_that_are_not_objects_are_rejected(body: bytes) -> None:
    with pytest.raises(SpliceError):
        with_field(body, "salt", b"1")


@given(st.binary())
def test_arbitrary_bytes_are_edited_or_rejected(body: bytes) -> None:
    try:
        changed = with_field(body, "salt", b"1")
    except SpliceError:
        return
    assert field(changed, "salt") == b"1"


@pytest.mark.parametrize("body", [b'{"a":' + b"[" * 100_000, '{"a": 1}'.encode("utf-16"), b'\xef\xbb\xbf{"a":1}'])
def test_unreadable_bodies_are_rejected(body: bytes) -> None:
    with pytest.raises(SpliceError):
        field(body, "salt")


native = pytest.mark.skipif("native" not in CORES, reason="the native core was not built")
PAD = "é[{,:\\\n" * (LONG // 8)
objects = st.dictionaries(st.text() | st.sampled_from(["salt", "prompt"]), small_values, max_size=4)


def long(fields: dict[str, Any], ascii_only: bool, indent: int | None) -> bytes:
    return json.dumps({"pad": PAD} | fields, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")


def without_text(value: Any) -> Any:
    """The value with empty strings, but for names."""
    if isinstance(value, str):
        return ""
    if isinstance(value, list):
        return [without_text(each) for each in value]
    return {name: without_text(each) for name, each in value.items()} if isinstance(value, dict) else value


@native
@given(objects, st.booleans(), st.sampled_from([None, 0, 3]))
def test_an_outline_has_everything_but_the_text(fields: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    body = long(fields, ascii_only, indent)
    outline = read_outline(body)
    assert len(outline.text) < LONG
    whole = json.loads(body)
    assert strict_json(outline.text) == without_text(whole)
    found = {json.loads(body[at:end]): json.loads(body[start:stop]) for at, end, start, stop in outline.fields}
    assert found == whole
    changed = with_field(body, "salt", b'"new"')
    assert json.loads(changed) == whole | {"salt": "new"}
    assert json.loads(field(changed, "pad") or b"") == whole["pad"]
    assert json.loads(without_fields(body, ["salt", "pad"])) == {
        name: value for name, value in whole.items() if name not in ("salt", "pad")
    }


@native
@given(
    objects,
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 2), st.sampled_from(list(range(256)))), min_size=1, max_size=3
    ),
)
def test_outline_is_refused_like_its_body(fields: dict[str, Any], damage: list[tuple[int, int, int]]) -> None:
    body = bytearray(json.dumps(fields | {"pad": PAD}).encode("utf-8", "replace"))
    for place, removed, byte in damage:
        body[place : place + removed] = bytes([byte])
    try:
        whole = strict_json(bytes(body))
    except ValueError:
        whole = None
    try:
        read = read_object(bytes(body), 10**6)
    except RequestError:
        read = None
    assert read == (without_text(whole) if isinstance(whole, dict) else None)


@native
@pytest.mark.parametrize(
    ("many", "counted"),
    [("[1]," * 9, 9 * 9), ('{"a":1},' * 9, 9 * 13), ("1," * 9, 9), ("1234567890123456," * 9, 9 * 3)],
)
def test_usage_of_each_api_is_counted(many: str, counted: int) -> None:
    body = f'{{"pad": {json.dumps(PAD)}, "x": [{many}0]}}'.encode()
    few, more = (read_outline(body.replace(b'"x"', name)) for name in (b'"x"', b'"y": [1, 2, 3], "x"'))
    assert few.values == counted + 8 + 1 + 8 + 2 * 4
    assert more.values - few.values == 8 + 4 + 2 + 1
    with pytest.raises(RequestError, match=r"limits\.values"):
        read_object(body, few.values - 1)
    assert read_object(body, few.values)["pad"] == ""
