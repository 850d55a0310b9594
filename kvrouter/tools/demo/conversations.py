"""Conversations of the demo, played through an OpenAI client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

_TOPICS = (
    "invoices",
    "flight bookings",
    "lab results",
    "support tickets",
    "insurance claims",
    "code reviews",
    "rental contracts",
    "parcel tracking",
)
_VERBS = ("check", "summarise", "compare", "explain", "translate", "file", "escalate", "archive")
_THINGS = ("the last entry", "every open case", "the oldest record", "two duplicates", "a missing field", "the totals")
_RULES_A_PROMPT = 110  # about 1800 tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and the user's messages, each sent after the answer to the previous one."""

    system: str
    questions: list[str]


def make_conversations(count: int, turns: int, seed: int) -> list[Conversation]:
    """Return conversations in the order of their start. Neighbours seldom share a system prompt."""
    random = Random(seed)
    systems = [_system_prompt(topic, random) for topic in _TOPICS]
    return [
        Conversation(random.choice(systems), [_question(number, random) for _ in range(turns)])
        for number in range(count)
    ]


def _system_prompt(topic: str, random: Random) -> str:
    rules = (
        f"{number}. When asked to {random.choice(_VERBS)} {random.choice(_THINGS)}, do so only for {topic}."
        for number in range(1, _RULES_A_PROMPT + 1)
    )
    return f"You help with {topic}. Your rules:\n" + "\n".join(rules)


def _question(number: int, random: Random) -> str:
    wishes = ", then ".join(f"{random.choice(_VERBS)} {random.choice(_THINGS)}" for _ in range(8))
    return f"Case {number}-{random.randrange(10_000)}: please {wishes}."


ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answered request.

    - `worker`: the worker that answered.
    - `first_token`: seconds until the first token.
    - `cached_tokens`: prompt tokens from the worker's cache, as reported.
    - `expected_tokens`: prompt tokens that the router expected in the cache.
    """

    worker: str
    first_token: float
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: int


async def play(
    url: str, model: str, conversations: Sequence[Conversation], at_once: int, on_answer: Callable[[], None]
) -> list[Outcome]:
    """Play all conversations, `at_once` at a time. Raises openai.OpenAIError if a request fails."""
    places = asyncio.Semaphore(at_once)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def converse(conversation: Conversation) -> list[Outcome]:
            async with places:
                return await _converse(client, model, conversation, on_answer)

        played = await asyncio.gather(*map(converse, conversations))
    return [outcome for outcomes in played for outcome in outcomes]


async def _converse(
    client: AsyncOpenAI, model: str, conversation: Conversation, on_answer: Callable[[], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": conversation.system}]
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        answer, outcome = await _ask(client, model, messages)
        messages.append({"role": "assistant", "content": answer})
        outcomes.append(outcome)
        on_answer()
    return outcomes


async def _ask(client: AsyncOpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> tuple[str, Outcome]:
    sent = time.monotonic()
    first_token: float | None = None
    answer: list[str] = []
    prompt_tokens = cached_tokens = 0
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in raw.parse():
        for choice in chunk.choices:
            if choice.delta.content:
                first_token = first_token or time.monotonic() - sent
                answer.append(choice.delta.content)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            prompt_tokens = chunk.usage.prompt_tokens
            cached_tokens = (details and details.cached_tokens) or 0
    outcome = Outcome(
        raw.headers["x-kvrouter-worker"],
        first_token or time.monotonic() - sent,
        prompt_tokens,
        cached_tokens,
        int(raw.headers["x-kvrouter-overlap-tokens"]),
    )
    return "".join(answer), outcome
