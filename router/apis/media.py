"""Images, audio and video in a conversation: what stands for them where their tokens cannot be known.

How many tokens an image is, and the hash the engine mixes into the blocks it covers, only the engine can tell. So a
prompt is matched exactly up to its first media item. Beyond that, where the router compares prompts with each other
alone, a text with the item's own content hash stands in its place.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

# The types of parts that are media, and what a template calls them.
MODALITIES = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}


def media_type(part: dict[str, Any]) -> str | None:
    """The type of a part that is media: its `type`, or the key that tells it."""
    kind = part.get("type") or next((key for key in MODALITIES if key in part), None)
    return kind if isinstance(kind, str) and kind in MODALITIES else None


def has_media(messages: list[dict[str, Any]]) -> bool:
    """Whether a conversation has an image, a sound or a video in it."""
    return any(
        media_type(part) is not None
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict)
    )


def stand_in(part: dict[str, Any], kind: str) -> str:
    """A text for a media part: the same for the same URL or data, and no other text that is likely in a prompt."""
    key = "image_url" if kind == "input_image" else kind
    content = part.get(key, part.get("uuid"))
    if isinstance(content, dict):  # what it is, without how closely to look at it
        content = content.get("url", content.get("data", content))
    data = content.encode(errors="replace") if isinstance(content, str) else msgspec.json.encode(content)
    return f"\0{MODALITIES[kind]} {xxhash.xxh3_128_hexdigest(data)}\0"


def text_length(messages: list[dict[str, Any]]) -> int:
    """How many characters the contents of a conversation have, but for media."""
    length = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) and media_type(part) is None else part
            if isinstance(text, str):
                length += len(text)
    return length
