"""`/generate`, SGLang's own: a text or token ids in, a text and token ids out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from simulator.worker.protocol import GenerationRequest, TokenId
from simulator.worker.replies import Reply, json_event

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
    """One answer; in a stream each event has all of it so far."""

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
