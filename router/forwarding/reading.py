"""Reading a request: what it asks for, and its prompt as routing knows it, which may take a while."""

from __future__ import annotations

from indexer.errors import RequestError
from router.apis.endpoints import Call, read_call
from router.apis.requests import RoutedRequest
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext
from router.routing.routed_prompt import RoutedPrompt
from router.telemetry.spans import Span


def read_prompt(
    services: ProxyServices, context: RequestContext, body: bytes, outline: bytes, span: Span | None
) -> tuple[RoutedRequest, RoutedPrompt | None]:
    """What is asked, and the prompt as routing knows it; no prompt where `read_prompt_aside` has to read it.

    `outline`: what to read where the prompt does not count. `span`: of reading; it is ended. Raises RequestError.
    """
    head, router = context.head, services.router
    try:
        call = Call(head.method, head.path, head.headers, body, head.naming, outline)
        request = read_call(call, with_prompt=router.needs_prompts, seen=router.body_cache)
        prompt = router.read_now(request, len(body))
    except RequestError as error:
        if span is not None:
            span.end(type(error).__name__)
        raise
    if span is not None and prompt is not None:
        _end(span, prompt)
    return request, prompt


async def read_prompt_aside(
    services: ProxyServices, request: RoutedRequest, body: bytes, span: Span | None
) -> RoutedPrompt:
    """The same where the prompt takes long to read."""
    try:
        prompt = await services.router.read_aside(request, len(body))
    except RequestError as error:
        if span is not None:
            span.end(type(error).__name__)
        raise
    if span is not None:
        _end(span, prompt)
    return prompt


def _end(span: Span, prompt: RoutedPrompt) -> None:
    span.set(model=prompt.name or "", prompt_tokens=prompt.tokens)
    span.end()
