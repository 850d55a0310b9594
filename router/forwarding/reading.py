"""What a request asks for: its body as workers get it, its prompt as routing knows it, and its urgency."""

from __future__ import annotations

from indexer.errors import RequestError
from router.admission.ticket import Ticket, read_ticket
from router.apis.endpoints import Call, read_call
from router.apis.requests import RoutedRequest
from router.apis.stream_usage import HiddenUsage, asking_for_usage
from router.forwarding.proxy_services import ProxyServices
from router.forwarding.request_context import RequestContext
from router.routing.routed_prompt import RoutedPrompt
from router.telemetry.spans import Span


def body_for_workers(
    services: ProxyServices, context: RequestContext, body: bytes, answer_is_ours: bool
) -> tuple[bytes, HiddenUsage | None]:
    """The body that workers get, and what takes out of the answer what the client did not ask for.

    `answer_is_ours`: its bytes pass the router, which may change them. Raises RequestError (400).
    """
    path, tenant = context.head.path, context.tenant
    if tenant is not None:
        body = tenant.isolated(path, body)
    if answer_is_ours and (services.ask_usage or services.passing.listening):
        asking = asking_for_usage(path, body)
        if asking:
            return asking, HiddenUsage()
    return body, None


def read_prompt(
    services: ProxyServices, context: RequestContext, body: bytes, span: Span | None
) -> tuple[RoutedRequest, RoutedPrompt | None]:
    """What is asked, and the prompt as routing knows it; no prompt where `read_prompt_aside` has to read it.

    `span`: of reading; it is ended. Raises RequestError.
    """
    head, router = context.head, services.router
    try:
        call = Call(head.method, head.path, head.headers, body, head.naming)
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


def ticket_of(context: RequestContext, prompt: RoutedPrompt, body: bytes) -> Ticket:
    """How urgent a request is that is complete now. Raises RequestError (400) naming the header at fault."""
    tenant = context.tenant
    return read_ticket(
        context.head.urgency,
        prompt.priority,
        tenant=tenant.name if tenant else "",
        best_priority=tenant.priority if tenant else None,
        tokens=prompt.tokens,
        size=len(body),
    )


def _end(span: Span, prompt: RoutedPrompt) -> None:
    span.set(model=prompt.name or "", prompt_tokens=prompt.tokens)
    span.end()
