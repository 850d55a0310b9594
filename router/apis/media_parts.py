"""The parts of messages in the bodies of all APIs, and the number of media items among them.

An engine may have each item encoded, so a body's items are counted wherever an API has them: in messages, in results
of tools inside them, in inputs of embeddings and scores, and beside the prompt of SGLang's `/generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvevents.decoding import read_json
from router.apis.messages import MODALITIES

# The fields of a part or message with parts inside it.
_INSIDE: Final = ("content", "output")
# The names of media items: as a part's type, and as a field of a part.
_TYPES: Final = MODALITIES.keys() | {"image", "audio", "video", "document", "input_file", "input_video", "file"}
_FIELDS: Final = MODALITIES.keys() | {"image", "video"}
# How the name of a field with a list of items looks, escaped or not.
_LISTS: Final = (b'_data"', b"\\u00")


class MediaFields(msgspec.Struct):
    """The fields of a body with messages or other lists of parts."""

    messages: Any = None
    input: Any = None
    query: Any = None
    queries: Any = None
    documents: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None


class _AllFields(MediaFields):
    """Also the fields of SGLang's `/generate`, whose values are items: one, a list, or a list for each prompt."""

    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None


_OF_PROMPTS: Final = ("image_data", "audio_data", "video_data")


def parts_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every message and part in a list of messages, also those inside others, in no order."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            yield each
            left += [inner for name in _INSIDE if isinstance(inner := each.get(name), list)]


def media_items(body: bytes, most: int) -> int:
    """Return the number of media items in a JSON body; 0 if a quick count shows that there are at most `most`."""
    if body.count(b"{") <= most and not any(mark in body for mark in _LISTS):
        return 0  # each item is an object
    try:
        fields = read_json(body, _AllFields)
    except msgspec.DecodeError:
        return 0  # engines refuse it
    lists = [getattr(fields, name) for name in MediaFields.__struct_fields__]
    items = sum([_is_media(part) for part in parts_in(lists)])
    return items + sum([_leaves(getattr(fields, name)) for name in _OF_PROMPTS])


def _is_media(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return (
        (isinstance(kind, str) and kind in _TYPES)
        or not _FIELDS.isdisjoint(part)
        or isinstance(part.get("source"), dict)
    )


def _leaves(value: Any) -> int:
    """Return the number of values in lists of lists."""
    found, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif each is not None:
            found += 1
    return found
