"""Bodies that begin as known ones: what is read of them is what is read of each by itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import RequestError
from router.apis.conversations import MIN_BYTES, Conversations
from router.apis.media import has_media
from router.apis.openai_requests import decode_chat
from router.apis.requests import ChatPrompt, RoutedRequest

# Enough for a body to be remembered.
LONG = "You hold the cache of the prefix. " * (MIN_BYTES // 30)


def alone(body: bytes) -> RoutedRequest | str:
    try:
        return decode_chat(body)
    except RequestError as error:
        return f"{error.status} {error.param}: {error.message}"


def after(seen: Conversations, body: bytes) -> RoutedRequest | str:
    try:
        request = decode_chat(body, (), seen)
    except RequestError as error:
        return f"{error.status} {error.param}: {error.message}"
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.conversation is not None
    assert request.prompt.conversation.has_media == has_media(request.prompt.messages)
    return request


def shared(seen: Conversations, body: bytes) -> int:
    """How many messages of a body were not decoded again."""
    request = decode_chat(body, (), seen)
    assert request == decode_chat(body)
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.conversation is not None
    return request.prompt.conversation.shared


GOOD_MESSAGES = st.sampled_from(
    [
        '{"role":"user","content":"hi"}',
        ' {"role": "user", "content": "hi" }\n',
        '{"role":"assistant","content":"caf\\u00e9 \\ud83d\\ude00 \\" \\\\"}',
        '{"role":"user","content":"漢字 👍"}',
        '{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:"}}]}',
        '{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}',
        '{"content":"x","content":"y","role":"user","n":[1.5,-0.0,1e3,12345678901234567890]}',
        '{"role":"user","content":"],\\"messages\\":[{"}',
    ]
)
BAD_MESSAGES = st.sampled_from(
    [
        "5",
        "null",
        '{"content":"no role"}',
        '{"role":"user","content":"\\ud800"}',
        '{"role":"user","content":1e999}',
        '{"role":"user","content":"open',
    ]
)
# What there is once in a while, after something else for the most of the time.
MESSAGES = st.one_of(*[GOOD_MESSAGES] * 9, BAD_MESSAGES)
FIELDS = st.sampled_from(
    [
        '"model":"m"',
        '"model" : "other"',
        '"model":null',
        '"m\\u006fdel":"escaped"',
        '"stream":true',
        '"max_tokens":16',
        '"max_tokens":"17"',
        '"n":2',
        '"cache_salt":""',
        '"temperature":NaN',
        '"seed":1e999',
        '"tools":[{"type":"function","function":{"name":"f","parameters":{"a":[true,1,1.0]}}}]',
        '"messages":[]',
        '"messages":[{"role":"user","content":"others"}]',
        '"metadata":{"messages":[{}],"session_id":"s"}',
        '"user":"\\u006d"',
        "5",
        "",
    ]
)
SPACES = st.sampled_from(["", "", "", " ", "\n\t", "\u00a0"])


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """Bodies that go on from one another, or from nothing, with all that JSON has."""
    heads = [",".join([*draw(st.lists(FIELDS, max_size=2)), '"model":"m"', '"messages":']) for _ in range(2)]
    system = f'{{"role":"system","content":"{LONG}"}}'
    found, messages = [], [system]
    for _ in range(draw(st.integers(2, 6))):
        head = heads[draw(st.sampled_from([0, 0, 0, 1]))]
        messages = messages[: draw(st.integers(1, 9))] + draw(st.lists(MESSAGES, max_size=3))
        comma = draw(SPACES) + "," + draw(SPACES)
        tail = draw(st.lists(FIELDS, max_size=3))
        text = "{" + head + "[" + comma.join(messages) + draw(SPACES) + "]" + "".join("," + each for each in tail)
        text += draw(st.sampled_from(["}", "}", "}", "}\n", "} x", "", "]}"]))
        start = draw(st.sampled_from([b"", b"", b"", b" ", b"\xef\xbb\xbf"]))
        end = draw(st.sampled_from([b"", b"", b"", b"\xff"]))
        found.append(start + text.encode(errors="surrogatepass") + end)
    return found


@settings(max_examples=400)
@given(bodies())
def test_what_is_read_does_not_depend_on_what_was_read_before(bodies: list[bytes]) -> None:
    seen = Conversations()
    for body in bodies + bodies[::-1]:
        assert repr(after(seen, body)) == repr(alone(body))


def chat(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_the_next_turn_shares_all_messages_of_the_last() -> None:
    seen = Conversations()
    assert shared(seen, chat(LONG, max_tokens=5)) == 0
    assert shared(seen, chat(LONG, "a", "b", max_tokens=5)) == 1
    assert shared(seen, chat(LONG, "a", "b", "c", "d", max_tokens=5)) == 3
    assert shared(seen, chat(LONG, "a", "b", "c", "d", "e", max_tokens=9, stream=True)) == 5
    assert shared(seen, chat(LONG, "a", "b", "c", "d", "e", "f", max_tokens=9, stream=True)) == 6
    assert shared(seen, chat(LONG, "a", "bb", "c", max_tokens=9)) == 2
    assert shared(seen, chat(LONG + LONG, "a", "bb", "c", max_tokens=9)) == 0


@pytest.mark.parametrize("bad", ["5", "null", "[]", '{"content":"no role"}', '{"role":"user","content":7}', "{}"])
@pytest.mark.parametrize("tail", ["]}", '],"n":2}', '],"model":""}'])
def test_a_new_message_that_is_none_is_refused_by_its_place(bad: str, tail: str) -> None:
    seen = Conversations()
    start = chat(LONG, "a").decode().removesuffix("]}")
    for body in (f"{start}]}}", f'{start},{{"role":"user","content":"b"}},{bad}{tail}'):
        assert after(seen, body.encode()) == alone(body.encode())


def test_fields_before_and_after_the_messages() -> None:
    seen, turns = Conversations(), [{"role": "user", "content": LONG}]
    for turn in range(4):
        turns.append({"role": "user", "content": str(turn)})
        for fields in ({"model": "m", "messages": turns, "n": turn}, {"n": turn, "model": "m", "messages": turns}):
            body = json.dumps(fields).encode()
            assert after(seen, body) == alone(body)


@pytest.mark.parametrize(
    "tail",
    [
        '],"messages":[{"role":"user","content":"the last ones count"}]}',
        '],"messages":[{"role":"user","content":"the last ones count"}],"n":2}',
        ']}{"messages":[]}',
        '],"model":null}',
        '],"model":"other"}',
        ",]}",
        "]]}",
        ".5]}",
        '.5],"n":2}',
        '],"n":2}',
        '],"model":"m","m\\u006fdel":"x"}',
    ],
)
def test_a_tail_that_changes_the_meaning(tail: str) -> None:
    seen = Conversations()
    start = chat(LONG, "a").decode().removesuffix("]}")
    for end in ("]}", tail, "]}", f',{{"role":"user","content":"b"}}{tail}'):
        body = (start + end).encode()
        assert repr(after(seen, body)) == repr(alone(body))


def test_messages_that_stand_in_a_body_twice() -> None:
    """Which of them are the messages is not clear from their bytes alone."""
    messages = json.dumps([{"role": "user", "content": LONG}])
    seen = Conversations()
    longer = messages.removesuffix("]") + ', {"role": "user", "content": "more"}]'
    for end in ("", ', "n": 2', ', "n": 3'):
        for others in (messages, longer):
            body = f'{{"model": "m", "metadata": {others}, "messages": {messages}{end}}}'.encode()
            assert after(seen, body) == alone(body)


def test_a_body_that_ends_with_a_message() -> None:
    """Its last bytes are those of a known body's end, and yet no end."""
    seen = Conversations()
    parts = {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "b"}]}
    first = json.dumps({"role": "user", "content": LONG, "n": [1]})
    for body in (
        json.dumps({"model": "m", "messages": [parts, parts]}),
        json.dumps({"model": "m", "messages": [parts, parts]})[: -len(json.dumps(parts)) - 4],
        f'{{"model": "m", "messages": [{first}, {first}]}}',
        f'{{"model": "m", "messages": [{first}',
        f'{{"model": "m", "messages": [{first}]}}',
    ):
        assert repr(after(seen, body.encode())) == repr(alone(body.encode()))


def test_media_in_what_is_known_are_not_forgotten() -> None:
    seen = Conversations()
    picture = [{"type": "image_url", "image_url": {"url": "data:"}}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    for content in ("a", picture, "b", "c"):
        turns.append({"role": "user", "content": content})
        body = json.dumps({"model": "m", "messages": turns}).encode()
        assert after(seen, body) == alone(body)
    assert shared(seen, json.dumps({"model": "m", "messages": [*turns[:2], *turns[3:]]}).encode()) == 2


def test_what_is_kept_keeps_to_its_bytes() -> None:
    limit = 300_000
    seen = Conversations(limit)
    for number in range(100):
        body = chat(f"{number} {LONG}", "é👍" * 100, "c" * number)
        assert after(seen, body) == alone(body)
        assert shared(seen, body) == 0
        assert seen.size <= limit
    assert seen.size > limit // 2
    flat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x", "n": [{}] * 20_000}]}).encode()
    assert after(seen, flat) == alone(flat)  # takes more than all of it, as Python's objects
    assert after(Conversations(0), body) == alone(body)


def test_a_conversation_that_grows_is_kept_once() -> None:
    seen, contents = Conversations(), [LONG]
    for turn in range(60):
        contents.append(f"turn {turn}")
        body = chat(*contents)
        decode_chat(body, (), seen)
    assert seen.size < 20 * len(body)


def test_many_threads_may_read() -> None:
    seen = Conversations(200_000)

    def right(number: int) -> bool:
        random = Random(number)
        contents = [f"{number % 3} {LONG}", *(str(random.randrange(2)) for _ in range(random.randrange(8)))]
        body = chat(*contents, n=random.randrange(3))
        return after(seen, body) == alone(body)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, range(400)))
