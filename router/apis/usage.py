"""Token usage in responses: read from their last bytes, and requested for streams whose clients did not ask for it.

`usage` is near the end of a response: among the last fields of a JSON body, or in the last events of a stream. Only a
tail is kept, whatever the response's length and however it is split into chunks.

Most streams report no cached tokens unless the request asks for usage. So the router asks on the client's behalf and
removes the event of usage from what the client receives. A request with its own `stream_options` is not changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvevents.decoding import json_reader
from router.apis.json_edit import SpliceError, field, with_field
from router.http.headers import Headers

_TAIL_BYTES = 16 * 1024
_MAX_PIECES = 64
# Quotes inside a string are escaped, so `"usage"` without a backslash before it is a whole string: a key.
_KEY: Final = b'"usage"'
# The key of SGLang's `/generate`.
META_INFO: Final = b'"meta_info"'
_BACKSLASH: Final = 92
_MOST_BETWEEN: Final = 64  # bytes between a key and its object: a colon and white space
# The second row has the names of /v1/responses.
_NAMES = [
    ("prompt_tokens", "completion_tokens", "prompt_tokens_details"),
    ("input_tokens", "output_tokens", "input_tokens_details"),
]
_decode = json_reader(dict[str, Any])
_decode_beginning = json.JSONDecoder().raw_decode
_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_LONGEST_EVENT = 2**20  # bytes; a longer event is not usage


@dataclass(slots=True, init=False)
class Usage:
    """Tokens of a request as the engine counted them; None in `cached` means that the engine does not report it."""

    prompt: int
    completion: int
    cached: int | None

    def __init__(self, prompt: int, completion: int, cached: int | None) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached


class UsageTail:
    """The last bytes of a response that is being forwarded."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # at least the tail

    def feed(self, piece: bytes) -> None:
        """Add forwarded bytes."""
        self._pieces.append(piece if len(piece) <= _TAIL_BYTES else piece[-_TAIL_BYTES:])
        if len(self._pieces) > _MAX_PIECES:
            self._pieces = [self._joined()]

    def _joined(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)[-_TAIL_BYTES:]

    def usage(self) -> Usage | None:
        """Return the last usage in the response; None without one."""
        tail = self._joined()
        return self._last(tail, _KEY) or self._last(tail, META_INFO)

    def _last(self, tail: bytes, key: bytes) -> Usage | None:
        place = len(tail)
        while (place := tail.rfind(key, 0, place)) >= 0:
            start = _object_after(tail, place, key)
            if start < 0:
                continue
            try:
                usage = _object_at(tail, start)
            except (ValueError, RecursionError):
                continue
            if (read := _read(usage)) is not None:
                return read
        return None


def _object_after(tail: bytes, place: int, key: bytes) -> int:
    """Return where the object after a key begins; a negative number if it is no key or has no object."""
    after = place + len(key)
    if place and tail[place - 1] == _BACKSLASH:
        return -1
    if tail[after : after + 2] == b":{":  # the form that most engines write
        return after + 1
    start = tail.find(b"{", after, after + _MOST_BETWEEN)
    return start if start >= 0 and tail[after:start].strip() == b":" else -1


def _object_at(tail: bytes, start: int) -> dict[str, Any]:
    """Parse the JSON object that begins at `start` and ignore what follows it. Raises ValueError."""
    end = tail.find(b"}", start) + 1
    opened, closed = tail.count(b"{", start, end), 1
    while end and closed < opened:
        before, end = end, tail.find(b"}", end) + 1
        opened += tail.count(b"{", before, end)
        closed += 1
    if end:
        try:
            return _decode(tail[start:end])
        except msgspec.DecodeError:
            pass  # the object has braces in its strings, or invalid UTF-8
    usage: dict[str, Any]
    usage, _ = _decode_beginning(tail[start:].decode(errors="replace"))
    return usage


def _read(usage: dict[str, Any]) -> Usage | None:
    for prompt_tokens, completion_tokens, prompt_details in _NAMES:
        prompt = _count(usage.get(prompt_tokens))
        if prompt is not None:
            completion, details = _count(usage.get(completion_tokens)), usage.get(prompt_details)
            cached = _count((details if isinstance(details, dict) else usage).get("cached_tokens"))
            if "cache_read_input_tokens" in usage:  # Anthropic's input tokens exclude cached ones
                cached = _count(usage["cache_read_input_tokens"])
                prompt += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
            return Usage(prompt, completion or 0, cached)
    total = _count(usage.get("total_tokens"))  # all that rerankers report
    return None if total is None else Usage(total, 0, None)


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def with_include_usage(path: str, body: bytes) -> bytes | None:
    """Return a streamed request's body with usage requested; None if the request is not streamed or sets it itself."""
    if path not in _PATHS:
        return None
    try:
        if field(body, "stream") != b"true" or field(body, "stream_options") not in (None, b"null"):
            return None
        return with_field(body, "stream_options", b'{"include_usage":true}')
    except SpliceError:
        return None  # the parser of the body reports the error


class HiddenUsage:
    """A filter that removes the event of usage from a stream."""

    def __init__(self) -> None:
        self._begun = b""  # the beginning of an incomplete event

    @staticmethod
    def applies_to(headers: Headers) -> bool:
        """Return whether a response with these headers is a stream that can be edited."""
        known = dict(headers)
        is_events = known.get(b"content-type", b"").startswith(b"text/event-stream")
        return is_events and not {b"content-length", b"content-encoding"} & set(known)

    def can_forward(self, chunks: bytes) -> bool:
        """Return whether these HTTP chunks are complete events without usage, which need no filtering."""
        return not self._begun and chunks.find(b'"usage"') < 0 and chunks.endswith(b"\n\n\r\n")

    def filter(self, chunk: bytes, ended: bool) -> bytes:
        """Return the bytes to forward after `chunk` is received; `ended` says that it is the last chunk."""
        *events, self._begun = (self._begun + chunk).split(b"\n\n")
        passed = b"".join(event + b"\n\n" for event in events if not _is_usage(event))
        if ended or len(self._begun) > _LONGEST_EVENT:
            passed, self._begun = passed + self._begun, b""
        return passed


def _is_usage(event: bytes) -> bool:
    if b'"usage"' not in event or not event.lstrip().startswith(b"data:"):
        return False
    try:
        found = _decode(event.lstrip()[len(b"data:") :])
    except msgspec.DecodeError:
        return False
    return found.get("choices") == [] and isinstance(found.get("usage"), dict)
