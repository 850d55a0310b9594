"""Streams that another worker continues, and the number of allowed retries."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.forwarding.failover.resumable_request import resumable_request
from router.forwarding.failover.resumable_stream import ResumableStream
from router.forwarding.retries import WINDOW, RetryBudget

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def stream(path: str = CHAT, **fields: Any) -> ResumableStream:
    asked = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    body = json.dumps({"model": "m", "stream": True, **asked, **fields}).encode()
    request = resumable_request(path, body, tells_ids=True, tells_usage=True)
    assert request is not None
    return ResumableStream(request)


def event(content: str | None, ids: list[int] | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {"content": content} if content is not None else {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta | more, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    chunk = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(chunk).encode()


WHOLE = event(None) + event("Hé", [1]) + b": a comment\n\n" + event("llo", [2, 3], "stop") + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, len(WHOLE))))
def test_stream_is_equal_for_any_chunking(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(WHOLE)]
    at_once, in_parts = stream(), stream()
    passed = [in_parts.filter(WHOLE[a:b], b == len(WHOLE)) for a, b in pairwise(places)]
    assert b"".join(passed) == at_once.filter(WHOLE, True)
    assert (in_parts.text, in_parts.output_ids, in_parts.given) == ("Héllo", [1, 2, 3], 3)


@given(st.integers(0, len(WHOLE)))
def test_only_complete_events_are_forwarded(cut: int) -> None:
    passed = stream().filter(WHOLE[:cut], False)
    assert passed == b"" or passed.endswith(b"\n\n")


def test_tokens_without_text_are_repeated() -> None:
    cut = stream()
    cut.filter(event(None) + event("a", [1]) + event("", [2]), False)
    assert (cut.text, cut.output_ids, cut.given) == ("a", [1], 1)
    cut.filter(event("é", [3]), False)
    assert (cut.output_ids, cut.given) == ([1, 2, 3], 3)


@pytest.mark.parametrize(
    "chunk",
    [
        event("a", [1], reasoning_content="hm"),
        event(None, tool_calls=[{"index": 0}]),
        event("<think>hm", [1]),
        event("a\ufffd", [1]),
        event("a", [1]).replace(b'"index"', b'"logprobs": {"content": []}, "index"'),
        b"data: what is this\n\n",
    ],
)
def test_streams_with_other_content_cannot_be_continued(chunk: bytes) -> None:
    cut = stream()
    cut.filter(event(None), False)
    assert cut.can_go_on
    passed = cut.filter(chunk, False)
    assert passed
    assert not cut.can_go_on
    assert cut.ending() is None


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_aborted_answer_is_a_problem(reason: str) -> None:
    cut = stream()
    assert cut.filter(event("a", [1]) + event("", [], reason) + b"data: [DONE]\n\n", True).count(b"data:") == 1
    assert cut.problem is not None
    assert cut.can_go_on


def test_stream_without_end_is_a_problem() -> None:
    cut = stream()
    cut.filter(event("a", [1]), True)
    assert cut.problem is not None


def test_missing_end_of_a_complete_answer_is_added() -> None:
    cut = stream(max_tokens=2, stream_options={"include_usage": True})
    first = event(None).replace(b'"id"', b'"prompt_token_ids": [7, 8, 9], "id"')
    assert b"prompt_token_ids" not in cut.filter(first + event("a", [1]), False)
    assert cut.ending() is None
    cut.filter(event("b", [2]), False)
    ending = cut.ending()
    last, usage, done, _ = ending.split(b"\n\n")
    assert json.loads(last[5:])["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage[5:])["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert done == b"data: [DONE]"


def test_limits_are_reduced_by_given_tokens() -> None:
    request = stream(max_tokens=9, max_completion_tokens=8, min_tokens=3).request
    body = json.loads(request.chat_from("so far", 5))
    assert (body["max_tokens"], body["max_completion_tokens"], body["min_tokens"]) == (4, 3, 0)
    assert body["messages"][-1] == {"role": "assistant", "content": "so far"}
    completion = stream(COMPLETIONS).request
    assert json.loads(completion.completion_from([1, 2], 5))["max_tokens"] == 11  # of OpenAI's 16


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {"stream": False}),
        (CHAT, {"max_tokens": "5"}),
        (CHAT, {"continue_final_message": True}),
        (CHAT, {"unknown": 1}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"best_of": 2}),
        (COMPLETIONS, {"logprobs": 0}),
        (COMPLETIONS, {"suffix": "x"}),
        ("/v1/responses", {}),
    ],
)
def test_requests_with_other_fields_are_not_resumable(path: str, fields: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user"}], "prompt": "x"}
    assert resumable_request(path, json.dumps(asked | fields).encode(), True, True) is None


def taken(budget: RetryBudget, tries: int) -> int:
    return sum(budget.take() for _ in range(tries))


@pytest.mark.parametrize(("minimum", "requests", "retries"), [(3, 0, 3), (0, 0, 0), (3, 100, 23), (1, 50, 11)])
def test_retries_are_a_minimum_and_a_share_of_recent_requests(
    clock: Clock, minimum: int, requests: int, retries: int
) -> None:
    budget = RetryBudget(0.2, minimum, clock)
    for _ in range(requests):
        budget.request()
    assert taken(budget, 100) == retries
    clock.now += WINDOW
    assert taken(budget, 100) == minimum, "old requests are forgotten"


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20), st.integers(0, 20)), max_size=60))
def test_retries_in_any_window_stay_within_the_budget(steps: list[tuple[float, int, int]]) -> None:
    clock = Clock(0.5)
    budget = RetryBudget(0.5, 2, clock)
    requests: list[int] = []
    retries: list[int] = []
    for seconds, came, tried in steps:
        clock.now += seconds
        for _ in range(came):
            budget.request()
        now = int(clock.now)
        requests += [now] * came
        retries += [now] * taken(budget, tried)
        recent_requests = sum(at > now - WINDOW for at in requests)
        recent_retries = sum(at > now - WINDOW for at in retries)
        if tried and retries and retries[-1] == now:
            assert recent_retries <= 2 + 0.5 * recent_requests
