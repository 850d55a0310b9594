"""Where an engine says its event streams are.

vLLM (from 0.32) answers `GET /kv_event_sources` with `{rank: {endpoint, replay_endpoint, topic, …}}`. SGLang answers
`GET /server_info` with a `kv_events` object: the endpoint of rank 0, the number of ranks and the block size.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents.endpoints import connectable, rank_endpoint


class EventSource(msgspec.Struct, frozen=True):
    """The event stream of one DP rank: where its PUB and, if it has one, its replay ROUTER are.

    `curve_server_key`: the publisher's public key, for a stream that is encrypted.
    """

    dp_rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    curve_server_key: str | None = None


class _VllmSource(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str | None = None


class _SglangEvents(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str | None = None
    block_size: int | None = None
    dp_size: int = 1


class _SglangServer(msgspec.Struct):
    kv_events: _SglangEvents | None = None
    page_size: int | None = None


def vllm_sources(body: Any, host: str) -> list[EventSource]:
    """The streams in the JSON answer of `/kv_event_sources`, by rank; wildcard addresses become `host`.

    Raises msgspec.ValidationError, with the path to the field, when the answer has another shape.
    """
    by_rank = msgspec.convert(body, dict[int, _VllmSource], strict=False)
    return [
        EventSource(
            rank,
            connectable(source.endpoint, host),
            connectable(source.replay_endpoint, host) if source.replay_endpoint else None,
            source.topic,
        )
        for rank, source in sorted(by_rank.items())
        if source.publisher != "null"
    ]


def sglang_sources(body: Any, host: str) -> tuple[list[EventSource], int | None]:
    """The streams in the JSON answer of `/server_info`, by rank, and the block size in tokens if it is given.

    Raises msgspec.ValidationError, with the path to the field, when the answer has another shape.
    """
    server = msgspec.convert(body, _SglangServer, strict=False)
    events = server.kv_events
    if events is None or events.endpoint is None or events.publisher == "null":
        return [], server.page_size
    endpoint = connectable(events.endpoint, host)
    replay = connectable(events.replay_endpoint, host) if events.replay_endpoint else None
    sources = [
        EventSource(rank, rank_endpoint(endpoint, rank), rank_endpoint(replay, rank) if replay else None, events.topic)
        for rank in range(events.dp_size)
    ]
    return sources, events.block_size or server.page_size
