"""Answers of a simulated worker in the forms of OpenAI's chat and completions, and of SGLang's `/generate`."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel, Field

from simulator.worker.protocol import GenerationRequest, TokenId, error_body

FINGERPRINT = "kvrouter-simulated"


@dataclass(slots=True)
class Choice:
    """One answer, as far as it has been generated."""

    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class Reply(ABC):
    """The answers to one HTTP request: `n` choices for each of its prompts, prompt by prompt."""

    id: str
    model: str
    prompt_lengths: list[int]  # tokens
    choices: list[Choice]
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_lengths)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.output_ids) for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """The number of cached prompt tokens. Each prompt counts once, with its first choice."""
        per_prompt = len(self.choices) // len(self.prompt_lengths)
        return sum(choice.cached_tokens for choice in self.choices[::per_prompt])

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the whole answer."""

    def begin(self, index: int) -> str:  # noqa: ARG002
        """Return the events of a stream before the first token of a choice."""
        return ""

    @abstractmethod
    def piece(self, index: int, text: str, finish_reason: str | None) -> str:
        """Return the event of one more token of a choice."""

    def broken(self, status: HTTPStatus, message: str) -> str:
        """Return the event of an answer that cannot be finished."""
        return json_event(error_body(status, message)) + "data: [DONE]\n\n"

    def end(self) -> str:
        """Return the last events."""
        return "data: [DONE]\n\n"


@dataclass(slots=True)
class CompletionReply(Reply):
    """A chat completion or a text completion. `prompts`: tokens, if the request needs IDs."""

    kind: Literal["chat", "text"]
    include_usage: bool = False
    continuous_usage: bool = False
    prompts: list[list[int]] | None = None

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion" if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._whole(index, choice) for index, choice in enumerate(self.choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self._usage(),
            "kv_transfer_params": self.choices[0].kv_transfer_params,
        }

    def begin(self, index: int) -> str:
        if self.kind == "text":
            return ""
        delta = {"role": "assistant", "content": ""}
        more = {"prompt_token_ids": self.prompts[0]} if self.prompts else {}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], **more, **self._usage_so_far())

    def piece(self, index: int, text: str, finish_reason: str | None) -> str:
        content: dict[str, Any] = {"delta": {"content": text}} if self.kind == "chat" else {"text": text}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None or self.kind == "text":
            choice["stop_reason"] = None
        if self.prompts:
            output_ids = self.choices[index].output_ids
            choice["token_ids"] = output_ids[-1:]
            if self.kind == "text" and len(output_ids) == 1:
                choice["prompt_token_ids"] = self.prompts[index // (len(self.choices) // len(self.prompts))]
        return self._chunk([choice], **self._usage_so_far())

    def _usage_so_far(self) -> dict[str, Any]:
        return {"usage": self._usage()} if self.continuous_usage else {}

    def end(self) -> str:
        usage = self._chunk([], usage=self._usage(), system_fingerprint=FINGERPRINT) if self.include_usage else ""
        return usage + "data: [DONE]\n\n"

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        content: dict[str, Any] = {"text": choice.text}
        if self.kind == "chat":
            content = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return json_event(
            {
                "id": self.id,
                "object": "chat.completion.chunk" if self.kind == "chat" else "text_completion",
                "created": self.created,
                "model": self.model,
                "choices": choices,
                **more,
            }
        )


def json_event(data: dict[str, Any], name: str | None = None) -> str:
    """Format a server-sent event."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


DEFAULT_NEW_TOKENS = 128


class SamplingParams(BaseModel):
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    ignore_eos: bool = False


class GenerateRequest(GenerationRequest):
    """The body of POST /generate, for one prompt."""

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)


@dataclass(slots=True)
class GenerateReply(Reply):
    """An answer to `/generate`. In a stream, each event has the whole answer so far."""

    def body(self) -> dict[str, Any]:
        choice = self.choices[0]
        meta = {
            "id": self.id,
            "finish_reason": {"type": choice.finish_reason} if choice.finish_reason else None,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }
        return {"text": choice.text, "output_ids": choice.output_ids, "meta_info": meta}

    def piece(self, index: int, text: str, finish_reason: str | None) -> str:  # noqa: ARG002
        return json_event(self.body())
