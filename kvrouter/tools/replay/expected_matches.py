"""The matches that a replayed recording has to give."""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections import Counter
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from kvevents import AllBlocksCleared, BlockStored, EngineHash, EventBatch
from kvevents.identity import identity_of


class StoredPrefixes:
    """What one DP rank stored since it started, or was cleared."""

    def __init__(self) -> None:
        self._digests: dict[EngineHash, bytes] = {}  # by block; the digest is of the whole prefix
        self._stored: set[bytes] = set()
        self._adapters: set[str] = set()

    def restart(self) -> None:
        """The engine restarted."""
        self._digests.clear()
        self._stored.clear()

    def apply(self, batch: EventBatch) -> None:
        """Take in a batch. Blocks whose tokens or parent are not known are left out, as nothing can match them."""
        for event in batch.events:
            if isinstance(event, BlockStored) and event.kv_cache_spec_kind in (None, "full_attention"):
                self._store(event)
            elif isinstance(event, AllBlocksCleared) and event.medium is None:
                self.restart()

    def longest(self, tokens: list[int], adapter: str | None, cache_salt: str | None, block_size: int) -> int:
        """How many leading tokens of a sequence were stored, in full blocks."""
        digest = _root(adapter, cache_salt)
        for start in range(0, len(tokens) - block_size + 1, block_size):
            digest = _chained(digest, tokens[start : start + block_size], None)
            if digest not in self._stored:
                return start
        return len(tokens) // block_size * block_size

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        if not size or len(event.token_ids) != size * len(event.block_hashes):
            return
        try:
            adapter, salt, keys = identity_of(event, self._adapters)
        except ValueError:
            return
        if adapter is not None:
            self._adapters.add(adapter)
        parent = event.parent_block_hash
        digest = _root(adapter, salt) if parent is None else self._digests.get(parent)
        if digest is None:
            return
        for number, name in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            digest = _chained(digest, tokens, keys[number] if keys else None)
            self._digests[name] = digest
            self._stored.add(digest)


def _root(adapter: str | None, cache_salt: str | None) -> bytes:
    return repr((adapter, cache_salt)).encode()


def _chained(parent: bytes, tokens: list[int], key: bytes | None) -> bytes:
    return blake2b(parent + array("Q", tokens).tobytes() + (key or b""), digest_size=16).digest()


_SUFFIXES = (".requests.jsonl", ".requests.jsonl.gz")


class UnusableRequestsError(ValueError):
    """A file that cannot be read as requests; the message names the file and the line."""


class AnsweredRequest(msgspec.Struct, tag_field="kind", tag="chat"):
    """A request that an engine answered. `worker` counts from 0, `t_start` is unix seconds."""

    t_start: float
    prompt_token_ids: list[int]
    cached_tokens: int
    i: int = -1
    worker: int = 0
    model: str = ""
    headers: dict[str, str] = {}
    extra: dict[str, Any] = {}

    @property
    def dp_rank(self) -> int | None:
        """The rank it was sent to; None when the engine chose."""
        ranks = [value for name, value in self.headers.items() if name.lower() == "x-data-parallel-rank"]
        return int(ranks[0]) if ranks and ranks[0].isdigit() else None

    @property
    def cache_salt(self) -> str | None:
        salt = self.extra.get("cache_salt")
        return salt if isinstance(salt, str) else None


class _Admin(msgspec.Struct, tag_field="kind", tag="admin"):
    """A call that is no inference."""


_decode = msgspec.json.Decoder(AnsweredRequest | _Admin).decode


def requests_beside(recording: Path) -> Path:
    """The requests that belong to a recording: `NAME.requests.jsonl` or `.gz` beside it.

    A recording in an older wire form, `NAME.RELEASE.kvrec`, shares those of NAME, which may be a folder up. Raises
    UnusableRequestsError.
    """
    folder, stem = recording.parent, recording.stem
    shared = stem.partition(".")[0]
    for place in (folder / stem, folder / shared, folder.parent / shared):
        for suffix in _SUFFIXES:
            if (path := place.with_name(place.name + suffix)).exists():
                return path
    raise UnusableRequestsError(f"{recording}: no {stem}{_SUFFIXES[0]}(.gz) beside it: give --requests")


def load_requests(path: Path) -> list[AnsweredRequest]:
    """The requests of a file by their start; other calls are left out. Raises UnusableRequestsError, or OSError."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UnusableRequestsError(f"{path}: {error}") from error
    requests: list[AnsweredRequest] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            request = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnusableRequestsError(f"{path}: line {number}: {error}") from error
        if isinstance(request, AnsweredRequest):
            requests.append(request)
    if not requests:
        raise UnusableRequestsError(f"{path}: no request in it")
    return sorted(requests, key=lambda request: request.t_start)


def base_model(requests: Collection[AnsweredRequest], adapters: Collection[str]) -> str | None:
    """The model that most requests name, adapters aside; None when they name none."""
    named = Counter(request.model for request in requests if request.model and request.model not in adapters)
    return named.most_common(1)[0][0] if named else None
