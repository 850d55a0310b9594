"""Token ids that are sent with chats, so that the engine neither renders nor tokenizes them again.

    prompt read ──▶ offer ──▶ each attempt: the worker's permission ──▶ with ids, or as the client sent it
                                                                              └──▶ usage: counted as sent?

An offer belongs to one prompt. Each attempt asks its worker's permission anew, and the body of the request is never
changed. A stream that another worker continues has another prompt, so it has no offer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from indexer.hashing import PackedPrompt
from router.apis.endpoints import CHAT
from router.apis.prompt_ids import may_send_ids, with_prompt_ids
from router.apis.requests import ChatPrompt, RoutedRequest
from router.apis.usage import Usage
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.routing.prompt_reader import RoutedPrompt
from router.tokens.probes import ProbeKind, probe_kinds
from router.tokens.tokenizer_source import TokenizerSource

# One request of this number is sent without ids, and its usage is compared in the same way.
_SAMPLED: Final = 64


class TokenForwarding:
    """The decision which requests carry token ids, and the check of their answers."""

    def __init__(self, source: TokenizerSource, fleet: Fleet, registry: CollectorRegistry) -> None:
        self.source = source
        self._fleet = fleet
        self._sent = 0
        label = ["model"]
        self._requests = Counter(
            "kvrouter_forwarded_token_requests", "Requests that were sent with token ids", label, registry=registry
        )
        self._bytes = Counter(
            "kvrouter_forwarded_token_bytes", "Bytes that token ids added to requests", label, registry=registry
        )
        self._mismatches = Counter(
            "kvrouter_forwarded_token_mismatches",
            "Answers that reported another number of prompt tokens than was sent",
            label,
            registry=registry,
        )

    def offer(self, path: str, body: bytes, request: RoutedRequest, prompt: RoutedPrompt) -> TokenOffer | None:
        """Return the ids that attempts of a request may send; None if its prompt depends on more than these ids."""
        chat, name = request.prompt, prompt.name
        if path != CHAT or not isinstance(chat, ChatPrompt) or name is None or not prompt.exact or prompt.by_text:
            return None
        model, ids = self._fleet.model_of(name), prompt.token_ids
        if model is None or len(ids) != 1 or ids[0].media or not len(ids[0]):
            return None
        if not self.source.tokenizes_alone(model, chat) or not may_send_ids(body, chat):
            return None
        return TokenOffer(self, name, model, probe_kinds(chat), ids[0])

    def permits(self, worker: Worker, name: str, model: str, kinds: Collection[ProbeKind]) -> bool:
        """Return whether a worker may receive ids of a prompt of these kinds, for the model by this name."""
        served = worker.description.models.get(name) if worker.description is not None else None
        if served is None or served.adapter is not None or served.model != model:
            return False
        return self.source.permission(worker, model).kinds.issuperset(kinds)

    def is_sample(self) -> bool:
        """Return whether the next request is sent without ids."""
        self._sent += 1
        return self._sent % _SAMPLED == 0

    def sent(self, model: str, more: int) -> None:
        """Count a request with ids, which made its body `more` bytes longer."""
        self._requests.labels(model).inc()
        self._bytes.labels(model).inc(more)

    def answered(self, worker: Worker, model: str, sent: int, counted: int) -> None:
        """Stop sending ids to a worker that counts another number of prompt tokens than was sent."""
        if sent != counted:
            self._mismatches.labels(model).inc()
            self.source.miscounted(worker, model)


class TokenOffer:
    """One prompt's token ids, for the attempts of its request."""

    __slots__ = ("_forwarding", "_kinds", "_model", "_name", "_prompt", "_worker")

    def __init__(
        self, forwarding: TokenForwarding, name: str, model: str, kinds: Collection[ProbeKind], prompt: PackedPrompt
    ) -> None:
        self._forwarding = forwarding
        self._name = name
        self._model = model
        self._kinds = kinds
        self._prompt = prompt
        self._worker: Worker | None = None  # whose answer is checked

    def body_to(self, worker: Worker, body: bytes) -> bytes:
        """Return the body for an attempt: with ids if the worker may receive them."""
        forwarding, self._worker = self._forwarding, None
        if not forwarding.permits(worker, self._name, self._model, self._kinds):
            return body
        self._worker = worker
        if forwarding.is_sample():
            return body
        longer = with_prompt_ids(body, self._prompt)
        forwarding.sent(self._model, len(longer) - len(body))
        return longer

    def answered(self, usage: Usage | None) -> None:
        """Check the usage of a complete answer, if it reported any."""
        if self._worker is not None and usage is not None:
            self._forwarding.answered(self._worker, self._model, len(self._prompt), usage.prompt)
