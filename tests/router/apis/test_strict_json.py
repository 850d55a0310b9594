"""The outline of a long body says what the body says, but for what its strings hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from indexer.native import CORES
from router.apis.json_edit import LONG, field, read_outline, strict_json, with_field, without_fields
from router.auth.bodies import read_object

pytestmark = pytest.mark.skipif("native" not in CORES, reason="the native core was not built")

PAD = "é[{,:\\\n" * (LONG // 8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
objects = st.dictionaries(st.text() | st.sampled_from(["salt", "prompt"]), values, max_size=4)


def long(fields: dict[str, Any], ascii_only: bool, indent: int | None) -> bytes:
    return json.dumps({"pad": PAD} | fields, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")


def without_text(value: Any) -> Any:
    """The value with empty strings, but for names."""
    if isinstance(value, str):
        return ""
    if isinstance(value, list):
        return [without_text(each) for each in value]
    return {name: without_text(each) for name, each in value.items()} if isinstance(value, dict) else value


@given(objects, st.booleans(), st.sampled_from([None, 0, 3]))
def test_an_outline_has_everything_but_the_text(fields: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    body = long(fields, ascii_only, indent)
    outline = read_outline(body)
    assert outline is not None
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


@pytest.mark.parametrize(
    ("many", "counted"),
    [("[1]," * 9, 9 * 9), ('{"a":1},' * 9, 9 * 13), ("1," * 9, 9), ("1234567890123456," * 9, 9 * 3)],
)
def test_usage_of_each_api_is_counted(many: str, counted: int) -> None:
    body = f'{{"pad": {json.dumps(PAD)}, "x": [{many}0]}}'.encode()
    few, more = (read_outline(body.replace(b'"x"', name)) for name in (b'"x"', b'"y": [1, 2, 3], "x"'))
    assert few is not None
    assert more is not None
    assert few.values == counted + 8 + 1 + 8 + 2 * 4
    assert more.values - few.values == 8 + 4 + 2 + 1
    with pytest.raises(RequestError, match=r"limits\.values"):
        read_object(body, few.values - 1)
    assert read_object(body, few.values)["pad"] == ""
