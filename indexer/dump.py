"""Dumps of an index: the format of `/dump` and of snapshot files.

A dump has lines of JSON: a header, one line per target, and an end line with a checksum of all bytes before it. A
target's runs of prefix hashes are listed parents first. Its blocks are `[engine hash, run, offset]`, where a 32-byte
engine hash is written as `"hex:…"`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import structlog
from xxhash import xxh3_64

from indexer.hashing import Namespace, namespace_hash
from kvevents import EngineHash
from kvevents.batches import HIGHEST_RANK, LATEST_TIME
from kvevents.decoding import json_reader, msgpack_reader
from kvevents.sources import LONGEST_TOPIC, MOST_BLOCK_SIZE

log = structlog.get_logger()

# Format 1 could have copies of salted blocks among the plain ones.
FORMAT = 2

_LOGGED_BYTES = 200  # of an invalid line


# Types of a dump's values, with the limits that are checked when it is read.
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Seq = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_BlockSize = Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK_SIZE)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=LATEST_TIME)]
_Name = Annotated[str, msgspec.Meta(max_length=2048)]


class DumpError(ValueError):
    """Data that is not a complete dump, or a dump that this index cannot use."""


class DumpedRun(msgspec.Struct, array_like=True):
    """Consecutive prefix hashes after block `offset` of run `parent` (-1: at the start of a prompt)."""

    parent: Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
    offset: Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
    hashes: list[_Number]


class DumpedHolder(msgspec.Struct):
    """The blocks of one cache group in one medium. `copies` has the copies beyond the first, by engine hash."""

    group: int
    medium: _Name
    window: _Place | None
    blocks: list[tuple[int | str, _Place, _Place]]
    copies: list[tuple[int | str, Annotated[int, msgspec.Meta(ge=1, le=2**31)]]]


class DumpedStream(msgspec.Struct):
    """The last applied batch: its sequence number and the engine's time. `complete`: no earlier batch is missing."""

    last_seq: _Seq
    last_time: _Time
    complete: bool = True


class TargetDump(msgspec.Struct, tag_field="kind", tag="target"):
    """Everything that a restart needs of a target: its stream, its blocks, and the last applied batch."""

    worker: _Name
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_RANK)]
    model: _Name
    tenant: _Name
    engine: _Name
    endpoint: _Name
    replay_endpoint: _Name | None
    topic: Annotated[str, msgspec.Meta(max_length=LONGEST_TOPIC)]
    block_size: _BlockSize | None
    adapter: _Name | None
    capacity: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None
    block_sizes: list[_BlockSize]
    stream: DumpedStream
    runs: list[DumpedRun]
    holders: list[DumpedHolder]
    curve_server_key: str | None = None
    additional_salt: _Name | None = None


class SavedTarget:
    """A target read from a dump. Its blocks stay encoded until its worker registers, which saves memory."""

    __slots__ = ("_packed", "about")

    def __init__(self, dump: TargetDump) -> None:
        """Pack a target. Raises OverflowError for a number that does not fit into 64 bits."""
        self._packed = _pack(dump)
        self.about = msgspec.structs.replace(dump, runs=[], holders=[])

    def whole(self) -> TargetDump:
        """Return the target with its blocks."""
        return _unpack(self._packed)


class _Header(msgspec.Struct, tag_field="kind", tag="header"):
    format: int
    made_at: float
    secret: str


class _End(msgspec.Struct, tag_field="kind", tag="end"):
    targets: int
    checksum: str


_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgpack_reader(TargetDump)
_decode_header = json_reader(_Header)
_decode_line = json_reader(TargetDump | _End)


def write_dump(targets: Iterable[TargetDump], secret: str) -> Iterator[bytes]:
    """Yield the lines of a dump."""
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


def read_dump(lines: Iterable[bytes], secret: str) -> list[SavedTarget]:
    """Read a complete dump, without its invalid targets. Raises DumpError if it is damaged or has another secret."""
    checksum = xxh3_64()
    targets: list[SavedTarget] = []
    skipped = 0
    header: _Header | None = None
    for line in lines:
        try:
            if header is None:
                header = _decode_header(line)
                _check_header(header, secret)
            else:
                record = _read_line(line)
                if isinstance(record, _End):
                    if (record.targets, record.checksum) != (len(targets) + skipped, checksum.hexdigest()):
                        raise DumpError("the dump is damaged: its checksum is wrong")
                    return targets
                if record is None:
                    skipped += 1
                else:
                    targets.append(record)
        except msgspec.DecodeError as error:
            raise DumpError(f"not a dump of an index: {error}") from error
        checksum.update(line)
    raise DumpError("the dump is cut off: it has no end line" if header else "the dump is empty")


def _read_line(line: bytes) -> SavedTarget | _End | None:
    """Return a target, the end, or None for an invalid target. Raises DecodeError for a line that is cut off."""
    try:
        record: TargetDump | _End = _decode_line(line)
        return SavedTarget(record) if isinstance(record, TargetDump) else record
    except (msgspec.DecodeError, OverflowError) as error:  # a number in it may be too large to be packed
        if not line.endswith(b"\n"):
            raise  # the line is cut off
        log.warning("saved stream not used", reason=str(error), begins=line[:_LOGGED_BYTES].decode(errors="replace"))
        return None


def written_hash(engine_hash: EngineHash) -> int | str:
    """Return an engine hash in the form that JSON allows."""
    return engine_hash if isinstance(engine_hash, int) else f"hex:{engine_hash.hex()}"


def read_hash(dumped: int | str) -> EngineHash:
    """Return the engine hash of a JSON value. Raises DumpError for any other value."""
    if isinstance(dumped, int):
        return dumped
    try:
        return bytes.fromhex(dumped.removeprefix("hex:"))
    except ValueError as error:
        raise DumpError(f"not an engine hash: {dumped!r}") from error


def _check_header(header: _Header, secret: str) -> None:
    if header.format != FORMAT:
        raise DumpError(f"the dump has format {header.format}; this version reads format {FORMAT}")
    if header.secret != _fingerprint(secret):
        raise DumpError("the dump was made with another index.secret, so its prefix hashes do not match")


def _fingerprint(secret: str) -> str:
    return f"{namespace_hash(Namespace('', '', None, None, 0), secret):016x}"
