"""Mid-stream failover: whether another worker can continue a stream, and with which request.

    worker fails ──▶ answer complete? ──▶ the router writes the end
                        └──▶ the request for the rest ──▶ same tokens as before? ──▶ another worker
                                                               └──▶ the stream ends with its worker

If the engine's tokens are known, those of the request for the rest must equal the first request's and the answer's so
far. A chat template that renders an answer differently from its generation would change the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from router.apis.endpoints import read_request
from router.apis.requests import RoutedRequest
from router.fleet.discovery import Engine
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.forwarding.failover.resumable_request import resumable_request
from router.forwarding.failover.resumable_stream import ResumableStream
from router.forwarding.request_context import RequestContext
from router.routing.prompt_reader import PromptReader

# Engines that continue the last message of a chat and report usage with each chunk.
_CONTINUING = frozenset({Engine.VLLM, Engine.SGLANG})


@dataclass(frozen=True, slots=True)
class Resumption:
    """The continuation of a stream: the body for the next worker, its prompt, and the number of tokens so far."""

    body: bytes
    prompt: RoutedRequest
    given: int | None


class StreamFailover:
    """The failover of streams. `most` is how often one stream may be continued."""

    def __init__(self, fleet: Fleet, reader: PromptReader, most: int, registry: CollectorRegistry) -> None:
        self.most = most
        self._fleet = fleet
        self._reader = reader
        self._counter = Counter(
            "kvrouter_stream_failovers",
            "Streams whose worker broke off, by outcome: resumed on another worker, or ended",
            ["worker", "outcome"],
            registry=registry,
        )

    def stream(self, path: str, body: bytes) -> ResumableStream | None:
        """Return the stream that answers a request, if it can be continued; else None."""
        engines = self._engines()
        request = resumable_request(path, body, engines == {Engine.VLLM}, engines <= _CONTINUING)
        return None if request is None else ResumableStream(request)

    def resumed(self, worker: Worker) -> None:
        """Count a stream of this worker that was continued, or whose end the router wrote."""
        self._counter.labels(worker.name, "resumed").inc()

    def ended(self, worker: Worker) -> None:
        """Count a stream that ended with this worker."""
        self._counter.labels(worker.name, "ended").inc()

    def removed(self, worker: Worker) -> None:
        """End the metric series of a worker that was removed."""
        self._counter.remove_by_labels({"worker": worker.name})

    async def resumption(
        self, context: RequestContext, stream: ResumableStream, before: RoutedRequest
    ) -> Resumption | None:
        """Return the exact continuation of a stream, after the failed worker's prompt. Raises RequestError."""
        request, text = stream.request, stream.text
        if not stream.can_go_on:
            return None
        if not text:
            return Resumption(request.body, await self._read(context, request.body), 0)
        ids = stream.all_ids()
        if request.is_chat:
            if not self._engines() <= _CONTINUING:
                return None
            prompt = await self._read(context, request.chat_from(text, None))
        elif ids is not None:
            prompt = await self._read(context, request.completion_from(ids, None))
        elif isinstance(request.prompt, str):
            prompt = await self._read(context, request.completion_from(request.prompt + text, None))
        else:
            return None  # the prompt has token ids, but only the text of the answer is known
        given = stream.given
        if request.is_chat or ids is None:
            if not _known(before):
                before = await self._read(context, request.body)
            if _known(before) and _known(prompt):
                rest = _rest(before, prompt)
                if rest is None or (stream.output_ids is not None and rest != stream.output_ids):
                    return None
                given = len(rest)
            elif request.is_chat and text != text.strip():
                return None  # templates strip white space
        if request.needs_count and given is None:
            return None
        if prompt.max_tokens is not None and given is not None:
            prompt.max_tokens -= given
        if request.is_chat:
            return Resumption(request.chat_from(text, given), prompt, given)
        return Resumption(request.completion_from(ids or f"{request.prompt}{text}", given), prompt, given)

    async def _read(self, context: RequestContext, body: bytes) -> RoutedRequest:
        """Return a request's prompt with its tokens if possible, whatever the policy needs."""
        head = context.head
        request = read_request(head.method, head.path, head.headers, body, context.identity_headers)
        if not self._reader.read_now(request, len(body)) or not request.token_ids:
            await self._reader.read_aside(request, len(body))
        return request

    def _engines(self) -> set[Engine]:
        return {worker.description.engine for worker in self._fleet.workers if worker.description is not None}


def _known(prompt: RoutedRequest) -> bool:
    return prompt.exact and len(prompt.token_ids) == 1


def _rest(before: RoutedRequest, after: RoutedRequest) -> list[int] | None:
    """Return the tokens by which a prompt is longer; None if it begins differently."""
    first, longer = before.token_ids[0], after.token_ids[0]
    return list(longer)[len(first) :] if longer.tokens.startswith(first.tokens) else None
