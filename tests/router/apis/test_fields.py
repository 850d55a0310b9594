import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from router.apis.body_fields import GenerationFields
from router.apis.fields import lenient, read_body

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
TEXTS = st.sampled_from(["5", "-3", "5.0", "1e2", "true", "False", "1", "0", "null", "", " 7"])
VALUES = SCALARS | TEXTS | st.just([1]) | st.just({"a": 1}) | st.sampled_from([5.0, 2**63, 2**64, 2**70, -(2**64)])


@given(VALUES, VALUES)
def test_integers_and_booleans_are_read_as_leniently_in_usual_bodies_as_in_others(number: Any, flag: Any) -> None:
    body = msgspec.json.encode({"model": "m", "n": number, "stream": flag, "other": [1]})
    given = msgspec.json.decode(body)
    for also in ({}, {"priority": "unusual"}, {"priority": "3"}):
        fields = read_body(msgspec.json.encode(given | also), GenerationFields)
        assert (fields.n, fields.stream) == (lenient(given["n"], int, None), lenient(given["stream"], bool, None))
        assert fields.priority == lenient(also.get("priority"), int, None)
        assert fields.model == "m"


@pytest.mark.parametrize("body", [b'{"n": "5", "top_p": NaN}', b'\xef\xbb\xbf{"n": 5}', b'{"n": 5, "x": 1e400}'])
def test_json_that_only_python_reads_is_read(body: bytes) -> None:
    assert read_body(body, GenerationFields).n == 5


@pytest.mark.parametrize(("body", "problem"), [(b"[1]", "a list"), (b"{", "not JSON"), (b'"\xff"', "not JSON")])
def test_other_bodies_are_refused(body: bytes, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        read_body(body, GenerationFields)


def test_strings_of_unread_fields_are_not_decoded() -> None:
    assert read_body(b'{"n": "2", "other": "\xff"}', GenerationFields).n == 2
    assert read_body(json.dumps({"n": 2}).encode(), GenerationFields).n == 2
