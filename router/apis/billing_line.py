"""Claude Code's billing line, which differs in every request and stands before the rest of the system prompt.

vLLM drops it from a prompt (`router/apis/messages.py`). An engine that keeps it computes the whole prompt of every turn
anew. `without_billing_line` drops it from a body; all other bytes stay as the client sent them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from router.apis.endpoints import ANTHROPIC, CHAT, RESPONSES
from router.apis.json_edit import field_span
from router.apis.messages import BILLING_HEADER

_QUOTED: Final = f'"{BILLING_HEADER}'.encode()
# The field with the system prompt, by the path of a request.
_FIELDS: Final = {ANTHROPIC: "system", CHAT: "messages", RESPONSES: "instructions"}
SYSTEM_ROLES: Final = ("system", "developer")
# The rest of the line inside a JSON string, with the escaped end of the line.
_LINE: Final = re.compile(r'(?:[^"\\]|\\(?!n|u000[aA])(?:u[0-9a-fA-F]{4}|.))*(\\n|\\u000[aA])?')
_decode = json.JSONDecoder().raw_decode
_SPACE: Final = re.compile(r"[ \t\n\r]*")


class _Span(NamedTuple):
    """The position of a value in a text, and the value."""

    start: int
    end: int
    value: Any


def has_billing_line(path: str, body: bytes) -> bool:
    """Return whether a body may have a billing line: cheap, and true for every body that has one."""
    return path in _FIELDS and _QUOTED in body


def without_billing_line(path: str, body: bytes) -> bytes | None:
    """Return a body without the billing line of its system prompt; None if it has none.

    A text of nothing else is dropped as a block. A plain string keeps its place, because a field must not vanish. In
    chats, the messages before the first one of another role are searched.
    """
    if not has_billing_line(path, body):
        return None
    try:
        start, end = field_span(body, _FIELDS[path]) or (0, 1)
        cuts = _cuts(path, body[start:end].decode("latin-1"))
    except (ValueError, IndexError, RecursionError):  # not JSON, or of another form
        return None
    for first, last in sorted(cuts, reverse=True):
        body = body[: start + first] + body[start + last :]
    return body if cuts else None


def _cuts(path: str, text: str) -> list[tuple[int, int]]:
    """Return the positions to cut out of the text of a field."""
    if path != CHAT:
        return _cuts_of_content(text, 0)
    cuts = []
    for message in _items(text, 0):
        if not isinstance(message.value, dict) or message.value.get("role") not in SYSTEM_ROLES:
            break
        content = _member(text, message, "content")
        cuts += [] if content is None else _cuts_of_content(text, content)
    return cuts


def _cuts_of_content(text: str, at: int) -> list[tuple[int, int]]:
    """Return the position to cut out of a content, a string or a list of blocks, which begins at `at`."""
    if text[at] == '"':
        return [cut] if (cut := _line(text, at)) else []
    blocks = list(_items(text, at))
    for number, block in enumerate(blocks):
        if isinstance(block.value, dict) and block.value.get("type") == "text":
            place = _member(text, block, "text")
        else:
            place = block.start if isinstance(block.value, str) else None
        cut = None if place is None or text[place] != '"' else _line(text, place)
        if cut is None:
            continue
        if text[cut[1]] != '"' or len(blocks) == 1:  # more text follows, or the list would be empty
            return [cut]
        if number + 1 < len(blocks):
            return [(block.start, blocks[number + 1].start)]
        return [(blocks[number - 1].end, block.end)]
    return []


def _line(text: str, at: int) -> tuple[int, int] | None:
    """Return the position of the billing line in the string that begins at `at`; None if it does not begin with it."""
    if not text.startswith(BILLING_HEADER, at + 1):
        return None
    found = _LINE.match(text, at + 1)
    return None if found is None else (at + 1, found.end())


def _items(text: str, at: int) -> Iterator[_Span]:
    """Yield the elements of a JSON array that begins at `at`; nothing if another value begins there."""
    if text[at] != "[":
        return
    at = _skip(text, at + 1)
    while text[at] != "]":
        value, end = _decode(text, at)
        yield _Span(at, end, value)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _member(text: str, of: _Span, name: str) -> int | None:
    """Return where the value of an object's member begins; of equal names the last. None if it is missing."""
    at, found = _skip(text, of.start + 1), None
    while text[at] != "}":
        key, at = _decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        if key == name:
            found = at
        at = _skip(text, _decode(text, at)[1])
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
