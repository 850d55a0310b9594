"""The parts of messages in the bodies of all APIs, and the number of media items among them.

An engine may have each item encoded, so a body's items are counted wherever an API has them: in messages, in results
of tools inside them, in inputs of embeddings and scores, and beside the prompt of SGLang's `/generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvevents.decoding import read_json
from router.apis.body_fields import AllMediaFields, MediaFields
from router.apis.messages import MODALITIES

# The fields of a part or message with parts inside it.
_INSIDE: Final = ("content", "output")
# The names of media items: as a part's type, and as a field of a part.
_TYPES: Final = MODALITIES.keys() | {"image", "audio", "video", "document", "input_file", "input_video", "file"}
_FIELDS: Final = MODALITIES.keys() | {"image", "video"}
# Bytes of which each item has one, and how the name of a field with a list of items looks, unless they are escaped.
_MARKS: Final = (b"image", b"audio", b"video", b'file"', b'"document"', b'"source"')
_LIST: Final = b'_data"'
_ESCAPED: Final = b"\\u00"
# The fields of messages and other lists of parts, and those whose values are items.
_OF_PARTS: Final = MediaFields.__struct_fields__
_OF_ITEMS: Final = tuple(name for name in AllMediaFields.__struct_fields__ if name not in _OF_PARTS)


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
    plain = _LIST not in body and _ESCAPED not in body
    # Each item is an object, and has a mark.
    if plain and (body.count(b"{") <= most or sum([body.count(mark) for mark in _MARKS]) <= most):
        return 0
    try:
        fields = read_json(body, AllMediaFields)
    except msgspec.DecodeError:
        return 0  # engines refuse it
    items = sum([_leaves(getattr(fields, name)) for name in _OF_ITEMS])
    return items + sum(map(_is_media, parts_in([getattr(fields, name) for name in _OF_PARTS])))


def _is_media(part: dict[str, Any]) -> bool:
    """Return whether a message or part is a media item."""
    for name, value in part.items():
        if name == "type":
            if isinstance(value, str) and value in _TYPES:
                return True
        elif name in _FIELDS or (name == "source" and isinstance(value, dict)):
            return True
    return False


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
