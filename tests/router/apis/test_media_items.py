"""The media items of a chat's body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.apis.endpoints import CHAT, COMPLETIONS
from router.apis.media_items import media_chat


def body(*parts: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}).encode()


def image(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **options}


def test_item_is_kept_as_it_was_sent() -> None:
    part = b'{ "type" : "video_url", "video_url": {"url":"http:\\/\\/v\\/1"}, "detail": 1e2 }'
    chat = media_chat(
        CHAT, b'{"messages":[{"content":"x"},{"content":["t", %b]}], "media_io_kwargs": {"fps":  2}}' % part
    )
    assert chat is not None
    assert chat.request(chat.items[0], 'a "b"') == (
        b'{"model":"a \\"b\\"","messages":[{"role":"user","content":[%b]}],"max_tokens":1,"stream":false,'
        b'"media_io_kwargs":{"fps":  2}}' % part
    )


def test_equal_items_are_one_with_all_places() -> None:
    embeds = {"type": "image_embeds", "image_embeds": "…"}
    data = "data:image/png;base64,aGVsbG8="
    chat = media_chat(CHAT, body(image("http://a/1"), embeds, image(data), image("http://a/1"), image(data, uuid="u")))
    assert chat is not None
    assert (chat.total, [item.places for item in chat.items]) == (5, [[0, 3], [2], [4]])
    assert chat.items[1].key == chat.items[2].key  # two names of the same data


def test_data_are_equal_however_their_type_is_declared() -> None:
    chats = [media_chat(CHAT, body(image(f"data:{kind};base64,aGVsbG8="))) for kind in ("image/png", "image/jpeg")]
    one, other = (chat.items[0].key for chat in chats if chat is not None)
    assert one == other


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "http://a/1"}},
        {"image_url": "http://a/1"},
        {"type": "image_url", "image_url": None, "uuid": "u"},
        {"type": "image_url", "image_url": {"url": 5}},
    ],
)
def test_every_kind_of_item_is_found(part: dict[str, Any]) -> None:
    chat = media_chat(CHAT, body({"type": "text", "text": "x"}, part))
    assert chat is not None
    assert [json.loads(item.part) for item in chat.items] == [part]


@pytest.mark.parametrize(
    "given",
    [
        body({"type": "text", "text": '"image_url"'}),
        body({"type": "text", "text": "x"}, image="image_url"),
        b'{"messages": [{"content": 5}], "x": "image_url"}',
        b'{"messages": "image_url", "x": "image_url"}',
        b'{"x": "image_url"}',
        b'["image_url"',
    ],
)
def test_other_bodies_have_none(given: bytes) -> None:
    assert media_chat(CHAT, given) is None


def test_only_chats_have_items() -> None:
    assert media_chat(COMPLETIONS, body(image("http://a/1"))) is None
