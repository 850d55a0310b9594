"""The HTTP application of a simulated worker: the endpoints of a vLLM server that routers and users call."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from simulator.worker import engine_routes, messages_api
from simulator.worker.engine import SleepMode
from simulator.worker.messages_api import CountTokensRequest, MessagesRequest
from simulator.worker.pooling_api import EmbeddingRequest, RerankRequest, ScoreRequest
from simulator.worker.protocol import (
    AdapterRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    error_body,
)
from simulator.worker.replies import GenerateRequest
from simulator.worker.responses_api import ResponsesRequest
from simulator.worker.worker import SimulatedWorker
from worker.zmq_publisher import ZmqEventPublisher

MAX_REPORTED_ERRORS = 10


def create_app(worker: SimulatedWorker) -> FastAPI:
    """Create the application of a running worker."""
    app = FastAPI(title="Simulated worker")
    app.state.worker = worker
    routes = app.router.routes  # Shared by all workers, because FastAPI's include would copy them for each.
    routes += _routes.routes
    routes += (engine_routes.routes if worker.settings.disaggregation == "sglang" else _vllm_routes).routes
    if worker.settings.disaggregation == "nixl" and worker.settings.role == "prefill":
        from simulator.worker.kv_transfer import nixl

        routes += nixl.routes.routes
    if worker.settings.api_key:
        sglang = worker.settings.disaggregation == "sglang"
        app.add_middleware(engine_routes.KeyMiddleware, api_key=worker.settings.api_key, sglang=sglang)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _unreadable)
    return app


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _error(request, error.status, error.message, error.param)


async def _unreadable(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = [(_field(each["loc"]), each["msg"]) for each in error.errors()[:MAX_REPORTED_ERRORS]]
    message = "; ".join(dict.fromkeys(f"{field}: {text}" for field, text in found))
    return _error(request, HTTPStatus.BAD_REQUEST, message, found[0][0])


def _error(request: Request, status: HTTPStatus, message: str, param: str | None) -> JSONResponse:
    anthropic = request.url.path.startswith("/v1/messages")
    body = messages_api.error_body(status, message) if anthropic else error_body(status, message, param)
    return JSONResponse(body, status_code=status)


def _field(location: tuple[int | str, ...]) -> str:
    """Return the path of a field, without the body and without pydantic's names of union branches."""
    path = [part for part in location[1:] if isinstance(part, int) or not _is_union_branch(part)]
    if not path or isinstance(path[0], int):  # a position at which the body is not JSON
        return "body"
    return ".".join(map(str, path))


def _is_union_branch(part: str) -> bool:
    return "[" in part or part in ("str", TokenizeTextRequest.__name__, TokenizeChatRequest.__name__)


_routes = APIRouter()
_vllm_routes = APIRouter()


def _worker(request: Request) -> SimulatedWorker:
    worker: SimulatedWorker = request.app.state.worker
    return worker


@_routes.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request) -> Response:
    return await _worker(request).completions.complete(request, body)


@_routes.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    return await _worker(request).completions.chat(request, body)


@_routes.post("/v1/responses")
async def respond(body: ResponsesRequest, request: Request) -> Response:
    return await _worker(request).completions.respond(request, body)


@_routes.get("/v1/responses/{response}")
async def stored_response(response: str, request: Request) -> dict[str, Any]:
    return _worker(request).completions.responses.body(response)


@_routes.post("/v1/messages")
async def message(body: MessagesRequest, request: Request) -> Response:
    worker = _worker(request)
    if worker.settings.disaggregation == "sglang":
        body = body.with_overrides(request.headers)
    return await worker.completions.message(request, body)


@_routes.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
    tokens = await asyncio.to_thread(_worker(request).completions.chat_tokens, body.conversation())
    return {"input_tokens": len(tokens)}


@_routes.post("/generate")
async def generate(body: GenerateRequest, request: Request) -> Response:
    return await _worker(request).completions.generate(request, body)


@_routes.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
    return await asyncio.to_thread(_worker(request).pooling.embeddings, body)


@_routes.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
    return await asyncio.to_thread(_worker(request).pooling.rerank, body)


@_routes.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> dict[str, Any]:
    return await asyncio.to_thread(_worker(request).pooling.score, body)


@_routes.post("/tokenize")
async def tokenize(body: TokenizeChatRequest | TokenizeTextRequest, request: Request) -> dict[str, Any]:
    worker = _worker(request)
    if isinstance(body, TokenizeChatRequest):
        tokens = await asyncio.to_thread(worker.completions.chat_tokens, body, body.add_special_tokens)
    else:
        tokens = await asyncio.to_thread(worker.tokenizer.encode, body.prompt, body.add_special_tokens)
    return {
        "count": len(tokens),
        "max_model_len": worker.settings.max_model_len,
        "tokens": tokens,
        "token_strs": worker.tokenizer.token_strings(tokens) if body.return_token_strs else None,
    }


@_routes.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    tokenizer = _worker(request).tokenizer
    if any(token >= tokenizer.vocabulary_size for token in body.tokens):
        raise ApiError(HTTPStatus.BAD_REQUEST, "tokens: a token is not in the vocabulary.", "tokens")
    return {"prompt": tokenizer.decode(body.tokens)}


@_routes.get("/health")
async def health(request: Request) -> Response:
    alive = _worker(request).is_alive
    return Response(status_code=HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE)


@_routes.get("/version")
async def show_version() -> dict[str, str]:
    return {"version": version("kvrouter")}


@_routes.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    settings = _worker(request).settings
    created = int(time.time())
    base = {
        "id": settings.model,
        "object": "model",
        "created": created,
        "owned_by": "kvrouter",
        "root": settings.tokenizer,
        "parent": None,
        "max_model_len": settings.max_model_len,
    }
    adapters = [
        {**base, "id": adapter, "root": adapter, "parent": settings.model, "max_model_len": None}
        for adapter in _worker(request).completions.adapters
    ]
    return {"object": "list", "data": [base, *adapters]}


@_vllm_routes.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: AdapterRequest, request: Request) -> Response:
    """Serve an adapter. Its path is not read, but required."""
    worker = _worker(request)
    if not body.lora_name or not body.lora_path:
        raise ApiError(HTTPStatus.BAD_REQUEST, "Both 'lora_name' and 'lora_path' must be provided.")
    if body.lora_name in (worker.settings.model, *worker.completions.adapters):
        raise ApiError(HTTPStatus.BAD_REQUEST, f"The lora adapter '{body.lora_name}' has already been loaded.")
    worker.completions.adapters.append(body.lora_name)
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@_vllm_routes.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: AdapterRequest, request: Request) -> Response:
    adapters = _worker(request).completions.adapters
    if body.lora_name not in adapters:
        raise ApiError(HTTPStatus.NOT_FOUND, f"The lora adapter '{body.lora_name}' cannot be found.")
    adapters.remove(body.lora_name)
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@_vllm_routes.post("/sleep")
async def sleep(request: Request, level: int = 1, mode: SleepMode = "abort") -> dict[str, Any]:
    """Stop computing, as vLLM with `--enable-sleep-mode` does in development mode."""
    for engine in _worker(request).engines:
        await engine.sleep(level, mode)
    return {"status": "sleeping", "level": level}


@_vllm_routes.post("/wake_up")
async def wake_up(request: Request) -> dict[str, Any]:
    for engine in _worker(request).engines:
        engine.wake()
    return {"status": "awake", "tags": None}


@_routes.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(generate_latest(_worker(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


@_vllm_routes.get("/kv_event_sources")
async def kv_event_sources(request: Request) -> dict[str, Any]:
    worker = _worker(request)
    config = worker.settings.kv_events
    if config is None:
        return {}
    return {
        str(rank): {
            "enable_kv_cache_events": True,
            **msgspec.structs.asdict(config),
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
        }
        for rank, publisher in enumerate(reporter.publisher for reporter in worker.reporters)
        if isinstance(publisher, ZmqEventPublisher)
    }


@_routes.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, bool]:
    """Empty the cache of every rank. `success` is false if a rank has running requests and keeps its cache."""
    done = [engine.reset_prefix_cache() for engine in _worker(request).engines]
    return {"success": all(done)}
