"""Token ids that are sent with chats, so that the engine neither renders nor tokenizes them again.

    prompt read ──▶ offer ──▶ each attempt: the worker's permission ──▶ with ids, or as the client sent it
                                                                              └──▶ usage: counted as sent?

An offer belongs to one prompt. Each attempt asks its worker's permission anew, and the body of the request is never
changed. A stream that another worker continues has another prompt, so it has no offer.

A gateway may send a request to another worker than the picker chose. So all workers of the model must permit the ids.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from indexer.hashing import PackedPrompt
from router.apis.prompt_ids import is_plain_text, may_send_ids, with_input_ids, with_prompt_ids
from router.apis.requests import ChatPrompt, RoutedRequest
from router.apis.usage import Usage
from router.fleet.discovery import Engine
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.routing.disaggregation.adapters import Adapter
from router.tokens.probes import ProbeKind, probe_kinds
from router.tokens.tokenizer_source import TokenizerSource

# One of this number of requests to a worker is sent without ids, and its usage is compared in the same way.
_SAMPLED: Final = 64


class TokenForwarding:
    """The decision which requests carry token ids, and the check of their answers."""

    def __init__(self, source: TokenizerSource, fleet: Fleet, registry: CollectorRegistry) -> None:
        self.source = source
        self._fleet = fleet
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

    def offer(self, path: str, body: bytes, request: RoutedRequest, by_gateway: bool = False) -> TokenOffer | None:
        """Return the ids that attempts of a request may send; None if its prompt depends on more than these ids.

        `by_gateway`: a gateway sends the request, and may do so to any worker of the model.
        """
        chat, name = request.prompt, request.name
        if not isinstance(chat, ChatPrompt) or name is None or not request.exact or request.by_text:
            return None
        model, ids = self._fleet.model_of(name), request.token_ids
        if model is None or len(ids) != 1 or ids[0].media or not len(ids[0]):
            return None
        if not self.source.tokenizes_alone(model, chat) or not may_send_ids(path, body, chat):
            return None
        plain_text = any(map(_is_sglang, self._fleet.workers)) and is_plain_text(path, body, chat)
        offer = TokenOffer(self, name, model, probe_kinds(chat), ids[0], plain_text)
        if by_gateway and not offer.permitted_by_all(self._serving(name)):
            return None
        return offer

    def _serving(self, name: str) -> list[Worker]:
        """Return the workers that have a model by this name, reachable or not."""
        described = ((worker, worker.description) for worker in self._fleet.workers)
        return [worker for worker, description in described if description is not None and name in description.models]

    def permits(self, worker: Worker, name: str, model: str, kinds: Collection[ProbeKind]) -> bool:
        """Return whether a worker may receive ids of a prompt of these kinds, for the model by this name."""
        served = worker.description.models.get(name) if worker.description is not None else None
        if served is None or served.adapter is not None or served.model != model:
            return False
        return self.source.permission(worker, model).kinds.issuperset(kinds)

    def is_sample(self, worker: Worker, model: str) -> bool:
        """Return whether the next request of this model to a worker is sent without ids."""
        return self.source.count_request(worker, model) % _SAMPLED == 0

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

    __slots__ = ("_forwarding", "_kinds", "_model", "_name", "_plain_text", "_prompt", "_worker")

    def __init__(
        self,
        forwarding: TokenForwarding,
        name: str,
        model: str,
        kinds: Collection[ProbeKind],
        prompt: PackedPrompt,
        plain_text: bool,
    ) -> None:
        self._forwarding = forwarding
        self._name = name
        self._model = model
        self._kinds = kinds
        self._prompt = prompt
        self._plain_text = plain_text
        self._worker: Worker | None = None  # whose answer is checked

    def permitted_by_all(self, workers: Collection[Worker]) -> bool:
        """Return whether any of these workers may receive the ids, in one form."""
        return len(set(map(_is_sglang, workers))) == 1 and all(map(self._permits, workers))

    def body_to(self, worker: Worker, body: bytes) -> bytes:
        """Return the body for an attempt: with ids if the worker may receive them."""
        if not self._sends_to(worker):
            return body
        longer = (with_input_ids if _is_sglang(worker) else with_prompt_ids)(body, self._prompt)
        self._forwarding.sent(self._model, len(longer) - len(body))
        return longer

    def ids_for_pair(self, adapter: type[Adapter], prefill: Worker, decode: Worker) -> PackedPrompt | None:
        """Return the ids for both workers of an attempt; None if one of them may not receive them."""
        self._worker = None
        if not adapter.sends_ids or not self._permits(prefill) or not self._sends_to(decode):
            return None
        self._forwarding.sent(self._model, 2 * len(self._prompt.json()))
        return self._prompt

    def _sends_to(self, worker: Worker) -> bool:
        """Return whether ids are sent in an attempt. If the worker may receive them, its answer will be checked."""
        self._worker = worker if self._permits(worker) else None
        return self._worker is not None and not self._forwarding.is_sample(worker, self._model)

    def _permits(self, worker: Worker) -> bool:
        if _is_sglang(worker) and not self._plain_text:
            return False
        return self._forwarding.permits(worker, self._name, self._model, self._kinds)

    def moved(self, worker: Worker) -> None:
        """Check the answer of this worker, because the gateway sent it the body of the chosen one."""
        if self._worker is not None:
            self._worker = worker

    def answered(self, usage: Usage | None) -> None:
        """Check the usage of a complete answer, if it reported any."""
        if self._worker is not None and usage is not None:
            self._forwarding.answered(self._worker, self._model, len(self._prompt), usage.prompt)


def _is_sglang(worker: Worker) -> bool:
    return worker.description is not None and worker.description.engine is Engine.SGLANG
