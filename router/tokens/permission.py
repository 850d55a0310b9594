"""The permission to send a worker the router's token ids of a prompt, which it then does not tokenize itself.

An engine computes whatever ids it receives. So they must be proved: a trial compared the router's ids with those that
this worker computes, for each kind of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from router.fleet.discovery import Engine
from router.fleet.worker import Worker
from router.tokens.agreement import Reference, TokenizerRoute
from router.tokens.model_state import ModelState
from router.tokens.model_tokenizer import ModelTokenizer
from router.tokens.probes import ProbeKind

# Older releases of vLLM accept ids without checking them, and beside media; those of SGLang ignore them.
_LEAST: Final = {Engine.VLLM: (0, 32, 0), Engine.SGLANG: (0, 5, 13)}
_VERSION: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class Permission:
    """The kinds of prompts whose ids a worker may receive; without any, the reason."""

    kinds: frozenset[ProbeKind] = frozenset()
    reason: str = ""


def ids_sent_to(reasons: Mapping[str, str]) -> str:
    """Describe in a few words which workers receive ids. `reasons`: by worker, why not; "" if it receives them."""
    against = {worker: reason for worker, reason in reasons.items() if reason}
    text = f"ids sent to {len(reasons) - len(against)} of {len(reasons)} workers"
    for worker, reason in list(against.items())[:1]:
        text += f"; not to {worker}, because {reason}"
    return text


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
    if description is None or description.engine not in _LEAST:
        return "the engine is neither vLLM nor SGLang"
    if tried is None or not tried.ended or tried.agreement is None or tried.description is not description:
        return "its trial has not ended"
    if tried.miscounted:
        return "an answer reported another number of prompt tokens than was sent"
    if tried.local is not tokenizer.local:
        return "its trial was with another tokenizer"
    version, template, least = tried.release.version, tried.release.chat_template, _LEAST[description.engine]
    if not _is_at_least(version, least):
        first = ".".join(map(str, least))
        return f"its version is {version or 'unknown'}, and {description.engine} supports ids from {first} on"
    if template and not template.endswith(".jinja"):
        return f"its conversation template {template} may have stop strings, which do not apply to ids"
    if tried.agreement.reference not in (Reference.RENDER, Reference.COMPUTED):
        return "it does not return the tokens that it computes"
    return ""


def _is_at_least(version: str, least: tuple[int, int, int]) -> bool:
    parts = _VERSION.match(version)
    return parts is not None and tuple(int(part or 0) for part in parts.groups()) >= least
