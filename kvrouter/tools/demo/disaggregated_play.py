"""Playing conversations while workers die: what became of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

from kvrouter.tools.demo.workload import Conversation

ANSWER_TOKENS = 32


@dataclass(slots=True)
class Request:
    """One request. `error`: why its answer has no end; `begun`: something of it had come. Sizes in tokens."""

    answer: str = ""
    begun: bool = False
    error: str | None = None
    prefill_worker: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def lost(self) -> bool:
        """It failed before anything of its answer came: another worker could have answered."""
        return self.error is not None and not self.begun


async def play(
    url: str, model: str, conversations: Sequence[Conversation], at_once: int, on_answer: Callable[[int], None]
) -> list[Request]:
    """Play all conversations, `at_once` at a time; one whose request fails ends there.

    `on_answer` is called with how many requests have ended.
    """
    places = asyncio.Semaphore(at_once)
    requests: list[Request] = []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def converse(conversation: Conversation) -> None:
            messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": conversation.system}]
            async with places:
                for question in conversation.questions:
                    messages.append({"role": "user", "content": question})
                    request = await _ask(client, model, messages)
                    requests.append(request)
                    on_answer(len(requests))
                    if request.error is not None:
                        return
                    messages.append({"role": "assistant", "content": request.answer})

        await asyncio.gather(*map(converse, conversations))
    return requests


async def _ask(client: AsyncOpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> Request:
    request = Request()
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        request.prefill_worker = raw.headers.get("x-kvrouter-prefill-worker")
        async for chunk in raw.parse():
            for choice in chunk.choices:
                request.answer += choice.delta.content or ""
                request.begun = request.begun or bool(request.answer)
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                request.prompt_tokens = chunk.usage.prompt_tokens
                request.cached_tokens = (details and details.cached_tokens) or 0
        if not request.prompt_tokens:
            request.error = "the stream ended early"
    except OpenAIError as error:
        request.error = str(error)
    return request
