"""The questions of the index API, which come by the thousands: who holds how much of a prompt.

`POST /match`       who would serve how much of a prompt from its cache
`POST /query`       who holds how much of a token sequence, by tenant and instance
`POST /query_by_hash`   the same for prefix hashes
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from indexer.cores import native_core
from indexer.errors import RequestError, error_body
from indexer.hashing import PackedPrompt
from indexer.indexer import Indexer
from indexer.matching import Match
from indexer.names import WorkerNames
from indexer.openapi import errors, json_body
from indexer.queries import DEFAULT_TENANT, HashQuery, MatchQuery, UnknownModelError
from kvevents import Tier

# Reads the body of `/match`, tokenizing its prompt. Raises RequestError.
ReadMatch = Callable[[bytes], Awaitable[MatchQuery]]

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
    """A `QueryBody` whose token ids are left as they came: reading those of a long prompt takes most of the time."""

    model: str
    token_ids: msgspec.Raw
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


class _PlainRoute(APIRoute):
    """A route whose endpoint takes the request and gives the answer: FastAPI has nothing to check of either."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


class QuestionsFirst:
    """Before an application: answers questions itself. FastAPI takes longer to find their routes than the index takes
    to answer."""

    def __init__(self, app: ASGIApp, questions: APIRouter) -> None:
        self._app = app
        self._answers = {route.path: route.endpoint for route in questions.routes if isinstance(route, _PlainRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        answer = self._answers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if answer is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await answer(Request(scope, receive))
        except RequestError as error:
            response = refusal(error)
        await response(scope, receive, send)


def question_routes(indexer: Indexer, read_match: ReadMatch) -> APIRouter:
    """The routes that ask who holds what."""
    questions = APIRouter(route_class=_PlainRoute)

    @questions.post("/match", openapi_extra=json_body(MatchBody), responses=errors(400, 404))
    async def match(request: Request) -> Response:
        """How many tokens of a prompt each target would serve from its cache, the best first."""
        query = await read_match(await request.body())
        matches = _ask(indexer.match, query, "token_ids", 2**32 - 1)
        return json_response(
            {
                "model": query.model,
                "tokens": len(query.token_ids),
                "matches": [_match(indexer.names, m) for m in matches],
            }
        )

    @questions.post("/query", openapi_extra=json_body(QueryBody), responses=errors(400, 404))
    async def query(request: Request) -> Response:
        """How much of a token sequence each instance holds, its last block too."""
        asked = _query(await request.body())
        matches = _ask(indexer.longest, asked, "token_ids", 2**32 - 1)
        return json_response({asked.tenant: _by_instance(indexer.names, matches)})

    @questions.post("/query_by_hash", openapi_extra=json_body(HashQueryBody), responses=errors(400, 404))
    async def query_by_hash(request: Request) -> Response:
        """The same for prefix hashes."""
        body = decoded(await request.body(), HashQueryBody)
        asked = HashQuery(body.model, body.block_hashes, body.block_size, body.tenant_id)
        return json_response(
            {
                body.tenant_id: _by_instance(
                    indexer.names, _ask(indexer.longest_by_hash, asked, "block_hashes", 2**64 - 1)
                )
            }
        )

    return questions


def _query(body: bytes) -> MatchQuery:
    """What `/query` asks. Raises RequestError."""
    core = native_core()
    if core is not None:
        try:
            packed = _decode_packed(body)
            tokens = core.packed_numbers(bytes(packed.token_ids))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            tokens = None  # what is wrong is said below
        if tokens is not None:
            prompt = PackedPrompt(tokens)
            return MatchQuery(packed.model, prompt, packed.lora_name, packed.cache_salt, packed.tenant_id)
    query = decoded(body, QueryBody)
    return MatchQuery(query.model, query.token_ids, query.lora_name, query.cache_salt, query.tenant_id)


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


def _match(names: WorkerNames, match: Match) -> dict[str, Any]:
    return {
        "worker": names.of(match.target.worker),
        "dp_rank": match.target.dp_rank,
        "matched_tokens": match.matched_tokens,
        "tiers": {tier.name.lower(): match.tiers[tier] for tier in Tier},
    }


def _by_instance(names: WorkerNames, matches: list[Match]) -> dict[str, Any]:
    """RFC 1403's answer: an instance's tiers are those of its rank that holds the most."""
    instances: dict[str, Any] = {}
    for match in matches:
        tiers = {tier.name: match.tiers[tier] for tier in (Tier.GPU, Tier.CPU, Tier.DISK)}
        best = {"longest_matched": match.matched_tokens, **tiers, "DP": {}}
        instances.setdefault(names.of(match.target.worker), best)["DP"][str(match.target.dp_rank)] = (
            match.matched_tokens
        )
    return instances


def refusal(error: RequestError) -> Response:
    """The answer to a request that cannot be served."""
    return Response(error_body(error), error.status, media_type="application/json")


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
    return Response(msgspec.json.encode(value), status, media_type="application/json")
