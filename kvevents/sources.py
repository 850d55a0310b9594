"""Event streams of an engine, read from its own report. Invalid fields of a report are skipped, with a note for each.

vLLM (from 0.32) answers `GET /kv_event_sources` with `{rank: {endpoint, replay_endpoint, topic, …}}`. SGLang (from
0.5.13) answers `GET /server_info` with a `kv_events` object: host and port of rank 0, from 0.5.22 on also the port of
its replays, the number of ranks and the block size. Its `kv_events_config` is the text of its flag, in all versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from kvevents.batches import HIGHEST_RANK
from kvevents.decoding import read_json
from kvevents.endpoints import bracketed, connectable, parse_endpoint, rank_endpoint

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

    def nested(self, name: str, raw: msgspec.Raw, kind: type[T]) -> T | None:
        """Return an object that is encoded as JSON in a string; None if it is null or absent."""
        text = self._value(name, raw, str)
        return None if text is None else self._value(name, msgspec.Raw(text.encode()), kind)

    def _value(self, name: str, raw: msgspec.Raw, kind: type[T]) -> T | None:
        if _is_missing(raw):
            return None
        if len(bytes(raw)) > _LONGEST_FIELD:
            self.refuse(name, f"it has {len(bytes(raw))} bytes; at most {_LONGEST_FIELD}")
            return None
        try:
            return read_json(raw, kind, strict=False)
        except msgspec.DecodeError as error:
            self.refuse(name, str(error))
            return None


def _is_missing(raw: msgspec.Raw) -> bool:
    return bytes(raw) in (b"", b"null")


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**18 else "a number of more than 18 digits"


MOST_BLOCK_SIZE = 65_536  # tokens


class EventSource(msgspec.Struct, frozen=True):
    """The event stream of one DP rank. If the endpoint has a wildcard, the index binds it and the publisher connects.

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


class _Publisher(msgspec.Struct):
    """The configuration of a publisher, which vLLM reports for each rank and SGLang as the text of its flag."""

    endpoint: msgspec.Raw = msgspec.Raw()
    replay_endpoint: msgspec.Raw = msgspec.Raw()
    topic: msgspec.Raw = msgspec.Raw()
    publisher: msgspec.Raw = msgspec.Raw()


class _SglangEvents(msgspec.Struct):
    endpoint_host: msgspec.Raw = msgspec.Raw()
    endpoint_port_base: msgspec.Raw = msgspec.Raw()
    replay_endpoint_port_base: msgspec.Raw = msgspec.Raw()
    topic: msgspec.Raw = msgspec.Raw()
    publisher: msgspec.Raw = msgspec.Raw()
    block_size: msgspec.Raw = msgspec.Raw()
    dp_size: msgspec.Raw = msgspec.Raw()


class _SglangServer(msgspec.Struct):
    kv_events: msgspec.Raw = msgspec.Raw()
    kv_events_config: msgspec.Raw = msgspec.Raw()
    page_size: msgspec.Raw = msgspec.Raw()
    dcp_size: msgspec.Raw = msgspec.Raw()
    dp_size: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class _Addresses:
    """The endpoints and the topic of a publisher, in the words of its engine."""

    endpoint: str
    replay_endpoint: str | None
    topic: str


def vllm_sources(body: bytes, host: str, fields: ReportedFields, most_ranks: int) -> ReportedStreams:
    """Return the streams in `/kv_event_sources`, with `host` for wildcards, and notes in `fields` on invalid ones.

    Raises msgspec.MsgspecError if the body is not a JSON object.
    """
    found = ReportedStreams()
    by_rank = read_json(body, dict[str, msgspec.Raw])
    if len(by_rank) > most_ranks:
        fields.refuse("kv_event_sources", f"it has {len(by_rank)} ranks; at most {most_ranks} are read")
        return found
    for name, raw in by_rank.items():
        rank = fields.integer("kv_event_sources: a rank", msgspec.Raw(msgspec.json.encode(name)), 0, HIGHEST_RANK)
        source = fields.struct(f"kv_event_sources[{rank}]", raw, _Publisher)
        if rank is None or source is None or fields.text("publisher", source.publisher) == "null":
            continue
        found.ranks.append(rank)
        refused = len(fields.refused)
        given = _addresses(source, fields)
        if given is not None:
            _add(found, given, rank, lambda endpoint: connectable(endpoint, host), fields)
        elif len(fields.refused) == refused:
            fields.refuse("endpoint", f"rank {rank} has none")
    found.ranks.sort()
    found.sources.sort(key=lambda source: source.dp_rank)
    return found


def sglang_sources(body: bytes, host: str, fields: ReportedFields, most_ranks: int) -> ReportedStreams:
    """Return the streams and block size in `/server_info`, with notes in `fields` on invalid ones.

    Raises msgspec.MsgspecError if the body is not a JSON object.
    """
    server = read_json(body, _SglangServer)
    page_size = fields.integer("page_size", server.page_size, 1, MOST_BLOCK_SIZE)
    shards = fields.integer("dcp_size", server.dcp_size, 1, MOST_BLOCK_SIZE, missing=1)
    block_size = page_size * shards if page_size and shards and page_size * shards <= MOST_BLOCK_SIZE else page_size
    events = fields.struct("kv_events", server.kv_events, _SglangEvents)
    flag = fields.nested("kv_events_config", server.kv_events_config, _Publisher)
    if events is None:
        given = None if flag is None else _of_flag(flag, fields)
        ranks = server.dp_size
    else:
        given = _of_object(events, flag, fields)
        ranks = events.dp_size
        block_size = fields.integer("kv_events.block_size", events.block_size, 1, MOST_BLOCK_SIZE) or block_size
    found = ReportedStreams(block_size=block_size)
    if given is None:
        return found
    for rank in range(fields.integer("kv_events.dp_size", ranks, 1, most_ranks, missing=1) or 0):
        found.ranks.append(rank)
        _add(found, given, rank, _nth_rank(rank, host), fields)
    return found


# What SGLang's flag means where it names no publisher and no endpoint.
_DEFAULT_PUBLISHER = "null"
_DEFAULT_ENDPOINT = msgspec.Raw(b'"tcp://*:5557"')


def _of_flag(flag: _Publisher, fields: ReportedFields) -> _Addresses | None:
    """Return the addresses in the text of SGLang's flag; None if it publishes nothing, or a field is invalid."""
    if (fields.text("kv_events_config: publisher", flag.publisher) or _DEFAULT_PUBLISHER) == "null":
        return None
    endpoint = _DEFAULT_ENDPOINT if _is_missing(flag.endpoint) else flag.endpoint
    return _addresses(msgspec.structs.replace(flag, endpoint=endpoint), fields)


def _of_object(events: _SglangEvents, flag: _Publisher | None, fields: ReportedFields) -> _Addresses | None:
    """Return the addresses in SGLang's `kv_events`. It names no host for replays, but the flag's text does."""
    if fields.text("kv_events.publisher", events.publisher) == "null":
        return None
    refused = len(fields.refused)
    host = fields.text("kv_events.endpoint_host", events.endpoint_host)
    port = fields.integer("kv_events.endpoint_port_base", events.endpoint_port_base, 1, 65535)
    replay_port = fields.integer("kv_events.replay_endpoint_port_base", events.replay_endpoint_port_base, 1, 65535)
    topic = fields.text("kv_events.topic", events.topic, LONGEST_TOPIC) or ""
    replay = fields.text("kv_events_config: replay_endpoint", flag.replay_endpoint) if flag is not None else None
    if len(fields.refused) > refused:
        return None
    if not host or port is None:
        missing = "endpoint_port_base" if host else "endpoint_host"
        fields.refuse(f"kv_events.{missing}", "the engine reports none")
        return None
    if not replay and replay_port is not None:
        replay = f"tcp://*:{replay_port}"  # whatever the stream's host: the engine itself listens for replays
    return _Addresses(f"tcp://{host if host.startswith('[') else bracketed(host)}:{port}", replay or None, topic)


def _nth_rank(rank: int, host: str) -> Callable[[str], str]:
    return lambda endpoint: rank_endpoint(connectable(endpoint, host), rank)


def _addresses(source: _Publisher, fields: ReportedFields) -> _Addresses | None:
    """Return the addresses of a publisher's configuration; None if one is invalid, or it has no endpoint."""
    refused = len(fields.refused)
    endpoint = fields.text("endpoint", source.endpoint)
    replay = fields.text("replay_endpoint", source.replay_endpoint)
    topic = fields.text("topic", source.topic, LONGEST_TOPIC) or ""
    if endpoint is None or len(fields.refused) > refused:
        return None
    return _Addresses(endpoint, replay or None, topic)


def _add(
    found: ReportedStreams, given: _Addresses, rank: int, of_rank: Callable[[str], str], fields: ReportedFields
) -> None:
    """Add the stream of a rank if it is valid. `of_rank` turns an endpoint into the one that subscribers connect to."""
    replay = given.replay_endpoint
    try:
        there = None if replay is None else of_rank(replay)
        found.sources.append(canonical_source(EventSource(rank, of_rank(given.endpoint), there, given.topic)))
    except ValueError as error:
        fields.refuse(f"the stream of rank {rank}", str(error))
