"""The questions of the index API, which come by the thousands: who holds how much of a prompt.

`POST /match`       who would serve how much of a prompt from its cache
`POST /query`       who holds how much of a token sequence, by tenant and instance
`POST /query_by_hash`   the same for prefix hashes
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from indexer.answers import Answers
from indexer.cores import native_core
from indexer.errors import RequestError, error_body, error_headers
from indexer.hashing import PackedPrompt
from indexer.indexer import Indexer
from indexer.matching import Match
from indexer.openapi import errors, json_body
from indexer.queries import DEFAULT_TENANT, HashQuery, MatchQuery, UnknownModelError

# Reads the body of `/match`, tokenizing its prompt: at once, or as soon as it can. Raises RequestError.
ReadMatch = Callable[[bytes], MatchQuery | Awaitable[MatchQuery]]
# From the body of a question to the JSON of its answer, at once or as soon as it can. Raises RequestError.
Answer = Callable[[bytes], bytes | Awaitable[bytes]]
# The native core's: a JSON list of token ids, packed; nothing of what is not just that.
PackedNumbers = Callable[[bytes], bytes | None]

T = TypeVar("T")


class MatchBody(msgspec.Struct):
    """`POST /match`: a prompt in one of three forms; whatever changes how it is rendered may stand beside it."""

    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    token_ids: list[int] | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str | None = None


class HashQueryBody(msgspec.Struct):
    """`POST /query_by_hash`: the prefix hashes of consecutive blocks, from the start of a prompt."""

    model: str
    block_hashes: list[int]
    block_size: int | None = None
    tenant_id: str = DEFAULT_TENANT


class _PackedQuery(msgspec.Struct):
    """A `QueryBody` whose token ids were taken out, which leaves an empty list."""

    model: str
    token_ids: list[None]
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str = DEFAULT_TENANT


class QueryBody(msgspec.Struct):
    """`POST /query`: a token sequence."""

    model: str
    token_ids: list[int]
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str = DEFAULT_TENANT


_decode_packed = msgspec.json.Decoder(_PackedQuery).decode


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


def question_routes(questions: Questions) -> APIRouter:
    """The routes that ask who holds what."""
    routes = APIRouter()

    @routes.post("/match", openapi_extra=json_body(MatchBody), responses=errors(400, 404))
    async def match(request: Request) -> Response:
        """How many tokens of a prompt each target would serve from its cache, the best first."""
        answer = questions.match(await request.body())
        return _json(answer if isinstance(answer, bytes) else await answer)

    @routes.post("/query", openapi_extra=json_body(QueryBody), responses=errors(400, 404))
    async def query(request: Request) -> Response:
        """How much of a token sequence each instance holds, its last block too."""
        return _json(questions.query(await request.body()))

    @routes.post("/query_by_hash", openapi_extra=json_body(HashQueryBody), responses=errors(400, 404))
    async def query_by_hash(request: Request) -> Response:
        """The same for prefix hashes."""
        return _json(questions.query_by_hash(await request.body()))

    return routes


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
    except UnknownModelError as error:
        raise RequestError(str(error), status=404, type="not_found_error", param="model") from error
    except OverflowError as error:
        raise RequestError(f"{numbers}: every number must be from 0 to {highest}", param=numbers) from error
    except ValueError as error:
        raise RequestError(str(error), param=named_first(error)) from error


def refusal(error: RequestError) -> Response:
    """The answer to a request that cannot be served."""
    body = error_body(error)
    answer = Response(body, error.status)
    answer.raw_headers = error_headers(error, body)
    return answer


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body. Raises RequestError with the path to what does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{error}. Send a JSON object as the API describes.", param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object.") from error


def named_first(error: ValueError) -> str:
    """The field that an error of the indexer begins with."""
    return str(error).partition(":")[0]


def _field(message: str) -> str | None:
    """The field that a msgspec message is about: the path it ends with, or the field it says is missing."""
    _, quote, path = message.rpartition("`$.")
    if quote:
        return path.removesuffix("`").partition(".")[0].partition("[")[0]
    missing = message.partition("required field `")[2].partition("`")[0]
    return missing or None


def json_response(value: Any, status: int = 200) -> Response:
    """An answer of JSON."""
    return _json(msgspec.json.encode(value), status)


def _json(answer: bytes, status: int = 200) -> Response:
    return Response(answer, status, media_type="application/json")
