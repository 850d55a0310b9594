"""The bodies of the routed endpoints, as clients send them, and what is said of the bad ones."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from http_api.errors import RequestError, error_body
from router.apis.endpoints import Decode
from router.apis.identities import Identity
from router.apis.openai_requests import decode_chat, decode_completion, decode_match
from router.apis.requests import ChatPrompt, MatchRequest, RoutedRequest, TextPrompts, TokenPrompts, Truncation

unhurried = settings(suppress_health_check=[HealthCheck.too_slow])

HELLO = {"role": "user", "content": "hello"}


def completion(**fields: Any) -> RoutedRequest:
    return decode_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode(), ())


def chat(**fields: Any) -> RoutedRequest:
    return decode_chat(json.dumps({"model": "m", "messages": [HELLO]} | fields).encode(), ())


def match(**fields: Any) -> MatchRequest:
    return decode_match(json.dumps({"model": "m"} | fields).encode())


def prompt_of_chat(**fields: Any) -> ChatPrompt:
    prompt = chat(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_options_are_read_and_have_defaults() -> None:
    assert chat() == RoutedRequest("m", ChatPrompt([HELLO]))
    assert completion() == RoutedRequest("m", TextPrompts(["hi"]), max_tokens=16)
    request = completion(
        stream=True,
        max_tokens=5,
        n=2,
        priority=-1,
        user="u",
        cache_salt="s",
        add_special_tokens=False,
        temperature=0.5,
    )
    prompt = TextPrompts(["hi"], add_special_tokens=False)
    assert request == RoutedRequest(
        "m", prompt, True, "s", max_tokens=5, answers=2, priority=-1, identity=Identity("u", by_user=True)
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", TextPrompts(["hi"])),
        (["a", "b"], TextPrompts(["a", "b"])),
        ([""], TextPrompts([""])),
        (["1", "2"], TextPrompts(["1", "2"])),
        ([5, 6], TokenPrompts([[5, 6]])),
        ([0, 2**32 - 1], TokenPrompts([[0, 2**32 - 1]])),
        ([[5], [6, 7]], TokenPrompts([[5], [6, 7]])),
        # vLLM reads these as token ids too.
        ([1, "2"], TokenPrompts([[1, 2]])),
        ([1.0, 2.0], TokenPrompts([[1, 2]])),
        ([["3"]], TokenPrompts([[3]])),
    ],
)
def test_the_forms_of_a_prompt(prompt: Any, expected: TextPrompts | TokenPrompts) -> None:
    assert completion(prompt=prompt).prompt == expected
    assert completion(prompt=None, prompt_embeds="UEsDBAAA").prompt == TokenPrompts([]), "embeddings have no tokens"


def test_chat_keeps_whole_messages_and_every_field_of_its_prompt() -> None:
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"title": "t", "text": "x"}],
        "reasoning_effort": "low",
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
    }
    prompt = prompt_of_chat(**fields, truncate_prompt_tokens=7, truncation_side="right")
    assert prompt == ChatPrompt([HELLO], **fields, truncation=Truncation(7, "right"))
    messages = [
        {"role": "wizard", "name": "merlin", "anything": {"deep": [1, None]}},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "user", "content": []},
        {"role": "user", "content": ["plain", {"type": "image_url", "image_url": {"url": "data:"}}, {"type": "new"}]},
    ]
    assert prompt_of_chat(messages=messages).messages == messages


def test_max_completion_tokens_precede_max_tokens_and_null_is_the_default() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=None).max_tokens == 5
    nothing = dict.fromkeys(["stream", "max_tokens", "n", "priority", "user", "cache_salt", "truncate_prompt_tokens"])
    assert completion(**nothing) == completion()
    assert chat(**nothing, tools=None, documents=None, add_generation_prompt=None) == chat()


def test_values_that_a_worker_refuses_are_the_defaults_and_numbers_may_be_strings() -> None:
    request = chat(stream="true", max_tokens="5", n="2", priority=1.0, add_generation_prompt="false")
    assert (request.streamed, request.max_tokens, request.answers, request.priority) == (True, 5, 2, 1)
    assert prompt_of_chat(add_generation_prompt="false").add_generation_prompt is False
    refused = chat(stream="perhaps", max_tokens="many", n=[], priority={}, user=5, tools="hammer", documents=1)
    assert refused == chat()
    assert prompt_of_chat(chat_template_kwargs=[], reasoning_effort=3, chat_template=4) == ChatPrompt([HELLO])


def test_truncation_to_the_whole_context_is_none() -> None:
    assert completion(truncate_prompt_tokens=-1).prompt == TextPrompts(["hi"])
    assert completion(truncate_prompt_tokens=0).prompt == TextPrompts(["hi"], truncation=Truncation(0, "left"))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": "hi", "x": NaN}',
        b'{"model": "m", "prompt": "hi", "x": 1e400}',
        b'\xef\xbb\xbf{"model": "m", "prompt": "hi"}',
        b'{"model": "m", "prompt": "no", "prompt": "hi"}',
        b' \r\n\t{"model":"m","prompt":"\\u0068i"}\n',
    ],
)
def test_json_accepted_by_engines_is_accepted(body: bytes) -> None:
    assert decode_completion(body).prompt == TextPrompts(["hi"])


COMPLETIONS, CHAT = DECODERS = decode_completion, decode_chat
BAD_BODIES: list[tuple[Decode, bytes, str | None, str]] = [
    (COMPLETIONS, b"", None, "not JSON"),
    (COMPLETIONS, b"{", None, "not JSON"),
    (COMPLETIONS, b'{"model": "m"} x', None, "Extra data"),
    (COMPLETIONS, b'{"model": "m", "prompt": "\xff"}', None, "UTF-8"),
    (COMPLETIONS, b'{"model": "m", "prompt": "\\ud800"}', None, "surrogates"),
    (COMPLETIONS, b'{"prompt":' + b"[" * 100_000, None, "not JSON"),
    (COMPLETIONS, b"[]", None, "The body is an empty list. Send one JSON object."),
    (COMPLETIONS, b'"hi"', None, "The body is a string."),
    (COMPLETIONS, b"null", None, "Send one JSON object."),
    (COMPLETIONS, b"{}", "model", "model is missing. Send the name of a served model."),
    (COMPLETIONS, b'{"model": ""}', "model", "an empty string"),
    (COMPLETIONS, b'{"model": null}', "model", "missing"),
    (CHAT, b'{"model": 5, "messages": []}', "model", "model is a number."),
    (COMPLETIONS, b'{"model": "m"}', "prompt", "prompt is missing. Send a string,"),
    (COMPLETIONS, b'{"model": "m", "prompt": ""}', "prompt", "an empty string"),
    (COMPLETIONS, b'{"model": "m", "prompt": 5}', "prompt", "prompt is a number."),
    (COMPLETIONS, b'{"model": "m", "prompt": true}', "prompt", "a boolean"),
    (COMPLETIONS, b'{"model": "m", "prompt": {"text": "a"}}', "prompt", "an object"),
    (COMPLETIONS, b'{"model": "m", "prompt": []}', "prompt", "an empty list"),
    (COMPLETIONS, b'{"model": "m", "prompt": [1, "x"]}', "prompt", "a list of numbers and strings"),
    (COMPLETIONS, b'{"model": "m", "prompt": [[1], "x"]}', "prompt", "a list of lists and strings"),
    (COMPLETIONS, b'{"model": "m", "prompt": [null]}', "prompt", "a list of nulls"),
    (COMPLETIONS, b'{"model": "m", "prompt": [1.5]}', "prompt", "a list of numbers"),
    (COMPLETIONS, b'{"model": "m", "prompt": [{}]}', "prompt", "a list of objects"),
    (COMPLETIONS, b'{"model": "m", "prompt": [[]]}', "prompt[0]", "an empty list"),
    (COMPLETIONS, b'{"model": "m", "prompt": [[1], ["x"]]}', "prompt[1]", "a list of strings"),
    (COMPLETIONS, b'{"model": "m", "prompt": [1, -1]}', "prompt", "prompt[1] is -1. Send token ids from 0 to"),
    (COMPLETIONS, b'{"model": "m", "prompt": [[1], [4294967296]]}', "prompt[1]", "prompt[1][0] is 4294967296"),
    (COMPLETIONS, b'{"model": "m", "prompt": "a", "cache_salt": ""}', "cache_salt", "an empty string"),
    (COMPLETIONS, b'{"model": "m", "prompt": "a", "cache_salt": 5}', "cache_salt", "cache_salt is a number"),
    (CHAT, b'{"model": "m"}', "messages", "messages is missing. Send a list of messages"),
    (CHAT, b'{"model": "m", "prompt": "hi"}', "messages", "missing"),
    (CHAT, b'{"model": "m", "messages": []}', "messages", "an empty list"),
    (CHAT, b'{"model": "m", "messages": "hi"}', "messages", "a string"),
    (CHAT, b'{"model": "m", "messages": ["hi"]}', "messages[0]", "messages[0] is a string"),
    (CHAT, b'{"model": "m", "messages": [{"content": "a"}]}', "messages[0].role", "missing"),
    (CHAT, b'{"model": "m", "messages": [{"role": 5}]}', "messages[0].role", "a number"),
    (CHAT, b'{"model": "m", "messages": [{"role": "user", "content": 5}]}', "messages[0].content", "a number"),
    (CHAT, b'{"model": "m", "messages": [{"role": "user", "content": {}}]}', "messages[0].content", "an object"),
    (CHAT, b'{"model": "m", "messages": [{"role": "a", "content": ["", 5]}]}', "messages[0].content[1]", "a number"),
]


@pytest.mark.parametrize(("decode", "body", "param", "phrase"), BAD_BODIES)
def test_a_bad_body_is_explained(decode: Decode, body: bytes, param: str | None, phrase: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode(body, ())
    error = caught.value
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert phrase in error.message


@unhurried
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_body_raises_anything_else(body: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(RequestError):
            decode(body, ())


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["stream", "prompt", "prompt_embeds", "messages", "tools", "chat_template_kwargs", "truncate_prompt_tokens"]
FIELDS += ["max_tokens", "n", "user"]


@unhurried
@given(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON), st.sampled_from(DECODERS))
def test_any_values_are_read_or_explained(fields: dict[str, Any], decode: Decode) -> None:
    with contextlib.suppress(RequestError):
        assert decode(json.dumps({"model": "m"} | fields).encode(), ()).name == "m"


@unhurried
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_token_ids_arrive_unchanged(token_ids: list[int]) -> None:
    assert completion(prompt=token_ids).prompt == TokenPrompts([token_ids])


def test_a_match_by_token_ids_text_or_messages() -> None:
    assert match(token_ids=[1, 2]) == MatchRequest("m", TokenPrompts([[1, 2]], param="token_ids"))
    assert match(prompt="hi") == MatchRequest("m", TextPrompts(["hi"]))
    assert match(messages=[HELLO], add_generation_prompt=False) == MatchRequest(
        "m", ChatPrompt([HELLO], add_generation_prompt=False)
    )
    assert match(prompt="hi", lora_name="l", cache_salt="s", tenant_id="t") == MatchRequest(
        "m", TextPrompts(["hi"]), lora_name="l", cache_salt="s", tenant_id="t"
    )


@pytest.mark.parametrize(
    ("fields", "param", "phrase"),
    [
        ({}, "prompt", "Found no prompt. Send exactly one of token_ids, prompt and messages."),
        ({"prompt": "a", "messages": [HELLO]}, "prompt", "Found prompt and messages."),
        ({"token_ids": [1], "prompt": "a"}, "token_ids", "exactly one"),
        ({"token_ids": []}, "token_ids", "an empty list"),
        ({"token_ids": "1"}, "token_ids", "a string"),
        ({"token_ids": [-1]}, "token_ids", "token_ids[0] is -1"),
        ({"token_ids": [[1]]}, "token_ids", "a list of lists. Send a list of token ids."),
        ({"messages": [{}]}, "messages[0].role", "missing"),
        ({"prompt": "a", "lora_name": ""}, "lora_name", "an empty string"),
        ({"prompt": "a", "cache_salt": []}, "cache_salt", "an empty list"),
        ({"prompt": "a", "tenant_id": 7}, "tenant_id", "a number"),
        ({"prompt": "a", "model": None}, "model", "missing"),
    ],
)
def test_a_bad_match_is_explained(fields: dict[str, Any], param: str, phrase: str) -> None:
    with pytest.raises(RequestError) as caught:
        match(**fields)
    assert caught.value.param == param
    assert phrase in caught.value.message


def test_the_error_body_is_openais() -> None:
    error = RequestError("Say which.", status=404, type="not_found_error", param="model", code="model_not_found")
    assert json.loads(error_body(error)) == {
        "error": {"message": "Say which.", "type": "not_found_error", "param": "model", "code": "model_not_found"}
    }
    assert json.loads(error_body(RequestError("Bad.")))["error"]["param"] is None
