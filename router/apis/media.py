"""Images, audio and video in a conversation: where they are, and placeholders for unknown tokens.

Only an engine knows how many tokens an image has, and by which name it takes part in the hashes of its blocks
(router/tokens/media_reader.py). Where no engine can be asked, a prompt is matched exactly up to its first media item.
Beyond it, prompts are compared with each other only, and a text with the item's content hash replaces the item.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

# The types of media parts, and their names in templates.
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
    """Return the media type of a part, from its `type` or its key; None if it is no media."""
    kind = part.get("type") or next((key for key in MODALITIES if key in part), None)
    return kind if isinstance(kind, str) and kind in MODALITIES else None


def has_media(messages: list[dict[str, Any]]) -> bool:
    """Return whether a conversation has images, audio or video."""
    return bool(media_parts(messages))


def media_parts(messages: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Return the media parts of a conversation in order, each with its type."""
    return [
        (part, kind)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and (kind := media_type(part)) is not None
    ]


def media_options(processor: Any, reading: Any) -> dict[str, Any] | None:
    """Return the body's fields that change how media are processed, by vLLM's names; None without one."""
    given = {"mm_processor_kwargs": processor, "media_io_kwargs": reading}
    return {name: value for name, value in given.items() if value is not None} or None


def is_fetched(part: dict[str, Any], kind: str) -> bool:
    """Return whether a media part is a link, whose content can change."""
    content = _content(part, kind)
    return isinstance(content, str) and content.startswith(("http:", "https:"))


def _content(part: dict[str, Any], kind: str) -> Any:
    """Return the URL or data of a media part, without options such as the level of detail."""
    content = part.get("image_url" if kind == "input_image" else kind, part.get("uuid"))
    return content.get("url", content.get("data", content)) if isinstance(content, dict) else content


def stand_in(part: dict[str, Any], kind: str) -> str:
    """Return a text that replaces a media part: equal for equal URLs or data, and unlikely in a prompt."""
    content = _content(part, kind)
    data = content.encode(errors="replace") if isinstance(content, str) else msgspec.json.encode(content)
    return f"\0{MODALITIES[kind]} {xxhash.xxh3_128_hexdigest(data)}\0"


def media_length(messages: list[dict[str, Any]]) -> int:
    """Return the number of characters in the URLs and data of a conversation's media."""
    contents = (_content(part, kind) for part, kind in media_parts(messages))
    return sum(len(content) for content in contents if isinstance(content, str))
