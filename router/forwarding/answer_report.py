"""The record of an answer for functions after it (`hooks.after`)."""

from __future__ import annotations

import time
from typing import Final

from router.forwarding.attempts import Attempts
from router.forwarding.request_context import RequestContext
from router.forwarding.response import ProxiedResponse
from router.hooks.interface import Answer

_now: Final = time.monotonic
_CLIENT_LEFT: Final = 499
_BAD_GATEWAY: Final = 502


def answer_of(
    context: RequestContext,
    attempts: Attempts | None,
    response: ProxiedResponse | None,
    arrived: float,
    problem: str | None,
    status: int,
) -> Answer:
    """Return the record of a request that ends now.

    - `attempts`, `response`: None before its prompt was read, and before a worker answered.
    - `arrived`: when it was complete, by `time.monotonic`.
    - `problem`, `status`: as of a failure; None and 0 after success.
    """
    now = _now()
    prompt = None if attempts is None else attempts.prompt
    assignment = None if attempts is None or response is None else attempts.assignment
    prefill = None if assignment is None else assignment.prefill
    usage = None if response is None else response.usage
    identity = None if prompt is None else prompt.identity
    first_byte = response.first_byte_at if response is not None else 0.0
    if not status and response is not None:
        status = response.head.status
    return Answer(
        id=context.id.decode("latin-1"),
        method=context.head.method,
        path=context.head.path,
        status=status or (_BAD_GATEWAY if problem != "client left" else _CLIENT_LEFT),
        model="" if prompt is None else prompt.name or "",
        tenant=context.tenant.name if context.tenant is not None else "",
        session="" if identity is None else identity.session,
        program="" if identity is None else identity.program,
        worker=None if assignment is None else assignment.worker.name,
        dp_rank=None if assignment is None else assignment.target.dp_rank,
        prefill_worker=None if prefill is None else prefill.worker.name,
        prompt_tokens=None if usage is None else usage.prompt,
        completion_tokens=None if usage is None else usage.completion,
        cached_tokens=None if usage is None else usage.cached,
        routed_tokens=0 if prompt is None else prompt.tokens,
        received=time.time() - (now - arrived),
        first_byte=first_byte - arrived if first_byte else None,
        duration=now - arrived,
        problem=problem,
        notes=context.notes or {},
    )
