"""Event streams of an engine, read from its own report. Invalid fields of a report are skipped, with a note for each.

vLLM (from 0.32) answers `GET /kv_event_sources` with `{rank: {endpoint, replay_endpoint, topic, …}}`. SGLang answers
`GET /server_info` with a `kv_events` object: the endpoint of rank 0, the number of ranks and the block size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from kvevents.batches import HIGHEST_RANK
from kvevents.endpoints import connectable, parse_endpoint, rank_endpoint

_LONGEST_FIELD = 8192  # bytes, as JSON
_LONGEST_TEXT = 2048  # characters
_MOST_NOTES = 8  # a report may have thousands of invalid fields

T = TypeVar("T")


class ReportedFields:
    """Reader of fields in raw JSON. `refused` has a note for each invalid field."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def refuse(self, name: str, reason: str) -> None:
        """Note that a field is invalid."""
        if len(self.refused) < _MOST_NOTES:
            self.refused.append(f"{name}: {reason}")

    def integer(self, name: str, raw: msgspec.Raw, lowest: int, highest: int, missing: int | None = None) -> int | None:
        """Return an integer within limits, which may also be a string of digits; `missing` if it is null or absent."""
        value = self._value(name, raw, int)
        if value is None:
            return missing if _is_missing(raw) else None
        if lowest <= value <= highest:
            return value
        self.refuse(name, f"{_short(value)} is not from {lowest} to {highest}")
        return None

    def text(self, name: str, raw: msgspec.Raw, longest: int = _LONGEST_TEXT) -> str | None:
        """Return a string of printable characters; None if it is null or absent."""
        value = self._value(name, raw, str)
        if value is None or (len(value) <= longest and value.isprintable()):
            return value
        reason = f"it has {len(value)} characters; at most {longest}" if len(value) > longest else "it is not printable"
        self.refuse(name, reason)
        return None

    def struct(self, name: str, raw: msgspec.Raw, kind: type[T]) -> T | None:
        """Return an object; None if it is null or absent."""
        return self._value(name, raw, kind)

    def _value(self, name: str, raw: msgspec.Raw, kind: type[T]) -> T | None:
        if _is_missing(raw):
            return None
        if len(bytes(raw)) > _LONGEST_FIELD:
            self.refuse(name, f"it has {len(bytes(raw))} bytes; at most {_LONGEST_FIELD}")
            return None
        try:
            return msgspec.json.decode(raw, type=kind, strict=False)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self.refuse(name, str(error))
            return None


def _is_missing(raw: msgspec.Raw) -> bool:
    return bytes(raw) in (b"", b"null")


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**18 else "a number of more than 18 digits"


MOST_BLOCK_SIZE = 65_536  # tokens


class EventSource(msgspec.Struct, frozen=True):
    """The event stream of one DP rank. Of a wildcard endpoint, the index is bound there, and the publisher connects.

    - `replay_endpoint`: endpoint of its ROUTER socket for replays; None if it has none.
    - `curve_server_key`: the publisher's public key; None if the stream is not encrypted.
    """

    dp_rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    curve_server_key: str | None = None

    @property
    def connects(self) -> bool:
        """True if the publisher connects to the index."""
        return parse_endpoint(self.endpoint).is_wildcard


LONGEST_TOPIC = 256  # characters


def canonical_source(source: EventSource) -> EventSource:
    """Return a source with canonical endpoints. Raises ValueError, field first, for a bad rank, topic or endpoint."""
    if source.dp_rank < 0 or source.dp_rank > HIGHEST_RANK:
        raise ValueError(f"dp_rank: {source.dp_rank} is not from 0 to {HIGHEST_RANK}")
    if len(source.topic) > LONGEST_TOPIC:
        raise ValueError(f"topic: it has {len(source.topic)} characters; at most {LONGEST_TOPIC} are allowed")
    replay = source.replay_endpoint
    return msgspec.structs.replace(
        source,
        endpoint=_reachable(source.endpoint, "endpoint", or_wildcard=True),
        replay_endpoint=None if replay is None else _reachable(replay, "replay_endpoint"),
    )


def _reachable(text: str, field: str, or_wildcard: bool = False) -> str:
    try:
        endpoint = parse_endpoint(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
    if (endpoint.is_wildcard and not or_wildcard) or endpoint.port == 0:
        raise ValueError(
            f"{field}: {endpoint} is where a publisher listens; give the address that subscribers connect to"
        )
    return str(endpoint)


@dataclass(frozen=True, slots=True)
class ReportedStreams:
    """Streams that an engine reports.

    - `block_size`: block size in tokens; None if the engine does not report it.
    """

    sources: list[EventSource] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    block_size: int | None = None


class _VllmSource(msgspec.Struct):
    endpoint: msgspec.Raw = msgspec.Raw()
    replay_endpoint: msgspec.Raw = msgspec.Raw()
    topic: msgspec.Raw = msgspec.Raw()
    publisher: msgspec.Raw = msgspec.Raw()


class _SglangEvents(_VllmSource):
    block_size: msgspec.Raw = msgspec.Raw()
    dp_size: msgspec.Raw = msgspec.Raw()


class _SglangServer(msgspec.Struct):
    kv_events: msgspec.Raw = msgspec.Raw()
    page_size: msgspec.Raw = msgspec.Raw()


def vllm_sources(body: bytes, host: str, fields: ReportedFields, most_ranks: int) -> ReportedStreams:
    """Return the streams in `/kv_event_sources`, with `host` for wildcards, and notes in `fields` on invalid ones.

    Raises msgspec.MsgspecError if the body is not a JSON object.
    """
    found = ReportedStreams()
    by_rank = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if len(by_rank) > most_ranks:
        fields.refuse("kv_event_sources", f"it has {len(by_rank)} ranks; at most {most_ranks} are read")
        return found
    for name, raw in by_rank.items():
        rank = fields.integer("kv_event_sources: a rank", msgspec.Raw(msgspec.json.encode(name)), 0, HIGHEST_RANK)
        source = fields.struct(f"kv_event_sources[{rank}]", raw, _VllmSource)
        if rank is None or source is None or _publishes_nothing(source, fields):
            continue
        found.ranks.append(rank)
        _add(found, source, rank, lambda endpoint: connectable(endpoint, host), fields)
    found.ranks.sort()
    found.sources.sort(key=lambda source: source.dp_rank)
    return found


def sglang_sources(body: bytes, host: str, fields: ReportedFields, most_ranks: int) -> ReportedStreams:
    """Return the streams and block size in `/server_info`, with notes in `fields` on invalid ones.

    Raises msgspec.MsgspecError if the body is not a JSON object.
    """
    server = msgspec.json.decode(body, type=_SglangServer)
    page_size = fields.integer("page_size", server.page_size, 1, MOST_BLOCK_SIZE)
    events = fields.struct("kv_events", server.kv_events, _SglangEvents)
    if events is None or not events.endpoint or bytes(events.endpoint) == b"null" or _publishes_nothing(events, fields):
        return ReportedStreams(block_size=page_size)
    block_size = fields.integer("kv_events.block_size", events.block_size, 1, MOST_BLOCK_SIZE)
    found = ReportedStreams(block_size=block_size or page_size)
    given = fields.integer("kv_events.dp_size", events.dp_size, 1, most_ranks, missing=1)
    for rank in range(given or 0):
        found.ranks.append(rank)
        _add(found, events, rank, _nth_rank(rank, host), fields)
    return found


def _nth_rank(rank: int, host: str) -> Callable[[str], str]:
    return lambda endpoint: rank_endpoint(connectable(endpoint, host), rank)


def _publishes_nothing(source: _VllmSource, fields: ReportedFields) -> bool:
    return fields.text("publisher", source.publisher) == "null"


def _add(
    found: ReportedStreams, source: _VllmSource, rank: int, of_rank: Callable[[str], str], fields: ReportedFields
) -> None:
    """Add the stream of a rank if it is valid. `of_rank` turns an endpoint into the one that subscribers connect to."""
    refused = len(fields.refused)
    endpoint = fields.text("endpoint", source.endpoint)
    replay = fields.text("replay_endpoint", source.replay_endpoint)
    topic = fields.text("topic", source.topic, LONGEST_TOPIC) or ""
    if len(fields.refused) > refused:
        return
    if endpoint is None:
        fields.refuse("endpoint", f"rank {rank} has none")
        return
    try:
        there = of_rank(replay) if replay else None
        found.sources.append(canonical_source(EventSource(rank, of_rank(endpoint), there, topic)))
    except ValueError as error:
        fields.refuse(f"the stream of rank {rank}", str(error))
