"""Images, audio and video in a conversation: where they are, and what stands for them where their tokens are not known.

How many tokens an image is, and the name by which it takes part in the hashes of its blocks, only an engine can tell
(router/tokens/media_reader.py). Where none does, a prompt is matched exactly up to its first media item; beyond that
the router compares prompts with each other alone, and a text with the item's own content hash stands in its place.
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
    return bool(media_parts(messages))


def media_parts(messages: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The media of a conversation in their order, each with its type."""
    return [
        (part, kind)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and (kind := media_type(part)) is not None
    ]


def media_options(processor: Any, reading: Any) -> dict[str, Any] | None:
    """The fields of a body that change how media are processed, by their names in vLLM; None where there are none."""
    given = {"mm_processor_kwargs": processor, "media_io_kwargs": reading}
    return {name: value for name, value in given.items() if value is not None} or None


def is_fetched(part: dict[str, Any], kind: str) -> bool:
    """Whether a media part is a link, behind which may be something else another time."""
    content = _content(part, kind)
    return isinstance(content, str) and content.startswith(("http:", "https:"))


def _content(part: dict[str, Any], kind: str) -> Any:
    """What a media part is, without how closely to look at it."""
    content = part.get("image_url" if kind == "input_image" else kind, part.get("uuid"))
    return content.get("url", content.get("data", content)) if isinstance(content, dict) else content


def stand_in(part: dict[str, Any], kind: str) -> str:
    """A text for a media part: the same for the same URL or data, and no other text that is likely in a prompt."""
    content = _content(part, kind)
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
