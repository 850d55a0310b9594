"""Bodies that the first reader accepts and a second one may refuse: no second reader fails the request."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from router.apis.abilities import needed_abilities
from router.apis.endpoints import ANTHROPIC, CHAT, RESPONSES, read_request
from router.apis.media_items import media_chat
from router.apis.prompt_ids import is_plain_text, may_send_ids
from router.apis.requests import ChatPrompt, RoutedRequest
from router.apis.response_owners import asks_to_store
from router.apis.response_turns import Answer, ResponseTurns
from router.routing.disaggregation.bodies import answers_in, fields_of, prompts_in, value_of

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "hi", "previous_response_id": "resp_1"},
    ANTHROPIC: {"messages": [USER], "max_tokens": 5},
}
FIELDS = (
    *("tools", "tool_choice", "chat_template_kwargs", "stream_options", "thinking", "system", "metadata", "store"),
    *("rid", "prompt", "text", "input_ids", "n", "later", "instructions", "logit_bias"),
)
# JSON values that Python's decoder accepts, and msgspec refuses in part.
values = st.recursive(
    st.sampled_from(["1e400", "-1e999", "NaN", "Infinity", "null", "true", '"x"', '"\\ud800"', "1", "9" * 400]),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda each: f"[{','.join(each)}]")
        | inner.map(lambda each: f'{{"enable_thinking":{each}}}')
        | inner.map(lambda each: f'{{"type":"function","function":{{"name":"f","parameters":{{"x":{each}}}}}}}')
    ),
    max_leaves=4,
)


def body_of(path: str, fields: dict[str, str]) -> bytes:
    given = {name: json.dumps(value) for name, value in ({"model": "m"} | BODIES[path]).items()}
    return ("{" + ",".join(f'"{name}":{value}' for name, value in (given | fields).items()) + "}").encode()


def read_again(path: str, body: bytes, request: RoutedRequest) -> None:
    """Let every second reader read a body. Only an error that names the client's mistake is accepted."""
    if isinstance(chat := request.prompt, ChatPrompt):
        if may_send_ids(path, body, chat):
            is_plain_text(path, body, chat)
        turns = ResponseTurns()
        first = read_request("POST", RESPONSES, [], body_of(RESPONSES, {})).prompt
        assert isinstance(first, ChatPrompt)
        _, turn = turns.begin(first, None, True)
        assert turn is not None
        turns.remember(turn, Answer("resp_1", []))
        for keeps_items in (True, False):
            turns.begin(chat, "resp_1", keeps_items)
    media_chat(path, body)
    asks_to_store(body)
    needed_abilities(body)
    with suppress(RequestError):
        fields = fields_of(body)
        prompts_in(fields)
        answers_in(fields)
        value_of(fields, "rid")


@given(st.sampled_from(list(BODIES)), st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))
def test_no_second_reader_fails_a_body_that_the_first_one_accepts(path: str, fields: dict[str, str]) -> None:
    body = body_of(path, fields)
    try:
        request = read_request("POST", path, [], body)
    except RequestError:
        return
    read_again(path, body, request)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("value", ["1e400", '[{"x":1e400}]', '{"enable_thinking":1e400}'])
@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "thinking", "tool_choice", "rid", "prompt"])
def test_a_number_beyond_a_double_excludes_ids(path: str, field: str, value: str) -> None:
    body = body_of(path, {field: value})
    try:
        request = read_request("POST", path, [], body)
    except RequestError:
        return
    assert isinstance(request.prompt, ChatPrompt)
    assert not may_send_ids(path, body, request.prompt)
    read_again(path, body, request)
