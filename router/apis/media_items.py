"""The media items of a chat, as the requests to encode workers carry them: with the client's own bytes."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from kvevents.decoding import read_json
from router.apis.endpoints import CHAT
from router.apis.messages import media_content, media_type

# The types of parts that engines encode. The others, such as `image_embeds`, are encoded already.
_ENCODED: Final = frozenset({"image_url", "input_image", "input_audio", "audio_url", "video_url"})
_MARKS: Final = tuple(f'"{kind}"'.encode() for kind in sorted(_ENCODED))
# The fields of a chat that change how engines process its media.
_OPTIONS: Final = ("mm_processor_kwargs", "media_io_kwargs")


class _Message(msgspec.Struct):
    content: str | list[msgspec.Raw] | None = None


class _Chat(msgspec.Struct):
    messages: list[_Message]
    mm_processor_kwargs: msgspec.Raw = msgspec.Raw(b"null")
    media_io_kwargs: msgspec.Raw = msgspec.Raw(b"null")


class _ReadMessage(msgspec.Struct):
    content: Any = None


class _ReadChat(msgspec.Struct):
    messages: list[_ReadMessage]


class MediaItem(NamedTuple):
    """One media item of a chat.

    - `key`: the hash of its data, or of its URL if its data are elsewhere.
    - `part`: the part of a message, as the client sent it.
    - `places`: its positions among all media of the chat; several if the chat repeats it.
    """

    key: int
    part: bytes
    places: list[int]


class MediaChat(NamedTuple):
    """The different media items of a chat.

    - `total`: the number of all its media.
    - `options`: the fields that change how engines process them, in JSON, each after a comma.
    """

    items: list[MediaItem]
    total: int
    options: bytes

    def request(self, item: MediaItem, model: str) -> bytes:
        """Return the chat that makes an engine encode an item: the item alone, and one token."""
        return b'{"model":%b,"messages":[{"role":"user","content":[%b]}],"max_tokens":1,"stream":false%b}' % (
            msgspec.json.encode(model),
            item.part,
            self.options,
        )


def may_have_media(path: str, body: bytes) -> bool:
    """Return whether a quick look finds a media item in a chat's body."""
    return path == CHAT and any(mark in body for mark in _MARKS)


def media_chat(path: str, body: bytes) -> MediaChat | None:
    """Return the media items of a chat's body; None without any, and for a body that workers refuse."""
    if not may_have_media(path, body):
        return None
    try:
        chat = read_json(body, _Chat)
        # One more call reads all parts: a call for each part would take most of the time.
        items, count = _distinct(chat.messages, read_json(body, _ReadChat).messages)
    except msgspec.DecodeError:
        return None
    given = ((name, bytes(getattr(chat, name))) for name in _OPTIONS)
    options = b"".join(b',"%b":%b' % (name.encode(), value) for name, value in given if value != b"null")
    return MediaChat(items, count, options) if items else None


def _distinct(messages: list[_Message], read: list[_ReadMessage]) -> tuple[list[MediaItem], int]:
    """Return the items of messages, equal ones once, and the number of all media. `read`: the messages' values."""
    found: dict[tuple[str, int, object], MediaItem] = {}
    count = 0
    for message, values in zip(messages, read, strict=True):
        if not isinstance(message.content, list):
            continue
        for raw, part in zip(message.content, values.content, strict=True):
            kind = media_type(part) if type(part) is dict and part else None
            if kind is None:
                continue
            if kind in _ENCODED:
                key = _hash(media_content(part, kind))
                uuid = part.get("uuid")  # the engine's name for the item
                item = found.setdefault((kind, key, str(uuid)), MediaItem(key, bytes(raw), []))
                item.places.append(count)
            count += 1
    return list(found.values()), count


def _hash(content: object) -> int:
    """Return the hash of a media item's URL, or of the data in it."""
    if not isinstance(content, str):
        return xxh3_64_intdigest(msgspec.json.encode(content))
    data = content.partition(",")[2] if content.startswith("data:") else content
    return xxh3_64_intdigest(data.encode())
