"""Parsing of a request, and of its prompt, which may take a while."""

from __future__ import annotations

from http_api.errors import RequestError
from router.apis.abilities import Ability
from router.apis.endpoints import Call, read_call
from router.apis.requests import RoutedRequest
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext
from router.observability.spans import Span
from router.routing.prompt_reader import RoutedPrompt


def read_request(
    services: ProxyServices, context: RequestContext, body: bytes, model_body: bytes, span: Span | None
) -> RoutedRequest:
    """Parse a request, in any thread; by load, parse `model_body` alone. Raises RequestError after ending `span`."""
    head, reader = context.head, services.reader
    try:
        call = Call(head.method, head.path, head.headers, body, head.session_headers, model_body)
        return read_call(call, with_prompt=reader.needs_prompts)
    except RequestError as error:
        _fail(span, error)
        raise


def prompt_now(
    services: ProxyServices, request: RoutedRequest, size: int, needs: frozenset[Ability], span: Span | None
) -> RoutedPrompt | None:
    """Return the prompt of a body of `size` bytes if it takes no time; None if it has to be read aside.

    Ends `span`. Raises RequestError.
    """
    try:
        prompt = services.reader.read_now(request, size)
    except RequestError as error:
        _fail(span, error)
        raise
    if prompt is not None:
        prompt.needs = needs
        _end(span, prompt)
    return prompt


async def read_prompt_aside(
    services: ProxyServices, request: RoutedRequest, size: int, needs: frozenset[Ability], span: Span | None
) -> RoutedPrompt:
    """Return the prompt of a body of `size` bytes, which takes long to read. Ends `span`. Raises RequestError."""
    try:
        prompt = await services.reader.read_aside(request, size)
    except RequestError as error:
        _fail(span, error)
        raise
    prompt.needs = needs
    _end(span, prompt)
    return prompt


def _end(span: Span | None, prompt: RoutedPrompt) -> None:
    if span is not None:
        span.set(model=prompt.name or "", prompt_tokens=prompt.tokens)
        span.end()


def _fail(span: Span | None, error: RequestError) -> None:
    if span is not None:
        span.end(type(error).__name__)
