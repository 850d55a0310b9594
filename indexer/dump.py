"""An index written out: what `/dump` streams, and what a snapshot file holds.

Lines of JSON: a header, one line a target, and an end line with a checksum over all bytes before it. A target's runs of
prefix hashes come parents first; its blocks are `[engine hash, run, offset]`, a 32-byte engine hash as `"hex:…"`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec
from xxhash import xxh3_64

from indexer.hashing import Namespace, namespace_hash
from kvevents import EngineHash

FORMAT = 1


class DumpError(ValueError):
    """Something that is no whole dump, or none that can be used here."""


class DumpedRun(msgspec.Struct, array_like=True):
    """Consecutive prefix hashes behind block `offset` of run `parent` (-1: at the start of a prompt)."""

    parent: int
    offset: int
    hashes: list[int]


class DumpedHolder(msgspec.Struct):
    """The blocks of one group and medium. `copies` beyond the first, by engine hash."""

    group: int
    medium: str
    window: int | None
    blocks: list[tuple[int | str, int, int]]
    copies: list[tuple[int | str, int]]


class DumpedStream(msgspec.Struct):
    """The last batch that was applied: its number and its engine's time. `complete`: all before it were, too."""

    last_seq: int
    last_time: float
    complete: bool = True


class TargetDump(msgspec.Struct, tag_field="kind", tag="target"):
    """Everything needed to go on with a target: where its stream is, what it held, and after which batch."""

    worker: str
    dp_rank: int
    model: str
    tenant: str
    engine: str
    endpoint: str
    replay_endpoint: str | None
    topic: str
    block_size: int | None
    adapter: str | None
    capacity: int | None
    block_sizes: list[int]
    stream: DumpedStream
    runs: list[DumpedRun]
    holders: list[DumpedHolder]
    curve_server_key: str | None = None


class _Header(msgspec.Struct, tag_field="kind", tag="header"):
    format: int
    made_at: float
    secret: str


class _End(msgspec.Struct, tag_field="kind", tag="end"):
    targets: int
    checksum: str


_encode = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(_Header).decode
_decode_line = msgspec.json.Decoder(TargetDump | _End).decode


def write_dump(targets: Iterable[TargetDump], secret: str) -> Iterator[bytes]:
    """The lines of a dump."""
    checksum = xxh3_64()
    count = 0
    line = _encode(_Header(FORMAT, time.time(), _fingerprint(secret))) + b"\n"
    checksum.update(line)
    yield line
    for target in targets:
        line = _encode(target) + b"\n"
        checksum.update(line)
        count += 1
        yield line
    yield _encode(_End(count, checksum.hexdigest())) + b"\n"


def read_dump(lines: Iterable[bytes], secret: str) -> list[TargetDump]:
    """Read a whole dump. Raises DumpError when it is torn, damaged, of another format, or of another secret."""
    checksum = xxh3_64()
    targets: list[TargetDump] = []
    header: _Header | None = None
    for line in lines:
        try:
            if header is None:
                header = _decode_header(line)
                _check_header(header, secret)
            else:
                record = _decode_line(line)
                if isinstance(record, _End):
                    if (record.targets, record.checksum) != (len(targets), checksum.hexdigest()):
                        raise DumpError("the checksum is wrong: it was damaged")
                    return targets
                targets.append(record)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise DumpError(f"not a dump of an index: {error}") from error
        checksum.update(line)
    raise DumpError("it has no end: it was cut off" if header else "it is empty")


def written_hash(engine_hash: EngineHash) -> int | str:
    """An engine hash as JSON has it."""
    return engine_hash if isinstance(engine_hash, int) else f"hex:{engine_hash.hex()}"


def read_hash(dumped: int | str) -> EngineHash:
    """An engine hash read from JSON. Raises DumpError."""
    if isinstance(dumped, int):
        return dumped
    try:
        return bytes.fromhex(dumped.removeprefix("hex:"))
    except ValueError as error:
        raise DumpError(f"not an engine hash: {dumped!r}") from error


def _check_header(header: _Header, secret: str) -> None:
    if header.format != FORMAT:
        raise DumpError(f"its format is {header.format}, this is a reader of format {FORMAT}")
    if header.secret != _fingerprint(secret):
        raise DumpError("it was made with another index.secret, so its prefix hashes mean nothing here")


def _fingerprint(secret: str) -> str:
    return f"{namespace_hash(Namespace('', '', None, None, 0), secret):016x}"
