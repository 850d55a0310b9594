"""Usage in answers whose bytes arrive in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.apis.usage import Usage, UsageTail

USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}
READ = Usage(100, 7, 64)

texts = st.text() | st.sampled_from(['"usage": {"prompt_tokens": 1}', '\\"usage\\": {', "data: [DONE]\n\n", "{" * 2000])


def read(answer: bytes, *cuts: int) -> Usage | None:
    tail = UsageTail()
    places = [0, *sorted(cut % (len(answer) + 1) for cut in cuts), len(answer)]
    for start, end in pairwise(places):
        tail.feed(answer[start:end])
    return tail.usage()


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(text: str, **more: Any) -> bytes:
    return event({"choices": [{"delta": {"content": text}}], **more})


@given(st.lists(texts, max_size=20), st.lists(st.integers(0, 100_000), max_size=30), st.booleans())
def test_a_stream_in_any_pieces(words: list[str], cuts: list[int], continuous: bool) -> None:
    more = {"usage": {"prompt_tokens": 100, "completion_tokens": 1} if continuous else None}
    answer = b"".join(chunk(word, **more) for word in words)
    assert read(answer + event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n", *cuts) == READ


@given(texts, st.lists(st.integers(0, 100_000), max_size=30), st.booleans())
def test_a_body_in_any_pieces(text: str, cuts: list[int], ascii_only: bool) -> None:
    body = {"choices": [{"message": {"content": text}}], "usage": USAGE, "kv_transfer_params": None}
    assert read(json.dumps(body, ensure_ascii=ascii_only, indent=2).encode(errors="surrogatepass"), *cuts) == READ


def test_only_the_end_of_a_long_answer_is_kept() -> None:
    tail = UsageTail()
    for _ in range(2000):
        tail.feed(chunk("word " * 50))
    tail.feed(event({"choices": [], "usage": USAGE}))
    assert tail.usage() == READ
    tail.feed(b"x" * 10_000_000)
    assert tail.usage() is None


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9}, Usage(9, 0, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, 0, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": None}}, Usage(9, 0, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(9, 0, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": -1}}, Usage(9, 0, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": [3]}, Usage(9, 0, None)),
        ({"prompt_tokens": True}, None),
        ({"prompt_tokens": "9"}, None),
        ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 2, 4)),
        ({"total_tokens": 9}, Usage(9, 0, None)),
        ({"total_tokens": -9}, None),
        (None, None),
        ("usage", None),
    ],
)
def test_missing_usage_fields_are_tolerated(usage: Any, expected: Usage | None) -> None:
    assert read(json.dumps({"usage": usage}).encode()) == expected


@pytest.mark.parametrize("answer", [b"", b"\xff" * 50, b'"usage": {', b'"usage": {"prompt_tokens": 1', b'"usage":' * 9])
def test_an_answer_without_usage(answer: bytes) -> None:
    assert read(answer) is None


@pytest.mark.parametrize("after", [b"", b"}", b',"a":{"b":"}"}}', b"}\n\ndata: [DONE]\n\n", b"}\xff"])
@pytest.mark.parametrize(
    "more", [b"", b',"note":"}"', b',"note":"{{"', b',"note":"\xff"', b',"details":{"deep":{"er":{}},"list":[{}]}']
)
def test_end_of_usage_object_is_found_with_any_content(more: bytes, after: bytes) -> None:
    assert read(b'{"usage": {"prompt_tokens": 9, "completion_tokens": 2' + more + b"}" + after) == Usage(9, 2, None)


@given(st.binary(), st.lists(st.integers(0, 1000)))
def test_usage_of_arbitrary_bytes_does_not_depend_on_chunks(answer: bytes, cuts: list[int]) -> None:
    assert read(answer, *cuts) == read(answer)


@pytest.mark.parametrize(
    ("between", "found"),
    [(b":", True), (b" :\n\t ", True), (b": [", False), (b"", False), (b",", False), (b'":', False), (b"::", False)],
)
def test_usage_key_needs_a_colon_before_its_object(between: bytes, found: bool) -> None:
    assert (read(b'{"usage"' + between + b'{"prompt_tokens": 9}}') is not None) is found
    assert read(b'"\\"usage"' + between + b'{"prompt_tokens": 9}}') is None
