"""The number of media items in the bodies of all APIs, and the limit on them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from router.apis.media_items import media_chat
from router.apis.media_parts import media_items
from router.auth.bodies import BodyCheck
from router.auth.routes import Routes
from router.settings import EngineFields, LimitSettings

MOST = 3
IMAGE = {"type": "image_url", "image_url": {"url": "http://a/1"}}
SHOWN = {"type": "input_image", "image_url": "http://a/1"}
SOURCE = {"type": "image", "source": {"type": "url", "url": "http://a/1"}}


def messages(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": "x"}, *parts]}]


# For each API: the path, and a body with as many items as asked for.
BODIES = {
    "chat": ("/v1/chat/completions", lambda count: {"messages": messages(*[IMAGE] * count)}),
    "chat, one a message": ("/v1/chat/completions", lambda count: {"messages": messages(IMAGE) * count}),
    "chat, only keys": ("/v1/chat/completions", lambda count: {"messages": messages(*[{"audio_url": "x"}] * count)}),
    "chat, no keys": ("/v1/chat/completions", lambda count: {"messages": messages(*[{"type": "video_url"}] * count)}),
    "chat, names alone": (
        "/v1/chat/completions",
        lambda count: {"messages": messages(*[{"image_url": None, "uuid": str(each)} for each in range(count)])},
    ),
    "result of a tool": ("/v1/chat/completions", lambda count: {"messages": messages(*[IMAGE] * count, role="tool")}),
    "Anthropic": ("/v1/messages", lambda count: {"messages": messages(*[SOURCE] * count)}),
    "Anthropic, count": ("/v1/messages/count_tokens", lambda count: {"messages": messages(*[SOURCE] * count)}),
    "Anthropic, result of a tool": (
        "/v1/messages",
        lambda count: {"messages": messages({"type": "tool_result", "content": [SOURCE] * count})},
    ),
    "Responses": ("/v1/responses", lambda count: {"input": messages(*[SHOWN] * count)}),
    "Responses, result of a tool": (
        "/v1/responses",
        lambda count: {"input": [{"type": "function_call_output", "call_id": "a", "output": [SHOWN] * count}]},
    ),
    "generate": ("/generate", lambda count: {"text": "x", "image_data": ["http://a/1"] * count}),
    "generate, lists": ("/generate", lambda count: {"text": ["x"], "video_data": [["http://a/1"]] * count}),
    "embeddings": ("/v1/embeddings", lambda count: {"messages": messages(*[IMAGE] * count)}),
    "embeddings, inputs": ("/v1/embeddings", lambda count: {"input": [{"text": "x", "image": "http://a/1"}] * count}),
    "score": ("/v1/score", lambda count: {"text_1": "x", "text_2": {"content": [IMAGE] * count}}),
}


def checked(path: str, body: bytes) -> bytes:
    check = BodyCheck(LimitSettings(media_items=MOST))
    return check.checked(Routes().find("POST", path), b"", body, None, EngineFields.REFUSE)[0]


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("api", BODIES)
def test_request_with_too_many_media_items_is_refused(api: str, escaped: bool) -> None:
    path, body_with = BODIES[api]

    def body(count: int) -> bytes:
        body = json.dumps({"model": "m", **body_with(count)}).encode()
        return body.replace(b"image", b"\\u0069mage").replace(b"_data", b"\\u005fdata") if escaped else body

    assert checked(path, body(MOST)) == body(MOST)
    with pytest.raises(RequestError, match=r"4 images.* at most 3.* limits\.media_items") as refusal:
        checked(path, body(MOST + 1))
    assert (refusal.value.status, refusal.value.code) == (400, "too_many_media")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"parameters": {"properties": {"image_url": {}}}}}] * 9},
        {"messages": [{"role": "user", "content": '"image_url"'}] * 9},
        {"messages": [{"role": "assistant", "content": "x", "audio": None, "tool_calls": [{"image": "x"}]}] * 9},
        {"text": "x", "image_data": None, "video_data": [None] * 9},
    ],
)
def test_other_values_are_no_media_items(fields: dict[str, Any]) -> None:
    path = "/generate" if "text" in fields else "/v1/chat/completions"
    assert checked(path, json.dumps({"model": "m", "messages": messages(), **fields}).encode())


parts = st.recursive(
    st.sampled_from([IMAGE, SHOWN, {"image_url": "x"}, {"type": "input_audio"}, {"type": "text", "text": "x"}, "x"]),
    lambda inner: st.fixed_dictionaries({"type": st.just("tool_result"), "content": st.lists(inner, max_size=3)}),
)


@given(st.lists(st.lists(parts, max_size=4), max_size=4))
def test_no_chat_has_more_items_than_are_counted(contents: list[list[Any]]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": content} for content in contents]}).encode()
    chat = media_chat("/v1/chat/completions", body)
    found = media_items(body, 0)
    assert found >= (chat.total if chat is not None else 0)
    assert all(media_items(body, most) == found for most in range(found))
