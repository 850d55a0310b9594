"""One field of a JSON object changed in its bytes, the others as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.apis.json_edit import SpliceError, field, with_field

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
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
def test_the_bytes(sent: bytes, expected: bytes) -> None:
    assert with_field(sent, "salt", b"1") == expected


def test_the_last_of_several_is_the_one() -> None:
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
        b"{} {}",
        b"{'a': 1}",
        b'{"a": "\n"}',
    ],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(SpliceError):
        with_field(body, "salt", b"1")


@given(st.binary())
def test_any_bytes_are_survived(body: bytes) -> None:
    try:
        changed = with_field(body, "salt", b"1")
    except SpliceError:
        return
    assert field(changed, "salt") == b"1"


@pytest.mark.parametrize("body", [b'{"a":' + b"[" * 100_000, '{"a": 1}'.encode("utf-16"), b'\xef\xbb\xbf{"a":1}'])
def test_what_cannot_be_read_is_refused(body: bytes) -> None:
    with pytest.raises(SpliceError):
        field(body, "salt")
