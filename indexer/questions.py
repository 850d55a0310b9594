"""The questions of the index API, which come by the thousands: who holds how much of a prompt.

`POST /match`       who would serve how much of a prompt from its cache
`POST /query`       who holds how much of a token sequence, by tenant and instance
`POST /query_by_hash`   the same for prefix hashes
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from http_api.errors import RequestError, named_first
from indexer.answers import Answers
from indexer.cores import native_core
from indexer.hashing import PackedPrompt
from indexer.indexer import Indexer
from indexer.matching import Match
from indexer.queries import HashQuery, MatchQuery, UnknownModelError
from indexer.question_bodies import HashQueryBody, PackedQuery, QueryBody, decoded

# Reads the body of `/match`, tokenizing its prompt: at once, or as soon as it can. Raises RequestError.
ReadMatch = Callable[[bytes], MatchQuery | Awaitable[MatchQuery]]
# From the body of a question to the JSON of its answer, at once or as soon as it can. Raises RequestError.
Answer = Callable[[bytes], bytes | Awaitable[bytes]]
# The native core's: a JSON list of token ids, packed; nothing of what is not just that.
PackedNumbers = Callable[[bytes], bytes | None]

T = TypeVar("T")

_decode_packed: Final = msgspec.json.Decoder(PackedQuery).decode


class Questions:
    """Answers questions, wherever they come in. `by_path`: how each of them is answered."""

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
        """How many tokens of a prompt each target would serve from its cache, the best first."""
        query = self._read_match(body)
        return self._matched(query) if isinstance(query, MatchQuery) else self._matched_later(query)

    async def _matched_later(self, query: Awaitable[MatchQuery]) -> bytes:
        return self._matched(await query)

    def _matched(self, query: MatchQuery) -> bytes:
        matches = _ask(self._indexer.match, query, "token_ids", 2**32 - 1)
        return self._answers.by_target(query.model, query.tenant, len(query.token_ids), matches)

    def query(self, body: bytes) -> bytes:
        """How much of a token sequence each instance holds, its last block too."""
        query = _query(body, self._packed_numbers)
        matches = _ask(self._indexer.longest, query, "token_ids", 2**32 - 1)
        return self._answers.by_instance(query.model, query.tenant, matches)

    def query_by_hash(self, body: bytes) -> bytes:
        """The same for prefix hashes."""
        asked = decoded(body, HashQueryBody)
        query = HashQuery(asked.model, asked.block_hashes, asked.block_size, asked.tenant_id)
        matches = _ask(self._indexer.longest_by_hash, query, "block_hashes", 2**64 - 1)
        return self._answers.by_instance(query.model, query.tenant, matches)


def _query(body: bytes, packed_numbers: PackedNumbers | None) -> MatchQuery:
    """What `/query` asks. Raises RequestError."""
    packed = None if packed_numbers is None else _packed_query(body, packed_numbers)
    if packed is not None:
        return packed
    query = decoded(body, QueryBody)
    return MatchQuery(query.model, query.token_ids, query.lora_name, query.cache_salt, query.tenant_id)


def _packed_query(body: bytes, packed_numbers: PackedNumbers) -> MatchQuery | None:
    """The same of a body with one list, which is of numbers: they go to the core as they came, and only the rest is
    decoded. Nothing of any other body, nor of one that is wrong."""
    start, end = body.find(b"["), body.rfind(b"]") + 1
    if not 0 <= start < end:  # compiled, a slice that ends before it begins is an error
        return None
    tokens = packed_numbers(body[start:end])
    if tokens is None:
        return None
    try:
        # No other list can be left than the empty one, so token_ids is that, or no list.
        rest = _decode_packed(b"%b[]%b" % (body[:start], body[end:]))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return MatchQuery(rest.model, PackedPrompt(tokens), rest.lora_name, rest.cache_salt, rest.tenant_id)


def _ask(find: Callable[[T], list[Match]], query: T, numbers: str, highest: int) -> list[Match]:
    """Ask the indexer. Raises RequestError; `numbers` is the field whose numbers go from 0 to `highest`."""
    try:
        return find(query)
    except UnknownModelError as unknown:
        raise RequestError(str(unknown), status=404, type="not_found_error", param="model") from unknown
    except OverflowError as error:
        raise RequestError(f"{numbers}: every number must be from 0 to {highest}", param=numbers) from error
    except ValueError as wrong:  # compiled, each kind of error needs a name of its own
        raise RequestError(str(wrong), param=named_first(wrong)) from wrong
