"""What an answer says of its tokens, read from its last bytes while they pass.

`usage` stands near the end of an answer: last but for a few fields in a body of JSON, in the last events of a stream.
So only a tail is kept, whatever the length of the answer and however it came in pieces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import msgspec

_TAIL_BYTES = 16 * 1024
_MAX_PIECES = 64
# Quotes inside a string are escaped, so `"usage"` without a backslash before it is a string of its own: a key.
_KEY: Final = b'"usage"'
_BACKSLASH: Final = 92
_MOST_BETWEEN: Final = 64  # bytes from a key to its object: a colon and white space
# The second are those of /v1/responses.
_NAMES = [
    ("prompt_tokens", "completion_tokens", "prompt_tokens_details"),
    ("input_tokens", "output_tokens", "input_tokens_details"),
]
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_decode_beginning = json.JSONDecoder().raw_decode


@dataclass(slots=True, init=False)
class Usage:
    """Tokens as the engine counted them. `cached`: None when it does not say."""

    prompt: int
    completion: int
    cached: int | None

    def __init__(self, prompt: int, completion: int, cached: int | None) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached


class UsageTail:
    """The last bytes of an answer that passes."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # together at least the tail

    def feed(self, piece: bytes) -> None:
        """Bytes that were sent on."""
        self._pieces.append(piece if len(piece) <= _TAIL_BYTES else piece[-_TAIL_BYTES:])
        if len(self._pieces) > _MAX_PIECES:
            self._pieces = [self._joined()]

    def _joined(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)[-_TAIL_BYTES:]

    def usage(self) -> Usage | None:
        """The last usage that the answer told."""
        tail = self._joined()
        place = len(tail)
        while (place := tail.rfind(_KEY, 0, place)) >= 0:
            start = _object_after(tail, place)
            if start < 0:
                continue
            try:
                usage = _object_at(tail, start)
            except (ValueError, RecursionError):
                continue
            if (read := _read(usage)) is not None:
                return read
        return None


def _object_after(tail: bytes, place: int) -> int:
    """Where the object begins that the key at a place stands for; below 0 when it is no key, or stands for none."""
    after = place + len(_KEY)
    if place and tail[place - 1] == _BACKSLASH:
        return -1
    if tail[after : after + 2] == b":{":  # as most engines write it
        return after + 1
    start = tail.find(b"{", after, after + _MOST_BETWEEN)
    return start if start >= 0 and tail[after:start].strip() == b":" else -1


def _object_at(tail: bytes, start: int) -> dict[str, Any]:
    """The JSON object that begins there, whatever follows it. Raises ValueError."""
    end = tail.find(b"}", start) + 1
    opened, closed = tail.count(b"{", start, end), 1
    while end and closed < opened:
        before, end = end, tail.find(b"}", end) + 1
        opened += tail.count(b"{", before, end)
        closed += 1
    if end:
        try:
            return _decode(tail[start:end])  # no other end would do, if this is one
        except (msgspec.DecodeError, ValueError):
            pass  # braces in its strings, or bytes that are no text
    usage: dict[str, Any]
    usage, _ = _decode_beginning(tail[start:].decode(errors="replace"))
    return usage


def _read(usage: dict[str, Any]) -> Usage | None:
    for prompt_tokens, completion_tokens, prompt_details in _NAMES:
        prompt = _count(usage.get(prompt_tokens))
        if prompt is not None:
            completion, details = _count(usage.get(completion_tokens)), usage.get(prompt_details)
            cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
            if "cache_read_input_tokens" in usage:  # Anthropic's: what was cached is not among the input
                cached = _count(usage["cache_read_input_tokens"])
                prompt += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
            return Usage(prompt, completion or 0, cached)
    return None


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
