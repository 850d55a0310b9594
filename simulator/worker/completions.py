"""Requests for answers of every API, from their body to the engines and back."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from router.http.headers import whole_number
from simulator.worker.cache import CachedSequence
from simulator.worker.engine import Output, QueueFullError, SimulatedEngine
from simulator.worker.kv_transfer.part import Job, Part, Role, Running
from simulator.worker.media import MediaEncoder, with_items_as_text
from simulator.worker.messages_api import MessageReply, MessagesRequest
from simulator.worker.metrics import WorkerMetrics
from simulator.worker.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Conversation,
    GenerationRequest,
    StreamOptions,
)
from simulator.worker.replies import Choice, CompletionReply, GenerateReply, GenerateRequest, Reply
from simulator.worker.responses_api import ResponseReply, ResponsesRequest, StoredResponses
from simulator.worker.settings import SimulatedWorkerSettings
from simulator.worker.tokens import AnswerWriter, ChatTokenizer, TemplateError

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat may use the whole context
BUSY = "The engine is busy and accepts no more requests. Retry later or on another instance."


class Completions:
    """A service that answers generation requests with the engines of all DP ranks."""

    def __init__(
        self,
        settings: SimulatedWorkerSettings,
        tokenizer: ChatTokenizer,
        writer: AnswerWriter,
        engines: Sequence[SimulatedEngine],
        metrics: WorkerMetrics,
        role: Role | None = None,
    ) -> None:
        self._role = role
        self._by_rid: dict[str, _Outputs] = {}
        self._settings = settings
        self._tokenizer = tokenizer
        self._writer = writer
        self._engines = engines
        self._metrics = metrics
        self._sglang = settings.disaggregation == "sglang"
        self._media = MediaEncoder(settings, metrics.registry)
        self.responses = StoredResponses()
        self.adapters = list(settings.adapters)

    async def complete(self, http: Request, body: CompletionRequest) -> Response:
        """Answer a completion request. Raises ApiError."""
        self._check_model(body.model)
        prompts = [
            await asyncio.to_thread(self._tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        if not all(prompts) or not prompts:
            raise ApiError(HTTPStatus.BAD_REQUEST, "prompt must be given and must not be empty.", "prompt")
        highest = max(map(max, prompts))
        if highest >= self._tokenizer.vocabulary_size:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"prompt: token {highest} is not in the vocabulary.", "prompt")
        max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return await self._reply(
            http, body, prompts, max_tokens, "max_tokens", self._openai("cmpl", "text", body, prompts)
        )

    async def chat(self, http: Request, body: ChatRequest) -> Response:
        """Answer a chat request. Raises ApiError."""
        self._check_model(body.model)
        if self._settings.role == "encode":
            return JSONResponse(await self._media.answer(body))
        await self._media.need(body)
        prompt = await asyncio.to_thread(self.chat_tokens, body)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        reply = self._openai("chatcmpl", "chat", body, [prompt])
        return await self._reply(http, body, [prompt], max_tokens, field, reply)

    async def respond(self, http: Request, body: ResponsesRequest) -> Response:
        """Answer a request for a response. Raises ApiError."""
        self._check_model(body.model)
        earlier = self.responses.messages(body.previous_response_id)
        prompt = await asyncio.to_thread(self.chat_tokens, body.conversation(earlier), True)
        reply = partial(
            ResponseReply,
            f"resp_{secrets.token_hex(8)}",
            self._model(body),
            request=body,
            stored=self.responses,
            messages=[*earlier, *body.new_messages()],
        )
        return await self._reply(http, body, [prompt], body.max_output_tokens, "max_output_tokens", reply)

    async def message(self, http: Request, body: MessagesRequest) -> Response:
        """Answer a request for a message. Raises ApiError."""
        self._check_model(body.model)
        prompt = await asyncio.to_thread(self.chat_tokens, body.conversation(self._sglang))
        reply = partial(MessageReply, f"msg_{secrets.token_hex(8)}", self._model(body))
        return await self._reply(http, body, [prompt], body.max_tokens, "max_tokens", reply)

    async def generate(self, http: Request, body: GenerateRequest) -> Response:
        """Answer a request of SGLang's `/generate`. Raises ApiError."""
        self._check_model(body.model)
        prompt = body.input_ids or await asyncio.to_thread(self._tokenizer.encode, body.text or "")
        if not prompt or max(prompt) >= self._tokenizer.vocabulary_size:
            raise ApiError(HTTPStatus.BAD_REQUEST, "text or input_ids must be given, of the vocabulary.", "text")
        sampling = body.sampling_params
        request = body.model_copy(update={"ignore_eos": sampling.ignore_eos})
        reply = partial(GenerateReply, secrets.token_hex(16), self._model(body))
        return await self._reply(http, request, [prompt], sampling.max_new_tokens, "max_new_tokens", reply)

    def chat_tokens(self, conversation: Conversation, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a conversation, rendered by the chat template. Raises ApiError."""
        if not conversation.messages:
            raise ApiError(HTTPStatus.BAD_REQUEST, "messages must not be empty.", "messages")
        try:
            text = self._tokenizer.render(
                [message.model_dump(exclude_unset=True) for message in with_items_as_text(conversation.messages)],
                conversation.tools,
                conversation.add_generation_prompt,
                conversation.continue_final_message,
                **conversation.chat_template_kwargs,
            )
        except TemplateError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error), "messages") from error
        return self._tokenizer.encode(text, add_special_tokens)

    async def _reply(
        self,
        http: Request,
        body: GenerationRequest,
        prompts: list[list[int]],
        max_tokens: int | None,
        max_tokens_field: str,
        reply_with: Callable[[list[int], list[Choice]], Reply],
    ) -> Response:
        self._check_options(body, max_tokens, max_tokens_field)
        budgets = [self._answer_budget(prompt, max_tokens) for prompt in prompts]
        rank = self._requested_rank(http)
        if len(prompts) == 1 and (source := (body.kv_transfer_params or {}).get("remote_kv_source")) is not None:
            rank = self._least_loaded() if rank is None else rank
            await self._pull(rank, source, body, prompts[0])
        parts = self._role.parts(body, len(prompts)) if self._role else [None] * len(prompts)
        adapter = body.model if body.model in self.adapters else None
        outputs = _Outputs(self._metrics)
        try:
            for prompt, budget, part in zip(prompts, budgets, parts, strict=True):
                for choice in range(body.n):
                    answer = self._writer.answer(prompt, budget, body.min_tokens, body.ignore_eos, adapter, choice)
                    on = rank if part is None or part.rank is None else part.rank
                    on = self._least_loaded() if on is None else on
                    deliver = partial(outputs.put, len(outputs.generations), on)
                    job = Job(prompt, answer, deliver, adapter, body.cache_salt)
                    outputs.generations.append(self._start(part, on, job))
        except QueueFullError as error:
            outputs.cancel()
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, BUSY) from error
        except ApiError:
            outputs.cancel()
            raise
        reply = reply_with([len(prompt) for prompt in prompts], [Choice() for _ in outputs.generations])
        rids = [body.rid] if isinstance(body.rid, str) else body.rid or []
        self._by_rid.update(dict.fromkeys(rids, outputs))
        outputs.on_end.append(partial(self._forget, rids))
        if not body.stream:
            return await self._whole(http, reply, outputs)
        # A failed transfer is an error with its status, not an error within a started stream.
        if any(parts) and not await self._begins(http, outputs):
            return Response(status_code=499)  # the client has disconnected
        return _GenerationStream(self._chunks(reply, outputs), outputs)

    async def _pull(self, rank: int, source: Any, body: GenerationRequest, prompt: list[int]) -> None:
        """Copy the blocks of a prompt that a peer holds to a rank's host tier, if it has one."""
        tier = self._engines[rank].host
        if tier is not None:
            adapter = body.model if body.model in self.adapters else None
            await tier.pull(source, CachedSequence(list(prompt), adapter, body.cache_salt))

    def _start(self, part: Part | None, rank: int, job: Job) -> Running:
        if part is not None:
            return part.start(rank, job)
        return self._engines[rank].submit(job.prompt, job.answer, job.deliver, job.adapter, job.cache_salt)

    def abort(self, rid: str) -> None:
        """Abort the request with this ID, unless it has finished."""
        outputs = self._by_rid.get(rid)
        if outputs is not None:
            outputs.cancel()

    def _forget(self, rids: Sequence[str]) -> None:
        for rid in rids:
            self._by_rid.pop(rid, None)

    def _openai(
        self,
        prefix: str,
        kind: Literal["chat", "text"],
        body: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
    ) -> Callable[[list[int], list[Choice]], Reply]:
        options = body.stream_options or StreamOptions()
        return partial(
            CompletionReply,
            f"{prefix}-{secrets.token_hex(8)}",
            self._model(body),
            kind=kind,
            include_usage=options.include_usage,
            continuous_usage=options.include_usage and options.continuous_usage_stats,
            prompts=prompts if body.return_token_ids else None,
        )

    def _model(self, body: GenerationRequest) -> str:
        return body.model or self._settings.model

    async def _whole(self, http: Request, reply: Reply, outputs: _Outputs) -> Response:
        try:
            if not await _unless_client_leaves(http, self._collect(reply, outputs)):
                return Response(status_code=499)  # the client has disconnected
        finally:
            outputs.end()
        return JSONResponse(reply.body())

    async def _begins(self, http: Request, outputs: _Outputs) -> bool:
        """Wait for the first output. Return False if the client disconnected. Raises ApiError for a failed output."""
        try:
            if await _unless_client_leaves(http, outputs.begun.wait()):
                assert outputs.first is not None
                _check(outputs.first)
                return True
        except BaseException:
            outputs.end()
            raise
        outputs.end()
        return False

    async def _collect(self, reply: Reply, outputs: _Outputs) -> None:
        async for index, output in outputs:
            self._take(reply.choices[index], output)

    async def _chunks(self, reply: Reply, outputs: _Outputs) -> AsyncIterator[str]:
        try:
            async for index, output in outputs:
                choice = reply.choices[index]
                if not choice.output_ids and (beginning := reply.begin(index)):
                    yield beginning
                yield reply.piece(index, self._take(choice, output), output.finish_reason)
        except ApiError as error:  # the response has begun, so only an event can report the error
            yield reply.broken(error.status, error.message)
        else:
            yield reply.end()

    def _take(self, choice: Choice, output: Output) -> str:
        """Add an output to its choice, and return the text it adds."""
        token = _check(output)
        text = self._writer.text(token)
        choice.text += text
        choice.output_ids.append(token)
        choice.cached_tokens = output.cached_tokens
        choice.finish_reason = output.finish_reason
        choice.kv_transfer_params = output.kv_transfer_params
        return text

    def _check_model(self, model: str | None) -> None:
        known = (self._settings.model, *self.adapters)
        if model is not None and model not in known:
            message = f"The model `{model}` does not exist. Known models: {', '.join(known)}."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "model")

    def _check_options(self, body: GenerationRequest, max_tokens: int | None, field: str) -> None:
        limit = self._settings.max_model_len
        if max_tokens is not None and not 1 <= max_tokens <= limit:
            message = f"{field} must be between 1 and max_model_len={limit}, not {max_tokens}."
            raise ApiError(HTTPStatus.BAD_REQUEST, message, field)
        if max_tokens is not None and body.min_tokens > max_tokens:
            message = f"min_tokens must not exceed {field}={max_tokens}, not {body.min_tokens}."
            raise ApiError(HTTPStatus.BAD_REQUEST, message, "min_tokens")
        if body.cache_salt == "":
            raise ApiError(HTTPStatus.BAD_REQUEST, "cache_salt must be a non-empty string, or absent.", "cache_salt")
        if body.stream_options is not None and not body.stream:
            raise ApiError(HTTPStatus.BAD_REQUEST, "stream_options need stream=true.", "stream_options")

    def _answer_budget(self, prompt: list[int], max_tokens: int | None) -> int:
        """Return the maximal length of the answer: the requested one within the context."""
        room = self._settings.max_model_len - len(prompt)
        if room < 1:
            message = (
                f"This model's maximum context length is {self._settings.max_model_len} tokens. The prompt has "
                f"{len(prompt)}, which leaves no room for the answer: shorten it."
            )
            raise ApiError(HTTPStatus.BAD_REQUEST, message, "input_tokens")
        return room if max_tokens is None else min(room, max_tokens)

    def _requested_rank(self, http: Request) -> int | None:
        value = http.headers.get("x-data-parallel-rank")
        if value is None:
            return None
        rank = whole_number(value.encode("latin-1"))
        if rank is None or rank >= len(self._engines):
            message = f"X-data-parallel-rank must be between 0 and {len(self._engines) - 1}, not {value[:32]!r}."
            raise ApiError(HTTPStatus.BAD_REQUEST, message, "X-data-parallel-rank")
        return rank

    def _least_loaded(self) -> int:
        return min(
            range(len(self._engines)),
            key=lambda rank: self._engines[rank].num_running + self._engines[rank].num_waiting,
        )


class _Outputs:
    """The outputs of one HTTP request's generations, in order of arrival."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self.generations: list[Running] = []
        self.begun = asyncio.Event()
        self.first: Output | None = None
        self.on_end: list[Callable[[], None]] = []
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._begun: set[int] = set()
        self._queue: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()  # limited by the lengths of the answers

    def put(self, index: int, rank: int, output: Output) -> None:
        """Add the next output of the generation at `index`, from a rank's engine."""
        if index not in self._begun and output.token is not None:
            self._begun.add(index)
            self._metrics.observe_first_token(rank, time.monotonic() - self._arrived)
        self._queue.put_nowait((index, output))
        self.first = self.first or output
        self.begun.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        """Yield pairs of a generation's index and its next output, until all have finished."""
        unfinished = len(self.generations)
        while unfinished:
            index, output = await self._queue.get()
            unfinished -= output.finish_reason is not None
            yield index, output

    def cancel(self) -> None:
        """Abort unfinished generations."""
        for generation in self.generations:
            generation.cancel()

    def end(self) -> None:
        """Abort unfinished generations, and run the `on_end` callbacks."""
        self.cancel()
        for callback in self.on_end:
            callback()


class _GenerationStream(StreamingResponse):
    """A stream of server-sent events. When the response ends, its generations are aborted."""

    def __init__(self, chunks: AsyncIterator[str], outputs: _Outputs) -> None:
        super().__init__(chunks, media_type="text/event-stream")
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._outputs.end()


def _check(output: Output) -> int:
    """Return the token of an output. Raises ApiError if it has none."""
    if output.failure is not None:
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, output.failure)
    if output.token is None:
        message = "The request was aborted, or the engine is shutting down."
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message)
    return output.token


async def _unless_client_leaves(http: Request, work: Coroutine[Any, Any, object]) -> bool:
    """Run a coroutine. If the client disconnects first, cancel it and return False."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_client_left(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        leaving.cancel()


async def _client_left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
