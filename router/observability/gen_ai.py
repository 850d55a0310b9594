"""Span and metric attributes by OpenTelemetry's conventions for generative AI (semantic-conventions-genai 0.1.0).

No attribute has a part of a prompt or of an answer.
"""

from __future__ import annotations

from typing import Any, Final

from router.apis.requests import RoutedRequest
from router.apis.usage import Usage
from router.fleet.discovery import Engine
from router.fleet.worker import Worker
from router.observability.spans import RequestTrace

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
# The provider is the engine; the router itself until a worker answers, or for engines without a known name.
_PROVIDERS: Final = {Engine.VLLM: "vllm", Engine.SGLANG: "sglang"}
_ROUTER: Final = "kvrouter"


def describe_request(trace: RequestTrace, path: str, request: RoutedRequest) -> None:
    """Name the span of a request, and set what is known before its answer. Other operations keep their span."""
    operation = _OPERATIONS.get(path)
    if operation is None:
        return
    trace.rename(f"{operation} {request.name}" if request.name else operation)
    attributes: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": _ROUTER}
    if request.name:
        attributes["gen_ai.request.model"] = request.name
    if request.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.max_tokens
    if request.answers != 1:
        attributes["gen_ai.request.choice.count"] = request.answers
    if request.identity is not None and not request.identity.by_user:
        attributes["gen_ai.conversation.id"] = request.session
    trace.set(**attributes)


def describe_answer(trace: RequestTrace, path: str, worker: Worker, status: int) -> None:
    """Set the engine that answers, and the status if it is an error."""
    if path in _OPERATIONS:
        engine = None if worker.description is None else worker.description.engine
        if engine in _PROVIDERS:
            trace.set(**{"gen_ai.provider.name": _PROVIDERS[engine]})
        if status >= 400:
            trace.set(**{"error.type": str(status)})


def describe_usage(trace: RequestTrace, path: str, usage: Usage) -> None:
    """Set the tokens that the engine counted."""
    if path in _OPERATIONS:
        tokens = {"gen_ai.usage.input_tokens": usage.prompt, "gen_ai.usage.output_tokens": usage.completion}
        if usage.cached is not None:
            tokens["gen_ai.usage.cache_read.input_tokens"] = usage.cached
        trace.set(**tokens)


def gen_ai_attributes(
    path: str, model: str | None, worker: Worker | None, error: str | None = None
) -> dict[str, str] | None:
    """Return the attributes of a metric; None for paths of other operations."""
    operation = _OPERATIONS.get(path)
    if operation is None:
        return None
    engine = None if worker is None or worker.description is None else worker.description.engine
    provider = _ROUTER if engine is None else _PROVIDERS.get(engine, _ROUTER)
    attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": provider}
    if model:
        attributes["gen_ai.request.model"] = model
    if error is not None:
        attributes["error.type"] = error
    return attributes


class GenAiMetrics:
    """Histograms of requests by the conventions. Times are in seconds."""

    def ended(self, path: str, model: str | None, worker: Worker | None, seconds: float, error: str | None) -> None:
        """Record the duration of a request. `error`: the status or the reason of a failure."""
        raise NotImplementedError

    def first_token(self, path: str, model: str | None, worker: Worker, seconds: float) -> None:
        """Record the time to the first token of a stream."""
        raise NotImplementedError

    def output_tokens(self, path: str, model: str | None, worker: Worker, seconds: float) -> None:
        """Record the mean time of an output token after the first one."""
        raise NotImplementedError

    def stop(self) -> None:
        """Export the last values, and end the thread of the export."""
        raise NotImplementedError
