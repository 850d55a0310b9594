"""Usage that is asked for on the client's behalf, and never reaches it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.apis.usage import HiddenUsage, with_include_usage

CHAT = "/v1/chat/completions"
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3}}\n\n'
EVENTS = st.sampled_from(
    [
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b'data: {"choices":[{"text":"\\"usage\\": {}"}],"usage":null}\n\n',
        b'data: {"choices":[{"text":"b"}],"usage":{"prompt_tokens":3}}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"error":{"message":"usage"}}\n\n',
        b'data: {"usage"\n\n',
        b": usage\n\n",
        b"\n\n",
    ]
)


def seen(chunks: list[bytes], headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the chunks that a client receives."""
    if not HiddenUsage.applies_to(headers):
        return [*chunks, b""]
    hidden = HiddenUsage()
    return [passed for chunk in chunks if (passed := hidden.filter(chunk, False))] + [hidden.filter(b"", True)]


STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]


@given(st.lists(EVENTS | st.just(USAGE), max_size=12), st.lists(st.integers(0, 2000), max_size=20), st.booleans())
def test_a_client_sees_all_but_the_usage(events: list[bytes], cuts: list[int], cut_off: bool) -> None:
    answer = b"".join(events) + (b"data: {half" if cut_off else b"data: [DONE]\n\n")
    expected = b"".join(event for event in events if event != USAGE)
    places = [0, *sorted(cut % (len(answer) + 1) for cut in cuts), len(answer)]
    bodies = seen([answer[start:end] for start, end in pairwise(places)], STREAM)
    assert b"".join(bodies) == expected + (b"data: {half" if cut_off else b"data: [DONE]\n\n")


def test_events_are_forwarded_at_once_if_whole_or_too_long() -> None:
    events = [b'data: {"choices":[1]}\n\n'] * 3
    assert seen(events, STREAM) == [*events, b""]
    chunk = b"x" * 700_000
    assert seen([chunk, chunk, b"y\n\n"], STREAM) == [chunk * 2, b"y\n\n", b""]


@pytest.mark.parametrize(
    "headers", [[(b"content-type", b"application/json")], [], [*STREAM, (b"content-length", b"9")]]
)
def test_responses_without_stream_are_not_filtered(headers: list[tuple[bytes, bytes]]) -> None:
    assert seen([USAGE], headers) == [USAGE, b""]


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (b'{ "stream": true, "a": 1.0 }', b'{ "stream": true, "a": 1.0,"stream_options":{"include_usage":true} }'),
        (b'{"stream":true,"stream_options":null}', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream":true,"stream_options":{}}', None),
        (b'{"stream":false}', None),
        (b"{}", None),
        (b"[", None),
    ],
)
def test_usage_is_requested_only_for_streams_without_options(body: bytes, asked: bytes | None) -> None:
    assert with_include_usage(CHAT, body) == asked
    assert with_include_usage("/v1/responses", body) is None


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text()))
def test_request_for_usage_adds_only_stream_options(body: dict[str, Any]) -> None:
    sent = body | {"stream": True}
    sent.pop("stream_options", None)
    asked = with_include_usage(CHAT, json.dumps(sent).encode())
    assert asked is not None
    assert json.loads(asked) == sent | {"stream_options": {"include_usage": True}}
