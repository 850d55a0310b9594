"""The index over HTTP: `/match`, and registration and queries in the shape of Mooncake's RFC 1403.

`POST /match`       who would serve how much of a prompt from its cache
`POST /register`    follow a stream          `POST /unregister`   forget it
`POST /query`       who holds how much of a token sequence, by tenant and instance
`POST /query_by_hash`   the same for prefix hashes
`GET  /dump`        everything, for another indexer to begin with
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from secrets import compare_digest
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from indexer.cores import native_core
from indexer.errors import RequestError, error_body
from indexer.hashing import PackedPrompt
from indexer.holdings import Target
from indexer.indexer import Indexer, Registration, TargetReport
from indexer.matching import Match
from indexer.names import WorkerNames
from indexer.openapi import errors, json_body
from indexer.queries import DEFAULT_TENANT, HashQuery, MatchQuery, UnknownModelError
from kvevents import EventSource, Tier

# Reads the body of `/match`, tokenizing its prompt. Raises RequestError.
ReadMatch = Callable[[bytes], Awaitable[MatchQuery]]
# A registration that may be followed, with addresses in the place of names. Raises ValueError, the field first.
Admit = Callable[[Registration], Awaitable[Registration]]

T = TypeVar("T")

_LONGEST_NAME = 512  # characters


class RegisterBody(msgspec.Struct, forbid_unknown_fields=False):
    """`POST /register`: one DP rank's stream."""

    endpoint: str
    modelname: str
    instance_id: str
    type: Literal["vLLM", "SGLang"] = "vLLM"
    replay_endpoint: str | None = None
    block_size: int | None = None
    dp_rank: int = 0
    topic: str = ""
    lora_name: str | None = None
    tenant_id: str = DEFAULT_TENANT
    curve_server_key: str | None = None


class UnregisterBody(msgspec.Struct):
    """`POST /unregister`: an instance, or the part of it that the other fields name."""

    instance_id: str
    modelname: str | None = None
    dp_rank: int | None = None
    tenant_id: str = DEFAULT_TENANT


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


def index_routes(indexer: Indexer, read_match: ReadMatch, admit: Admit, token: str) -> APIRouter:
    """The routes of the index API; those that change something want the token, unless it is empty."""
    routes, questions = APIRouter(), APIRouter(route_class=_PlainRoute)
    protected = [Depends(token_check(token))]

    @questions.post("/match", openapi_extra=json_body(MatchBody), responses=errors(400, 404))
    async def match(request: Request) -> Response:
        """How many tokens of a prompt each target would serve from its cache, the best first."""
        query = await read_match(await request.body())
        matches = _ask(indexer.match, query, "token_ids", 2**32 - 1)
        return _json(
            {
                "model": query.model,
                "tokens": len(query.token_ids),
                "matches": [_match(indexer.names, m) for m in matches],
            }
        )

    @routes.post(
        "/register",
        status_code=201,
        dependencies=protected,
        openapi_extra=json_body(RegisterBody),
        responses=errors(400, 401),
    )
    async def register(request: Request) -> Response:
        """Follow the event stream of one DP rank. The same registration twice does nothing; another starts it anew."""
        body = _decode(await request.body(), RegisterBody)
        registration = _registration(body)
        try:
            indexer.register(await admit(registration))
        except ValueError as error:
            raise RequestError(str(error), param=_named_first(error)) from error
        return _json({"status": "registered", "instance_id": body.instance_id, "dp_rank": body.dp_rank}, 201)

    @routes.post(
        "/unregister",
        dependencies=protected,
        openapi_extra=json_body(UnregisterBody),
        responses=errors(400, 401, 404),
    )
    async def unregister(request: Request) -> Response:
        """Follow the streams of an instance, or of the part that is named, no longer, and forget what they told."""
        body = _decode(await request.body(), UnregisterBody)
        targets = [known.target for known in indexer.registered() if _named(known.target, body)]
        if not targets:
            raise RequestError(
                f"no registered target has instance_id {body.instance_id!r} in tenant {body.tenant_id!r}",
                status=404,
                type="not_found_error",
                param="instance_id",
            )
        indexer.unregister(targets)
        return _json({"status": "unregistered", "instance_id": body.instance_id, "targets": len(targets)})

    @questions.post("/query", openapi_extra=json_body(QueryBody), responses=errors(400, 404))
    async def query(request: Request) -> Response:
        """How much of a token sequence each instance holds, its last block too."""
        asked = _query(await request.body())
        matches = _ask(indexer.longest, asked, "token_ids", 2**32 - 1)
        return _json({asked.tenant: _by_instance(indexer.names, matches)})

    @questions.post("/query_by_hash", openapi_extra=json_body(HashQueryBody), responses=errors(400, 404))
    async def query_by_hash(request: Request) -> Response:
        """The same for prefix hashes."""
        body = _decode(await request.body(), HashQueryBody)
        asked = HashQuery(body.model, body.block_hashes, body.block_size, body.tenant_id)
        return _json(
            {
                body.tenant_id: _by_instance(
                    indexer.names, _ask(indexer.longest_by_hash, asked, "block_hashes", 2**64 - 1)
                )
            }
        )

    @routes.get("/dump", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": {}}}})
    async def dump() -> StreamingResponse:
        """All that another indexer needs to begin warm, as lines of JSON."""
        return StreamingResponse(indexer.dump(), media_type="application/x-ndjson")

    routes.include_router(questions)
    return routes


def token_check(token: str) -> Callable[[Request], None]:
    """A dependency that refuses requests without `Authorization: Bearer <token>`; an empty token lets all through."""

    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if token and not (scheme.lower() == "bearer" and compare_digest(given.strip().encode(), token.encode())):
            raise RequestError(
                "This changes the state of the service. Send Authorization: Bearer with the token of server.token.",
                status=401,
                type="authentication_error",
                param="authorization",
            )

    return check


def workers_report(indexer: Indexer) -> list[dict[str, Any]]:
    """Every registered worker with its ranks: streams, sequence numbers, and blocks by tier."""
    workers: dict[tuple[str, str, str], dict[str, Any]] = {}
    for registration in indexer.registered():
        target = registration.target
        report = indexer.report(target)
        if report is None:
            continue
        worker = workers.setdefault(
            (target.tenant, target.worker, target.model),
            {"worker": target.worker, "model": target.model, "tenant": target.tenant, "ranks": []},
        )
        worker["ranks"].append(_rank(report))
    return list(workers.values())


def add_error_handlers(app: FastAPI) -> None:
    """Answer RequestError with OpenAI's error body."""

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return Response(error_body(error), error.status, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def unusable(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        refusal = RequestError(f"{name}: {first['msg']}. Send it in the {first['loc'][0]}.", param=name)
        return await refuse(request, refusal)

    @app.exception_handler(HTTPException)
    async def nothing_here(request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        refusal = RequestError(f"{request.method} here: {error.detail}.", status=error.status_code, type=kind)
        return await refuse(request, refusal)


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
    query = _decode(body, QueryBody)
    return MatchQuery(query.model, query.token_ids, query.lora_name, query.cache_salt, query.tenant_id)


def _registration(body: RegisterBody) -> Registration:
    for name in ("instance_id", "modelname", "tenant_id", "endpoint", "lora_name"):
        value = getattr(body, name)
        if not value and value is not None:
            raise RequestError(f"{name} is empty. Send a string that is not.", param=name)
        if value is not None and len(value) > _LONGEST_NAME:
            raise RequestError(f"{name} has {len(value)} characters. Send {_LONGEST_NAME} at most.", param=name)
    return Registration(
        Target(body.instance_id, body.dp_rank, body.modelname, body.tenant_id),
        EventSource(body.dp_rank, body.endpoint, body.replay_endpoint, body.topic, body.curve_server_key),
        body.type,
        body.block_size,
        body.lora_name,
    )


def _named(target: Target, body: UnregisterBody) -> bool:
    return (
        target.worker == body.instance_id
        and target.tenant == body.tenant_id
        and body.modelname in (None, target.model)
        and body.dp_rank in (None, target.dp_rank)
    )


def _ask(find: Callable[[T], list[Match]], query: T, numbers: str, highest: int) -> list[Match]:
    """Ask the indexer. Raises RequestError; `numbers` is the field whose numbers go from 0 to `highest`."""
    try:
        return find(query)
    except UnknownModelError as error:
        raise RequestError(str(error), status=404, type="not_found_error", param="model") from error
    except OverflowError as error:
        raise RequestError(f"{numbers}: every number must be from 0 to {highest}", param=numbers) from error
    except ValueError as error:
        raise RequestError(str(error), param=_named_first(error)) from error


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


def _rank(report: TargetReport) -> dict[str, Any]:
    registration, stream, holdings = report.registration, report.stream, report.holdings
    source = registration.source
    return {
        "dp_rank": registration.target.dp_rank,
        "engine": registration.engine,
        "endpoint": source and source.endpoint,
        "replay_endpoint": source and source.replay_endpoint,
        "topic": source and source.topic,
        "adapter": registration.adapter,
        "block_sizes": sorted(holdings.block_sizes) or ([registration.block_size] if registration.block_size else []),
        "state": stream.state if stream else ("connecting" if source else "no stream"),
        "last_seq": stream.last_seq if stream else None,
        "pending_batches": stream.pending if stream else 0,
        "lag_seconds": stream.lag if stream else None,
        "seconds_since_event": time.time() - stream.received_at if stream and stream.received_at else None,
        "seconds_since_confirmed": stream.confirmed if stream else None,
        "batches": msgspec.to_builtins(stream.sequence) if stream else None,
        "unreadable": msgspec.to_builtins(stream.unreadable) if stream else None,
        "blocks": {tier.name.lower(): holdings.blocks[tier] for tier in Tier},
        "orphans": holdings.orphans,
        "counters": msgspec.to_builtins(holdings.counters),
    }


def _decode(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body. Raises RequestError with the path to what does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{error}. Send a JSON object as the API describes.", param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object.") from error


def _named_first(error: ValueError) -> str:
    """The field that an error of the indexer begins with."""
    return str(error).partition(":")[0]


def _field(message: str) -> str | None:
    """The field that a msgspec message is about: the path it ends with, or the field it says is missing."""
    _, quote, path = message.rpartition("`$.")
    if quote:
        return path.removesuffix("`").partition(".")[0].partition("[")[0]
    missing = message.partition("required field `")[2].partition("`")[0]
    return missing or None


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
