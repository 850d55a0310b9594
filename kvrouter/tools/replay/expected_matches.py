"""The expected matches of a replayed recording: the engine's answers, and the prefixes that its events stored.

StoredPrefixes is deliberately independent of the index, and simple: a set of chained digests.
"""

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
from kvevents.decoding import json_reader
from kvevents.events import identity_of
from router.http.headers import whole_number


class StoredPrefixes:
    """All prefixes that one DP rank stored since its start or last clear. A longer match is a ghost."""

    def __init__(self) -> None:
        self._digests: dict[EngineHash, bytes] = {}  # by block; each digest covers the whole prefix
        self._stored: set[bytes] = set()
        self._adapters: set[str] = set()

    def restart(self) -> None:
        """Forget all prefixes after a restart of the engine."""
        self._digests.clear()
        self._stored.clear()

    def apply(self, batch: EventBatch) -> None:
        """Apply a batch, without blocks of unknown tokens or an unknown parent, which nothing can match."""
        for event in batch.events:
            if isinstance(event, BlockStored) and event.kv_cache_spec_kind in (None, "full_attention"):
                self._store(event)
            elif isinstance(event, AllBlocksCleared) and event.medium is None:
                self.restart()

    def longest(self, tokens: list[int], adapter: str | None, cache_salt: str | None, block_size: int) -> int:
        """Return the number of leading tokens that were stored, in full blocks."""
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
    """A file that cannot be read as requests. The message names the file and the line."""


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
        """The rank that the request was sent to; `None` if the engine chose."""
        ranks = [value for name, value in self.headers.items() if name.lower() == "x-data-parallel-rank"]
        return whole_number(ranks[0].encode()) if ranks else None

    @property
    def cache_salt(self) -> str | None:
        salt = self.extra.get("cache_salt")
        return salt if isinstance(salt, str) else None


class _Admin(msgspec.Struct, tag_field="kind", tag="admin"):
    """A call that is not an inference."""


_decode = json_reader(AnsweredRequest | _Admin)


def requests_beside(recording: Path) -> Path:
    """Return the requests file beside a recording, `NAME.requests.jsonl` or `.gz`. Raises UnusableRequestsError.

    A recording in an older wire form, `NAME.RELEASE.kvrec`, shares the requests of NAME, also from the parent folder.
    """
    folder, stem = recording.parent, recording.stem
    shared = stem.partition(".")[0]
    for place in (folder / stem, folder / shared, folder.parent / shared):
        for suffix in _SUFFIXES:
            if (path := place.with_name(place.name + suffix)).exists():
                return path
    raise UnusableRequestsError(f"{recording}: no {stem}{_SUFFIXES[0]}(.gz) beside it: give --requests")


def load_requests(path: Path) -> list[AnsweredRequest]:
    """Load the requests of a file by their start, without other calls. Raises UnusableRequestsError and OSError."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UnusableRequestsError(f"{path}: {error}") from error
    requests: list[AnsweredRequest] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            request = _decode(line)
        except msgspec.DecodeError as error:
            raise UnusableRequestsError(f"{path}: line {number}: {error}") from error
        if isinstance(request, AnsweredRequest):
            requests.append(request)
    if not requests:
        raise UnusableRequestsError(f"{path}: the file has no requests")
    return sorted(requests, key=lambda request: request.t_start)


def base_model(requests: Collection[AnsweredRequest], adapters: Collection[str]) -> str | None:
    """Return the model that most requests name, except adapters; `None` if no request names one."""
    named = Counter(request.model for request in requests if request.model and request.model not in adapters)
    return named.most_common(1)[0][0] if named else None
