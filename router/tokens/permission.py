"""The permission to send a worker the router's token ids of a prompt, which it then does not tokenize itself.

An engine computes whatever ids it receives. So they must be proved: a trial compared the router's ids with those that
this worker computes, for each kind of the prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from router.fleet.discovery import Engine
from router.fleet.worker import Worker
from router.settings import Role
from router.tokens.agreement import Reference, TokenizerRoute
from router.tokens.model_state import ModelState
from router.tokens.model_tokenizer import ModelTokenizer
from router.tokens.probes import ProbeKind

# Older releases accept ids without checking them, and beside media.
_LEAST_VLLM: Final = (0, 32)
_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Permission:
    """The kinds of prompts whose ids a worker may receive; without any, the reason."""

    kinds: frozenset[ProbeKind] = frozenset()
    reason: str = ""


def permission(model: ModelState, tokenizer: ModelTokenizer | None, worker: Worker) -> Permission:
    """Return the kinds of prompts whose ids a worker may receive for a model."""
    reason = _reason_against(model, tokenizer, worker)
    if reason:
        return Permission(reason=reason)
    agreement = model.trials[worker.url].agreement
    assert agreement is not None
    kinds = agreement.with_route(TokenizerRoute.LOCAL)
    return Permission(kinds) if ProbeKind.PLAIN in kinds else Permission(reason="its tokens of a plain chat differ")


def _reason_against(model: ModelState, tokenizer: ModelTokenizer | None, worker: Worker) -> str:
    description, tried = worker.description, model.trials.get(worker.url)
    if tokenizer is None or tokenizer.local is None:
        return "the router has no tokenizer of its own"
    if tokenizer.suspected:
        return "answers report other prompts than the router computes"
    if tokenizer.local.depends_on_more:
        return "its chats depend on the date, or have an encoder of their own"
    if description is None or description.engine is not Engine.VLLM:
        return "the engine is not vLLM"
    if description.role is not Role.BOTH:
        return "prefill and decode have different workers"
    if tried is None or not tried.ended or tried.agreement is None or tried.description is not description:
        return "its trial has not ended"
    if tried.miscounted:
        return "an answer reported another number of prompt tokens than was sent"
    if tried.local is not tokenizer.local:
        return "its trial was with another tokenizer"
    if not _is_new_enough(tried.version):
        return f"its version is {tried.version or 'unknown'}, and vLLM 0.32 is the first that checks ids"
    if tried.agreement.reference not in (Reference.RENDER, Reference.COMPUTED):
        return "it does not return the tokens that it computes"
    return ""


def _is_new_enough(version: str) -> bool:
    release = _RELEASE.match(version)
    return release is not None and (int(release[1]), int(release[2])) >= _LEAST_VLLM
