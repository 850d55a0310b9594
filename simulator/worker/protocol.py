"""The requests of a worker, by OpenAI's API with vLLM's extensions, and its errors."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Room = Annotated[int, Field(ge=0, le=2**63 - 1)]
MAX_CHOICES = 128


class ApiError(Exception):
    """A refused request: the HTTP status, the message, and the field at fault."""

    def __init__(self, status: HTTPStatus, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def error_body(status: HTTPStatus, message: str, param: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error body, with vLLM's names for the type."""
    kind = status.phrase.title().replace(" ", "") + ("" if status.phrase.endswith("Error") else "Error")
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class MediaPart(BaseModel):
    """An image, audio or video, in the field of its type."""

    model_config = ConfigDict(extra="allow")

    type: Literal["image_url", "audio_url", "video_url", "input_audio"]

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.type not in (self.model_extra or {}):
            raise ValueError(f"{self.type} is missing")
        return self


class Message(BaseModel):
    """A chat message. Fields that only the chat template reads, for example `tool_calls`, are kept unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart | MediaPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class GenerationRequest(BaseModel):
    """The fields of every request for an answer."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    return_token_ids: bool = False

    # Fields for prefill and decode workers: SGLang's, lists for several prompts; and vLLM's.
    rid: str | list[str] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Port | list[Port] | None = None
    bootstrap_room: Room | list[Room] | None = None
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = Field(None, ge=0)
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one, as text or as tokens."""
        if not self.prompt:
            return []
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class Conversation(BaseModel):
    """The input of the chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class ChatRequest(GenerationRequest, Conversation):
    """The body of POST /v1/chat/completions."""

    max_completion_tokens: int | None = None


class TokenizeTextRequest(BaseModel):
    """The body of POST /tokenize for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(Conversation):
    """The body of POST /tokenize for a conversation."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class AdapterRequest(BaseModel):
    """The body of POST /v1/load_lora_adapter and, without a path, of /v1/unload_lora_adapter."""

    lora_name: str
    lora_path: str = ""


class DetokenizeRequest(BaseModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
