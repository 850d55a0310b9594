"""Bodies of chats that were seen before: of a conversation's next turn only what is new is decoded.

A body that has the bytes of a known one up to the end of one of its messages means the same up to there, since JSON is
read from its first byte to its last: the same fields before the messages, and the same messages. The rest is decoded as
if the messages began with it. Where that is not sure to come to the same as decoding all of it, all of it is decoded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from router.apis.body_fields import OWN_KEY, RawInput, RawMessages, RawRest
from router.apis.fields import read_body
from router.apis.media import has_media
from router.apis.prefix_cache import PrefixCache, common_places
from router.apis.requests import Conversation, RoutedRequest

# Of shorter bodies only the same are looked for: the rest is decoded sooner.
MIN_BYTES = 4096
CACHE_BYTES = 64 * 2**20
# The part of it that is for those.
_SHORT_PART = 8
# What a short body's objects take: some for each, and so many times its bytes.
_OBJECTS_BYTES = 4000
_TIMES_BYTES = 4

F = TypeVar("F", bound=msgspec.Struct)
# Raises RequestError for the fields of a body that cannot be routed. The first so many messages are known to be right.
Check = Callable[[F, int], None]


class ReadBody:
    """What was read from a body: its `fields`, of whose messages the first `shared` are those of an earlier body.

    And what was made of that: its `conversation`, and the `request`. `made`: where the chat's messages are others than
    the body's, how many of those the body's first ones make, for each number of them.
    """

    def __init__(self, fields: Any, shared: int = 0) -> None:
        self.fields = fields
        self.shared = shared
        self.conversation: Conversation | None = None
        self.request: RoutedRequest | None = None
        self.made: list[int] = []


def conversation_of(messages: list[dict[str, Any]], shared: int, earlier: ReadBody | None) -> Conversation:
    """What is known of a chat, whose first `shared` messages are those of an earlier one."""
    known = earlier.conversation if earlier is not None and shared else None
    if known is None:
        return Conversation(has_media(messages))
    return Conversation(has_media(messages if known.has_media else messages[shared:]), shared, known.rendering)


def again(request: RoutedRequest, session: str | None) -> RoutedRequest:
    """The request of a body that came again, with what its headers say this time."""
    return request if session == request.session else replace(request, session=session)


class _KnownBody(ReadBody):
    """A body whose messages are all right, and what was read from it.

    `before`: the fields that come before the messages. `ends`: where in it the messages end, as far as that is known:
    those it shares with an earlier body, or `all_ends`. `weights`: what the first messages take, so many, in bytes;
    `others`: likewise the other fields.
    """

    def __init__(
        self,
        whole: bytes,
        fields: Any,
        messages: list[Any],
        others: int,
        weights: list[int],
        before: Any = None,
        ends: list[int] | None = None,
    ) -> None:
        super().__init__(fields, 0 if ends is None else len(ends))
        self.whole = whole
        self.messages = messages
        self.others = others
        self.weights = weights
        self.before = before
        self.ends: list[int] = [] if ends is None else ends
        self.all_ends = False

    @property
    def size(self) -> int:
        """The body and what was decoded of it; and once more the messages, and twice the body, for what they become."""
        return 3 * len(self.whole) + 2 * self.weights[-1] + self.others


class _ShortBodies:
    """Short bodies: those that came again lately, and as many from before."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes // 2
        self._latest: dict[bytes, ReadBody] = {}
        self._before: dict[bytes, ReadBody] = {}
        self._bytes = 0  # of the latest

    @property
    def size(self) -> int:
        """What they take at most, in bytes."""
        return self._bytes + (self._limit if self._before else 0)

    def get(self, body: bytes) -> ReadBody | None:
        """The same body, if it is known."""
        known = self._latest.get(body)
        if known is None and (known := self._before.get(body)) is not None:
            self.put(body, known)
        return known

    def put(self, body: bytes, new: ReadBody) -> None:
        """Remember a body, as far as there is room for it."""
        size = _OBJECTS_BYTES + _TIMES_BYTES * len(body)
        if self._bytes + size > self._limit:
            self._before, self._latest, self._bytes = self._latest, {}, 0
        if size <= self._limit:
            self._latest[body] = new
            self._bytes += size


class BodyCache:
    """Bodies of chats, the least recently used forgotten first. Any number of threads may use one."""

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        short = limit_bytes // _SHORT_PART
        self._short = _ShortBodies(short)
        self._known = PrefixCache(limit_bytes - short)

    @property
    def size(self) -> int:
        """What they take, in bytes, about: with what becomes of them."""
        return self._known.bytes + self._short.size

    def read(self, body: bytes, kind: type[F], check: Check[F]) -> tuple[ReadBody, ReadBody | None]:
        """What is read from a body: its fields as `read_body` tells them. And the body it shares messages with.

        Raises as `read_body` and `check` do.
        """
        if len(body) < MIN_BYTES:
            return self._read_short(body, kind, check), None
        found: tuple[_KnownBody, _KnownBody] | None
        found = self._known.find(body, lambda known: _begun(known, body, kind, check))
        if found is None:
            fields = read_body(body, kind)
            check(fields, 0)
            new = _anew(body, fields)
            self._known.put(new)
            return new, None
        known, new = found
        if new is known:
            return known, None
        # What goes on from all messages of a body knows all that others could go on from as well.
        self._known.put(new, known, new.ends[-1], instead=new.shared == len(known.messages))
        return new, known

    def _read_short(self, body: bytes, kind: type[F], check: Check[F]) -> ReadBody:
        known = self._short.get(body)
        if known is not None and type(known.fields) is kind:
            return known
        fields = read_body(body, kind)
        check(fields, 0)
        new = ReadBody(fields)
        self._short.put(body, new)
        return new


def read_among(seen: BodyCache | None, body: bytes, kind: type[F], check: Check[F]) -> tuple[ReadBody, ReadBody | None]:
    """The same as `Conversations.read`, whether or not any are kept. Raises as that does."""
    if seen is not None:
        return seen.read(body, kind, check)
    fields = read_body(body, kind)
    check(fields, 0)
    return ReadBody(fields), None


def _anew(body: bytes, fields: Any) -> _KnownBody:
    given = fields.messages
    messages = given if isinstance(given, list) else [given]  # of `/v1/responses` it may be a text
    others = sum(
        _weight(value) for value in msgspec.structs.astuple(fields) if value is not None and value is not given
    )
    return _KnownBody(body, fields, messages, others, _weights(messages))


def _begun(known: _KnownBody, body: bytes, kind: type[F], check: Check[F]) -> tuple[_KnownBody, _KnownBody] | None:
    """A known body, and one that begins with messages of it; None when it has none of them, or nobody can tell.

    Raises as `check` does.
    """
    if type(known.fields) is not kind:
        return None
    if body == known.whole:
        return known, known
    if not known.all_ends:
        _find_ends(known)
    ends, start = known.ends, memoryview(known.whole)
    # A message ends with a brace, so nothing after it can be a part of it.
    shared = common_places(body, start, ends, len(ends))
    if not shared:
        return None
    end, others = ends[shared - 1], known.others
    try:
        after = start[ends[-1] :]
        if len(ends) == len(known.messages) and body.endswith(after) and end + len(after) <= len(body):
            # Nothing is new but messages. When these are whole, what follows means what it meant after the known ones.
            new = _decode_list(b"[{}%b]" % body[end : len(body) - len(after)])[1:]
            fields: Any = copy(known.fields)
        else:
            rest = _decode_rest(_OPENING + body[end:])
            new = rest.pop(OWN_KEY)[1:]
            if _key_of(kind) in rest:  # and the last ones count
                return None
            fields = copy(known.before)
            for name in fields.__struct_fields__:
                if name in rest and name != "messages":
                    setattr(fields, name, rest[name])
            others += _weight(rest)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    fields.messages = messages = known.messages[:shared] + new
    check(fields, shared)
    weights = known.weights[: shared + 1]
    weights += _weights(new, weights.pop())
    return known, _KnownBody(body, fields, messages, others, weights, known.before, ends[:shared])


_decode_list = msgspec.json.Decoder(list[Any]).decode
# The messages that are new, after an empty one in the place of those that are not.
_OPENING = b'{"%b":[{}' % OWN_KEY.encode()
_decode_rest = msgspec.json.Decoder(dict[str, Any]).decode
_decode_raw_rest = msgspec.json.Decoder(RawRest).decode
_decode_raw_messages = {
    "messages": msgspec.json.Decoder(RawMessages).decode,
    "input": msgspec.json.Decoder(RawInput).decode,
}
_decode_each_raw = msgspec.json.Decoder(list[msgspec.Raw]).decode


def _key_of(kind: Any) -> str:
    """Under which key a body of this kind has its messages."""
    name: str = kind.__struct_encode_fields__[kind.__struct_fields__.index("messages")]
    return name


_between = re.compile(rb"[ \t\n\r]*,?[ \t\n\r]*").match


def _find_ends(known: _KnownBody) -> None:
    """Find where each message of a body ends, and what is before them. Nowhere, if that cannot be told for sure."""
    known.all_ends = True
    body = known.whole
    try:
        if known.ends:
            end = known.ends[-1]
            each = _decode_raw_rest(_OPENING + body[end:]).messages[1:]
        else:
            kind = type(known.fields)
            msgspec.json.decode(body, type=kind)  # some bodies only Python's own decoder takes
            raw: Any = _decode_raw_messages[_key_of(kind)](body)
            messages = bytes(raw.messages)
            start = _only_place(messages, body)
            if start is None:
                return
            known.before = msgspec.json.decode(body[:start] + b"[]}", type=kind)
            each, end = _decode_each_raw(messages), start + 1
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    ends = list(known.ends)
    for message in each:
        between = _between(body, end)
        assert between is not None
        end = between.end() + len(memoryview(message))
        ends.append(end)
    known.ends = ends


def _only_place(part: bytes, whole: bytes) -> int | None:
    """Where a part is of something; None when it is there more than once, or may be."""
    found: list[int] = []
    place = -1
    for _ in range(_LOOKS):
        place = whole.find(part[:_LOOK_BYTES], place + 1)  # for all of it at once this takes longer
        if place == -1:
            return found[0] if len(found) == 1 else None
        if whole.startswith(part, place):
            found.append(place)
    return None


_LOOKS = 8
_LOOK_BYTES = 64


def _weights(messages: list[Any], before: int = 0) -> list[int]:
    """What the first of some messages take, so many, in bytes, with those before them."""
    return list(accumulate(map(_weight, messages), initial=before))


def _weight(value: Any) -> int:
    """What a decoded value takes, in bytes."""
    values, total = [value], 0
    while values:
        each = values.pop()
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            values += each.values()
        elif isinstance(each, list):
            values += each
    return total
