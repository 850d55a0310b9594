"""The chat that `/v1/messages` makes of its blocks, as vLLM makes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from http_api.errors import RequestError
from router.apis.anthropic_messages import anthropic_error_body, decode_messages
from router.apis.identities import Identity
from router.apis.requests import ChatPrompt, RoutedRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "weather", "description": "Says it", "input_schema": {"properties": {}}}


def messages(**fields: Any) -> RoutedRequest:
    return decode_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": [USER]} | fields).encode())


def prompt(**fields: Any) -> ChatPrompt:
    made = messages(**fields).prompt
    assert isinstance(made, ChatPrompt)
    return made


def said(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return prompt(messages=list(given)).messages


def test_a_message_with_its_options() -> None:
    request = messages(stream=True, cache_salt="s", metadata={"user_id": "u"})
    assert request == RoutedRequest(
        "m", ChatPrompt([USER], merges_system=True), True, "s", max_tokens=9, identity=Identity("u", by_user=True)
    )
    assert prompt(thinking={"type": "disabled"}).thinking_off
    assert not prompt(thinking={"type": "enabled", "budget_tokens": 1024}).thinking_off
    assert prompt(output_config={"effort": "low"}).reasoning_effort == "low"


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.",
        [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {}}],
        [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}],
    ],
)
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    assert prompt(system=system).messages == [{"role": "system", "content": "Be brief."}, USER]
    assert prompt(system=type(system)()).messages == [USER]


LINKED = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}


def test_images_stay_in_their_message_and_follow_tool_results() -> None:
    text = {"type": "text", "text": "one"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    image_url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert said({"role": "user", "content": [text]}) == [{"role": "user", "content": "one"}]
    made = said({"role": "user", "content": [text, image, LINKED]})
    assert made == [{"role": "user", "content": [text, image_url, IMAGE_URL]}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [LINKED]}
    assert said({"role": "user", "content": [result]}) == [
        {"role": "tool", "tool_call_id": "t", "content": ""},
        {"role": "user", "content": [IMAGE_URL]},
    ]


def test_tools_are_used_and_give_results() -> None:
    asked = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}},
    ]
    answered = [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "sun"}]},
        {"type": "tool_result", "tool_use_id": "u", "content": "rain"},
        {"type": "text", "text": "So?"},
    ]
    call = {"id": "t", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert said({"role": "assistant", "content": asked}, {"role": "user", "content": answered}) == [
        {"role": "assistant", "reasoning": "hm", "tool_calls": [call], "content": "Looking."},
        {"role": "tool", "tool_call_id": "t", "content": "sun"},
        {"role": "tool", "tool_call_id": "u", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]


def test_tools_have_a_schema_of_an_object() -> None:
    parameters = {"properties": {}, "type": "object"}
    function = {"name": "weather", "description": "Says it", "parameters": parameters}
    assert prompt(tools=[TOOL]).tools == [
        {"type": "function", "function": function | {"strict": None, "defer_loading": None}}
    ]


def test_tools_come_and_go_within_a_conversation() -> None:
    def changed(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    named = {"type": "tool_reference", "name": "weather"}
    added = changed("tool_addition", {"type": "tool_definition", "definition": TOOL | {"name": "clock"}})
    tools = prompt(tools=[TOOL], messages=[USER, changed("tool_removal", named), added]).tools
    assert [tool["function"]["name"] for tool in tools] == ["clock"]
    deferred = TOOL | {"defer_loading": True}
    tools = prompt(tools=[deferred], messages=[USER, changed("tool_addition", named)]).tools
    assert tools[0]["function"]["defer_loading"] is None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_are_told_as_anthropic_does(status: int, kind: str) -> None:
    body = json.loads(anthropic_error_body(RequestError("No.", status=status)))
    assert body == {"type": "error", "error": {"type": kind, "message": "No."}}
