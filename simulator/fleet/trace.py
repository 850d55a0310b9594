"""Traces of requests in the format of Mooncake's public traces: one JSON object a line.

    timestamp                     milliseconds
    input_length, output_length   tokens
    hash_ids                      one id for each 512-token block of the prompt, the last of which may be partial; equal
                                  ids mean equal prefixes
    session_id                    optional; without it, the id of the second block names the session, because the first
                                  block is often the same in all sessions
    model, worker, cached_tokens, ttft_ms, failed
                                  optional; the result of the request, as `kvrouter record --requests` writes it

A trace with blocks of another size begins with a line that declares it, such as {"block_tokens": 64}.

https://github.com/kvcache-ai/Mooncake

The router's index reads tokens, so each token of a block is the block's id: equal blocks have equal tokens.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated

import msgspec

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.apis.agent_hints import AgentHints

BLOCK_TOKENS = 512
# Prompts without a session that begin with this many equal tokens count as one session.
_SESSION_TOKENS = 2 * BLOCK_TOKENS


class TraceLine(msgspec.Struct, omit_defaults=True):
    """One line of a trace: a request, and optionally its result."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str | None = None
    model: str | None = None
    worker: str | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    failed: bool = False


class TraceHead(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of a trace whose blocks are not of 512 tokens."""

    block_tokens: Annotated[int, msgspec.Meta(ge=1)]


class TraceError(ValueError):
    """An error in a trace file; the message names the line and the reason."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The lines of a trace in the order of their times, and the tokens of a block."""

    lines: list[TraceLine]
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class RequestSLO:
    """The SLO of a request's class, in seconds. `refuses_late`: the router refuses what no worker can serve in time."""

    service_level: str
    ttft: float | None
    tpot: float | None
    refuses_late: bool = False


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace.

    - `arrival`: seconds since the start of the trace.
    - `blocks`: the ids of the prompt's full blocks.
    - `finished`: the ids of the full blocks of prompt and answer, as the next turn of the conversation names them.
    - `hints`: what its agent reports of the session; None for nothing.
    - `priority`: lower is sooner.
    - `program`: the session that its session is a subagent of; None for its own program.
    - `following`: the next request, which arrives `pause` seconds after the answer to this one, whatever its `arrival`.
    - `streamed`: whether its answer is streamed. If not, the router sees its first byte when it ends.
    """

    arrival: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    finished: tuple[int, ...]
    session: str
    slo: RequestSLO | None = None
    hints: AgentHints | None = None
    following: TracedRequest | None = None
    pause: float = 0.0
    priority: int = 0
    streamed: bool = True
    program: str | None = None


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """Return the first `limit` lines of a trace file, which may be compressed (.gz). Raises TraceError and OSError."""
    opener = gzip.open if path.suffix == ".gz" else open
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    block_tokens = BLOCK_TOKENS
    file: IO[bytes]
    with opener(path, "rb") as file:  # type: ignore[assignment]
        for number, line in enumerate(file, 1):
            if limit is not None and len(lines) >= limit:
                break
            if not line.strip():
                continue
            try:
                if number == 1 and b"block_tokens" in line:
                    block_tokens = msgspec.json.decode(line, type=TraceHead).block_tokens
                else:
                    lines.append(_checked(decoder.decode(line), block_tokens))
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    return Trace(sorted(lines, key=lambda line: line.timestamp), block_tokens)


def _checked(line: TraceLine, block_tokens: int) -> TraceLine:
    if line.input_length < 0 or line.output_length < 0:
        raise ValueError("input_length and output_length must not be negative")
    if len(line.hash_ids) < line.input_length // block_tokens:
        raise ValueError(
            f"{len(line.hash_ids)} hash_ids are too few for {line.input_length} tokens in blocks of {block_tokens}"
        )
    return line


def requests_of(
    lines: Iterable[TraceLine], speed: float = 1.0, block_tokens: int = BLOCK_TOKENS
) -> list[TracedRequest]:
    """Return the requests of a trace that is replayed `speed` times as fast, in the order of their arrival."""
    requests = [_request(line, speed, block_tokens) for line in sorted(lines, key=lambda line: line.timestamp)]
    later: dict[int, TracedRequest] = {}  # by each block's id: the next request with that block
    finished: list[TracedRequest] = []
    for number, request in zip(range(len(requests) - 1, -1, -1), reversed(requests), strict=True):
        finished.append(replace(request, finished=_finished(request, number, later, block_tokens)))
        later.update(dict.fromkeys(request.blocks, request))
    return finished[::-1]


def _request(line: TraceLine, speed: float, block_tokens: int) -> TracedRequest:
    ids = line.hash_ids
    place = max(_SESSION_TOKENS // block_tokens - 1, 0)
    session = line.session_id or str(ids[min(place, len(ids) - 1)] if ids else 0)
    blocks = tuple(ids[: line.input_length // block_tokens])
    output = max(line.output_length, 1)
    return TracedRequest(line.timestamp / 1000 / speed, max(line.input_length, 1), output, blocks, blocks, session)


def _finished(
    request: TracedRequest, number: int, later: dict[int, TracedRequest], block_tokens: int
) -> tuple[int, ...]:
    """Return the block ids of prompt and answer: the next turn's ids, and unique ids where it has none."""
    total = (request.input_tokens + request.output_tokens) // block_tokens
    known = request.blocks
    turn = later.get(known[-1]) if known else None
    if turn is not None and turn.input_tokens >= request.input_tokens + request.output_tokens:
        known = turn.blocks[:total]
    return known + tuple(-(number * 4096 + place) - 1 for place in range(len(known), total))


_TOKENS = 1 << 8 * TOKEN_BYTES
_HASHES = 1 << 64
# Block ids of traces are below it. Tokens above it fill the partial last blocks of prompts.
_FIRST_FILLER = _TOKENS // 2


def prompt_of(request: TracedRequest, number: int, block_tokens: int) -> PackedPrompt:
    """Return the tokens of a request's prompt. `number` makes the tokens of its partial last block unique."""
    tokens = [_packed(block) * block_tokens for block in request.blocks]
    rest = request.input_tokens - len(request.blocks) * block_tokens
    tokens.append(_packed(_FIRST_FILLER + number) * rest)
    return PackedPrompt(b"".join(tokens))


def tokens_of(blocks: Sequence[int], block_tokens: int) -> list[int]:
    """Return the tokens of blocks as an engine reports them."""
    tokens: list[int] = []
    for block in blocks:
        tokens += [block % _TOKENS] * block_tokens
    return tokens


def engine_hash(block: int) -> int:
    """Return the hash by which an engine names a block in its events."""
    return block % _HASHES


def _packed(token: int) -> bytes:
    return (token % _TOKENS).to_bytes(TOKEN_BYTES, "little")
