"""Bodies that begin as known ones: what is read of them is what is read of each by itself."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import RequestError
from router.apis.anthropic_messages import decode_messages
from router.apis.body_cache import MIN_BYTES, BodyCache
from router.apis.media import has_media
from router.apis.openai_requests import decode_chat
from router.apis.requests import ChatPrompt, RoutedRequest
from router.apis.responses import decode_responses

# Enough for a body to be remembered.
LONG = "You hold the cache of the prefix. " * (MIN_BYTES // 30)


def alone(body: bytes) -> RoutedRequest | str:
    try:
        return decode_chat(body)
    except RequestError as error:
        return f"{error.status} {error.param}: {error.message}"


def after(seen: BodyCache, body: bytes) -> RoutedRequest | str:
    try:
        request = decode_chat(body, (), seen)
    except RequestError as error:
        return f"{error.status} {error.param}: {error.message}"
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.conversation is not None
    assert request.prompt.conversation.has_media == has_media(request.prompt.messages)
    return request


def shared(seen: BodyCache, body: bytes) -> int:
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
    seen = BodyCache()
    for body in bodies + bodies[::-1]:
        assert repr(after(seen, body)) == repr(alone(body))


def chat(*contents: str, **fields: Any) -> bytes:
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_the_next_turn_shares_all_messages_of_the_last() -> None:
    seen = BodyCache()
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
    seen = BodyCache()
    start = chat(LONG, "a").decode().removesuffix("]}")
    for body in (f"{start}]}}", f'{start},{{"role":"user","content":"b"}},{bad}{tail}'):
        assert after(seen, body.encode()) == alone(body.encode())


def test_fields_before_and_after_the_messages() -> None:
    seen, turns = BodyCache(), [{"role": "user", "content": LONG}]
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
    seen = BodyCache()
    start = chat(LONG, "a").decode().removesuffix("]}")
    for end in ("]}", tail, "]}", f',{{"role":"user","content":"b"}}{tail}'):
        body = (start + end).encode()
        assert repr(after(seen, body)) == repr(alone(body))


def test_messages_that_stand_in_a_body_twice() -> None:
    """Which of them are the messages is not clear from their bytes alone."""
    messages = json.dumps([{"role": "user", "content": LONG}])
    seen = BodyCache()
    longer = messages.removesuffix("]") + ', {"role": "user", "content": "more"}]'
    for end in ("", ', "n": 2', ', "n": 3'):
        for others in (messages, longer):
            body = f'{{"model": "m", "metadata": {others}, "messages": {messages}{end}}}'.encode()
            assert after(seen, body) == alone(body)


def test_a_body_that_ends_with_a_message() -> None:
    """Its last bytes are those of a known body's end, and yet no end."""
    seen = BodyCache()
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
    seen = BodyCache()
    picture = [{"type": "image_url", "image_url": {"url": "data:"}}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    for content in ("a", picture, "b", "c"):
        turns.append({"role": "user", "content": content})
        body = json.dumps({"model": "m", "messages": turns}).encode()
        assert after(seen, body) == alone(body)
    assert shared(seen, json.dumps({"model": "m", "messages": [*turns[:2], *turns[3:]]}).encode()) == 2


def test_what_is_kept_keeps_to_its_bytes() -> None:
    limit = 300_000
    seen = BodyCache(limit)
    for number in range(100):
        body = chat(f"{number} {LONG}", "é👍" * 100, "c" * number)
        assert after(seen, body) == alone(body)
        assert shared(seen, body) == 0
        assert seen.size <= limit
    assert seen.size > limit // 2
    flat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x", "n": [{}] * 20_000}]}).encode()
    assert after(seen, flat) == alone(flat)  # takes more than all of it, as Python's objects
    assert after(BodyCache(0), body) == alone(body)


def test_a_conversation_that_grows_is_kept_once() -> None:
    seen, contents = BodyCache(), [LONG]
    for turn in range(60):
        contents.append(f"turn {turn}")
        body = chat(*contents)
        decode_chat(body, (), seen)
    assert seen.size < 20 * len(body)


def test_many_threads_may_read() -> None:
    seen = BodyCache(200_000)

    def right(number: int) -> bool:
        random = Random(number)
        contents = [f"{number % 3} {LONG}", *(str(random.randrange(2)) for _ in range(random.randrange(8)))]
        body = chat(*contents, n=random.randrange(3))
        return after(seen, body) == alone(body)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, range(400)))


# As a short body, and as one that others may go on from.
@pytest.mark.parametrize("content", ["hi", LONG])
def test_the_same_body_is_read_once(content: str) -> None:
    seen, body = BodyCache(), chat(content, user="body")
    first = decode_chat(body, (), seen)
    assert decode_chat(bytes(bytearray(body)), (), seen) is first
    assert decode_chat(body, [(b"x-session-id", b"header")], seen) == replace(first, session="header")
    assert decode_chat(body, (), seen).session == "body"
    assert decode_chat(chat(content, user="other"), (), seen) == decode_chat(chat(content, user="other"))
    # Another kind of body means something else by the same bytes.
    assert decode_messages(body, (), seen) == decode_messages(body)
    assert decode_chat(body, (), seen) == first


def test_short_bodies_keep_to_their_bytes() -> None:
    seen = BodyCache(800_000)
    for number in range(400):
        decode_chat(chat(str(number)), (), seen)
        decode_chat(chat("again"), (), seen)
        assert seen.size <= 100_000
    again = decode_chat(chat("again"), (), seen)
    assert decode_chat(chat("again"), (), seen) is again
    assert decode_chat(chat("399"), (), seen) is decode_chat(chat("399"), (), seen)
    nothing = BodyCache(0)
    assert decode_chat(chat("hi"), (), nothing) is not decode_chat(chat("hi"), (), nothing)
    assert nothing.size == 0


def test_a_refused_body_is_refused_again() -> None:
    seen = BodyCache()
    for content in ("hi", LONG):
        for body in (chat(content, cache_salt=""), chat(content, "b", cache_salt="")):
            assert [after(seen, body) for _ in range(3)] == [alone(body)] * 3
        assert after(seen, chat(content, "b", "c")) == alone(chat(content, "b", "c"))


TOOL_USE = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "data:"}}
ANTHROPIC = st.sampled_from(
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, TOOL_USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}, {"type": "text"}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}, {"type": "text", "text": "a"}]},
        {"role": "user", "content": [IMAGE]},
        {"role": "user", "content": []},
        {"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "f"}}]},
        {"role": "nobody", "content": "hi"},
    ]
)
SYSTEMS = st.sampled_from([{}, {"system": "s"}, {"system": "t"}, {"system": [{"type": "text", "text": "s"}]}])


Turns = list[tuple[int, list[dict[str, Any]], dict[str, Any], bool]]


def turns(items: st.SearchStrategy[dict[str, Any]], others: st.SearchStrategy[dict[str, Any]]) -> Any:
    """Turns that keep so many of the last one's messages, and add some; with other fields, before or after."""
    return st.lists(st.tuples(st.integers(1, 9), st.lists(items, max_size=3), others, st.booleans()), max_size=6)


def check_turns(decode: Any, key: str, turns: Turns, **fields: Any) -> None:
    """What is read of each turn is what is read of it alone."""
    seen = BodyCache()
    messages: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    for kept, more, others, first in turns:
        messages = [*messages[:kept], *more]
        known = {"model": "m"} | fields | {key: messages, "max_tokens": 5}
        body = json.dumps(others | known if first else known | others).encode()
        for _ in range(2):
            try:
                expected = decode(body)
            except RequestError as error:
                with pytest.raises(RequestError, match=re.escape(error.message)):
                    decode(body, (), seen)
                continue
            found = decode(body, (), seen)
            assert found == expected
            if found.prompt is not None:
                assert found.prompt.conversation.has_media == has_media(found.prompt.messages)
                earlier = found.prompt.conversation.shared
                assert earlier <= len(found.prompt.messages)


@settings(max_examples=200)
@given(turns(ANTHROPIC, SYSTEMS))
def test_anthropic_bodies_that_go_on(turns: Turns) -> None:
    check_turns(decode_messages, "messages", turns, tools=[{"name": "f", "input_schema": {}}])


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
ITEMS = st.sampled_from(
    [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "no"}], "status": "incomplete"},
        {"type": "reasoning", "content": [{"text": "hm"}]},
        CALL,
        CALL | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "5"},
        {"role": "system", "content": "s"},
        {"type": "item_reference", "id": "1"},
        {"messages": [], "input": [{}], "role": "user", "content": "hi"},
    ]
)
INSTRUCTIONS = st.sampled_from(
    [{}, {"instructions": "s"}, {"instructions": "t"}, {"messages": []}, {"input": [{"role": "user", "content": "x"}]}]
)


@settings(max_examples=200)
@given(turns(ITEMS, INSTRUCTIONS))
def test_responses_that_go_on(turns: Turns) -> None:
    check_turns(decode_responses, "input", turns)


def test_a_response_shares_what_no_item_can_change() -> None:
    seen = BodyCache()
    items: list[dict[str, Any]] = [{"role": "user", "content": LONG}]

    def shared(**fields: Any) -> int:
        body = json.dumps({"model": "m", "input": items} | fields).encode()
        assert decode_responses(body, (), seen) == decode_responses(body)
        prompt = decode_responses(body, (), seen).prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.conversation is not None
        return prompt.conversation.shared

    assert shared(instructions="s") == 0
    items.append({"role": "assistant", "content": "yes"})
    assert shared(instructions="s") == 2
    items.append(CALL)
    assert shared(instructions="s") == 2
    items.append({"type": "function_call_output", "call_id": "1", "output": "5"})
    assert shared(instructions="s") == 2
    items.append({"role": "user", "content": "hi"})
    assert shared(instructions="s") == 4
    assert shared(instructions="t") == 0
    text = json.dumps({"model": "m", "input": LONG}).encode()
    for _ in range(2):
        assert decode_responses(text, (), seen) == decode_responses(text)
    longer = json.dumps({"model": "m", "input": LONG + "more"}).encode()
    assert decode_responses(longer, (), seen) == decode_responses(longer)


def test_an_anthropic_conversation_shares_what_was_made_of_it() -> None:
    seen = BodyCache()
    result = {"type": "tool_result", "tool_use_id": "1", "content": "5"}
    turns: list[dict[str, Any]] = [{"role": "user", "content": [result, result, {"type": "text", "text": LONG}]}]

    def shared(**fields: Any) -> int:
        body = json.dumps({"model": "m", "messages": turns} | fields).encode()
        prompt = decode_messages(body, (), seen).prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.conversation is not None
        return prompt.conversation.shared

    assert shared(system="s") == 0
    turns.append({"role": "assistant", "content": "yes"})
    assert shared(system="s") == 4
    turns.append({"role": "user", "content": "hi"})
    assert shared(system="t") == 0
    turns.append({"role": "assistant", "content": "no"})
    assert shared(system="t") == 6
