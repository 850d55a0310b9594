"""A user of the router: the streaming `openai` client, and its answers with times and usage."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, cast

import openai
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from openai.types.completion_usage import CompletionUsage

from engine.conversations import VOCABULARY, Conversation
from engine.servers import MODEL, RouterProcess
from engine.web import post_json

ANSWER_TOKENS = 64


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times are monotonic seconds; `predicted` and `cached` are tokens of the prompt."""

    worker: str
    dp_rank: str
    predicted: int
    text: str
    finish_reason: str | None
    done: bool
    usage: CompletionUsage | None
    sent_at: float
    first_token_at: float
    ended_at: float

    @property
    def complete(self) -> bool:
        return self.done and bool(self.text) and self.finish_reason is not None and self.usage is not None

    @property
    def prompt_tokens(self) -> int:
        assert self.usage is not None
        return self.usage.prompt_tokens

    @property
    def cached(self) -> int:
        """The prompt tokens that the engine reports as cached."""
        assert self.usage is not None
        details = self.usage.prompt_tokens_details
        return (details and details.cached_tokens) or 0

    @property
    def time_to_first_token(self) -> float:
        return self.first_token_at - self.sent_at


class Client:
    """Sends conversations to a router. A context manager.

    `model`: the one that is asked; `salt`: the name of a cache of its own; `words_are_tokens`: each of the vocabulary
    is one token, so that answers are read as they were generated.
    """

    def __init__(
        self, router: RouterProcess, model: str = MODEL, salt: str = "", words_are_tokens: bool = True
    ) -> None:
        self._openai = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=120)
        self._model = model
        words = "".join(f" {word}" for word in VOCABULARY)
        tokenized = post_json(f"{router.url}/tokenize", {"model": model, "prompt": words, "add_special_tokens": False})
        if words_are_tokens:
            assert len(tokenized["tokens"]) == len(VOCABULARY), "a word of the vocabulary is no token"
        self.allowed_token_ids: list[int] = tokenized["tokens"]
        self._fields = {"allowed_token_ids": self.allowed_token_ids} | ({"cache_salt": salt} if salt else {})

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._openai.close()

    def ask(self, messages: Iterable[dict[str, str]], answer_tokens: int = ANSWER_TOKENS) -> Answer:
        """Send one chat request and read its answer to the end."""
        chunks: list[ChatCompletionChunk] = []
        done = False
        first_token_at = 0.0
        sent_at = time.monotonic()
        with self._openai.chat.completions.with_streaming_response.create(
            **self._request(messages, answer_tokens)
        ) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line:
                    chunks.append(ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")))
                    if not first_token_at and _content(chunks[-1]):
                        first_token_at = time.monotonic()
        choices = [choice for chunk in chunks for choice in chunk.choices]
        return Answer(
            worker=response.headers["x-kvrouter-worker"],
            dp_rank=response.headers.get("x-kvrouter-dp-rank", ""),
            predicted=int(response.headers["x-kvrouter-overlap-tokens"]),
            text="".join(map(_content, chunks)),
            finish_reason=next((choice.finish_reason for choice in choices if choice.finish_reason), None),
            done=done,
            usage=chunks[-1].usage if chunks else None,
            sent_at=sent_at,
            first_token_at=first_token_at,
            ended_at=time.monotonic(),
        )

    def stream(self, messages: Iterable[dict[str, str]], answer_tokens: int) -> openai.Stream[ChatCompletionChunk]:
        """Send one chat request and return the stream of the client."""
        return cast(
            openai.Stream[ChatCompletionChunk],
            self._openai.chat.completions.create(**self._request(messages, answer_tokens)),
        )

    def converse(self, conversation: Conversation, think_seconds: float = 0.0) -> list[Answer]:
        """Go through a conversation; every turn contains the answers before it."""
        messages = [{"role": "system", "content": conversation.system}]
        answers = []
        for turn, question in enumerate(conversation.questions):
            if turn:
                time.sleep(think_seconds)
            messages.append({"role": "user", "content": question})
            answers.append(self.ask(messages))
            messages.append({"role": "assistant", "content": answers[-1].text})
        return answers

    def converse_all(
        self, conversations: Iterable[Conversation], users: int = 1, think_seconds: float = 0.0
    ) -> list[Answer]:
        """Send the conversations with `users` users at a time, and return the answers in request order."""
        waiting: SimpleQueue[Conversation] = SimpleQueue()
        for conversation in conversations:
            waiting.put(conversation)

        def user(_: int) -> list[Answer]:
            answers: list[Answer] = []
            while True:
                try:
                    conversation = waiting.get_nowait()
                except Empty:
                    return answers
                answers += self.converse(conversation, think_seconds)

        with ThreadPoolExecutor(users) as threads:
            answers = [answer for some in threads.map(user, range(users)) for answer in some]
        return sorted(answers, key=lambda answer: answer.sent_at)

    def _request(self, messages: Iterable[dict[str, str]], answer_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": cast(list[ChatCompletionMessageParam], list(messages)),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": self._fields,
        }


def _content(chunk: ChatCompletionChunk) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)
