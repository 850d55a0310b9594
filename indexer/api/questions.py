"""Queries of the index API: from the JSON of a body to the JSON of its answer.

- `POST /match`: return the cached tokens of a prompt, by target.
- `POST /query`: return the cached tokens of a token sequence, by tenant and instance.
- `POST /query_by_hash`: return the cached tokens of a prefix that is given by hashes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from http_api.errors import RequestError, named_first
from http_api.requests import decode_body
from indexer.api.answers import Answers
from indexer.api.bodies import HashQueryBody, PackedQuery, QueryBody
from indexer.hashing import PackedPrompt
from indexer.index import HashQuery, Match, MatchQuery, UnknownModelError
from indexer.indexer import Indexer
from indexer.native import native_core

# Reads the body of `/match` and tokenizes its prompt, at once or later. Raises RequestError.
ReadMatch = Callable[[bytes], MatchQuery | Awaitable[MatchQuery]]
# Turns the body of a query into the JSON of its answer, at once or later. Raises RequestError.
Answer = Callable[[bytes], bytes | Awaitable[bytes]]
# Packs a JSON list of token ids in the native core. Returns None for any other JSON.
PackedNumbers = Callable[[bytes], bytes | None]

T = TypeVar("T")

_decode_packed: Final = msgspec.json.Decoder(PackedQuery).decode


class Questions:
    """Answers to queries of the index API, for every server that receives them. `by_path` maps a path to its method."""

    def __init__(self, indexer: Indexer, read_match: ReadMatch) -> None:
        self._indexer = indexer
        self._answers = Answers(indexer)
        self._read_match = read_match
        core = native_core()
        self._packed_numbers = None if core is None else core.packed_numbers
        self.by_path: dict[str, Answer] = {
            "/match": self.match,
            "/query": self.query,
            "/query_by_hash": self.query_by_hash,
        }

    def match(self, body: bytes) -> bytes | Awaitable[bytes]:
        """Return how many tokens of a prompt each target would serve from its cache, the most first."""
        query = self._read_match(body)
        return self._match(query) if isinstance(query, MatchQuery) else self._match_later(query)

    async def _match_later(self, query: Awaitable[MatchQuery]) -> bytes:
        return self._match(await query)

    def _match(self, query: MatchQuery) -> bytes:
        matches = _find(self._indexer.match, query, "token_ids", 2**32 - 1)
        return self._answers.by_target(query.model, query.tenant, len(query.token_ids), matches)

    def query(self, body: bytes) -> bytes:
        """Return how many tokens of a token sequence each instance holds, including its last block."""
        query = _read_query(body, self._packed_numbers)
        matches = _find(self._indexer.longest, query, "token_ids", 2**32 - 1)
        return self._answers.by_instance(query.model, query.tenant, matches)

    def query_by_hash(self, body: bytes) -> bytes:
        """Return how many tokens each instance holds of a prefix that is given by its prefix hashes."""
        read = decode_body(body, HashQueryBody)
        query = HashQuery(read.model, read.block_hashes, read.block_size, read.tenant_id)
        matches = _find(self._indexer.longest_by_hash, query, "block_hashes", 2**64 - 1)
        return self._answers.by_instance(query.model, query.tenant, matches)


def _read_query(body: bytes, packed_numbers: PackedNumbers | None) -> MatchQuery:
    """Read the body of `/query`. Raises RequestError."""
    packed = None if packed_numbers is None else _read_packed_query(body, packed_numbers)
    if packed is not None:
        return packed
    query = decode_body(body, QueryBody)
    return MatchQuery(query.model, query.token_ids, query.lora_name, query.cache_salt, query.tenant_id)


def _read_packed_query(body: bytes, packed_numbers: PackedNumbers) -> MatchQuery | None:
    """Read the body of `/query` without making a Python object for each token id.

    The native core packs the bytes of the only list; msgspec decodes the rest. Returns None for a body with another
    list, or with an error.
    """
    start, end = body.find(b"["), body.rfind(b"]") + 1
    if not 0 <= start < end:  # in compiled code, a slice that ends before its start raises
        return None
    tokens = packed_numbers(body[start:end])
    if tokens is None:
        return None
    try:
        # The rest has one list at most, the empty one: token_ids is this list, or no list.
        rest = _decode_packed(b"%b[]%b" % (body[:start], body[end:]))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return MatchQuery(rest.model, PackedPrompt(tokens), rest.lora_name, rest.cache_salt, rest.tenant_id)


def _find(find: Callable[[T], list[Match]], query: T, numbers: str, highest: int) -> list[Match]:
    """Call a lookup of the indexer, and turn its errors into RequestError.

    `numbers` is the field whose numbers have to be from 0 to `highest`.
    """
    try:
        return find(query)
    except UnknownModelError as unknown:
        raise RequestError(str(unknown), status=404, type="not_found_error", param="model") from unknown
    except OverflowError as error:
        raise RequestError(f"{numbers}: every number must be from 0 to {highest}", param=numbers) from error
    except ValueError as wrong:  # in compiled code, each kind of error needs a variable name of its own
        raise RequestError(str(wrong), param=named_first(wrong)) from wrong
