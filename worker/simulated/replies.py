"""The bodies a worker answers with: OpenAI's completions, whole or in chunks, shaped as vLLM shapes them."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Literal

FINGERPRINT = "kvrouter-simulated"


@dataclass(slots=True)
class Choice:
    """One answer as far as it has been generated."""

    text: str = ""
    tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None


@dataclass(slots=True)
class Reply:
    """The answers to one HTTP request: `n` choices for each of its prompts, prompt by prompt."""

    kind: Literal["chat", "text"]
    model: str
    prompt_lengths: list[int]  # tokens
    choices: list[Choice]
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.kind == "chat" else "cmpl-") + secrets.token_hex(8)

    def usage(self) -> dict[str, Any]:
        """Tokens; a prompt counts once, and as cached what its first choice found."""
        prompt = sum(self.prompt_lengths)
        completion = sum(choice.tokens for choice in self.choices)
        per_prompt = len(self.choices) // len(self.prompt_lengths)
        cached = sum(choice.cached_tokens for choice in self.choices[::per_prompt])
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        return {
            "id": self.id,
            "object": "chat.completion" if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._whole(index, choice) for index, choice in enumerate(self.choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self.usage(),
            "kv_transfer_params": None,
        }

    def role_chunk(self, index: int) -> str:
        """The first chunk of a chat choice."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def text_chunk(self, index: int, text: str, finish_reason: str | None) -> str:
        """What one more token adds to a choice."""
        content: dict[str, Any] = {"delta": {"content": text}} if self.kind == "chat" else {"text": text}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None or self.kind == "text":
            choice["stop_reason"] = None
        return self._chunk([choice])

    def usage_chunk(self) -> str:
        """The last chunk, where the client asked for it."""
        return self._chunk([], usage=self.usage(), system_fingerprint=FINGERPRINT)

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
        chunk = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }
        return server_sent(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))


def server_sent(data: str) -> str:
    """A server-sent event."""
    return f"data: {data}\n\n"
