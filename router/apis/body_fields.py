"""The fields of JSON bodies that routing reads. The decoder skips all others, which the worker checks.

Integers and booleans are read leniently (`router.apis.fields.read_body`). The other fields are checked by the decoders.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.apis.response_owners import StoredFields


class SessionFields(msgspec.Struct):
    """The fields of a body that name its session and say whether the session continues."""

    session_id: Any = None
    litellm_session_id: Any = None
    vllm_xargs: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    user: Any = None
    nvext: Any = None


class PromptFields(SessionFields):
    """The fields that define a prompt."""

    model: Any = None
    prompt: Any = None
    prompt_embeds: Any = None
    token_ids: Any = None
    messages: Any = None
    tools: Any = None
    documents: Any = None
    tool_choice: Any = None
    reasoning: Any = None
    reasoning_effort: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class GenerationFields(PromptFields):
    """The fields of a prompt, and those that say how to generate from it."""

    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    echo: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    priority: int | None = None
    lora_path: Any = None


class MatchFields(PromptFields):
    """The fields of a prompt, and those of a `/match` request."""

    lora_name: Any = None
    tenant_id: Any = None


class MessagesFields(SessionFields):
    """The fields of an Anthropic request that routing reads."""

    model: Any = None
    messages: Any = None
    system: Any = None
    tools: Any = None
    thinking: Any = None
    output_config: Any = None
    chat_template_kwargs: Any = None
    cache_salt: Any = None
    stream: bool | None = None
    max_tokens: int | None = None


class ResponsesFields(SessionFields, rename={"messages": "input"}):
    """The fields of `/v1/responses` that routing reads; `input` is read as `messages`."""

    model: Any = None
    messages: Any = None
    instructions: Any = None
    tools: Any = None
    reasoning: Any = None
    chat_template_kwargs: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    priority: int | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class ModelFields(SessionFields):
    """The fields that routing by load reads."""

    model: Any = None
    stream: bool | None = None
    priority: int | None = None


class OtherFields(StoredFields):
    """The fields of a body that is forwarded by load, or to the owner of a stored object."""

    model: Any = None


class MediaFields(msgspec.Struct):
    """The fields of a body with messages or other lists of parts."""

    messages: Any = None
    input: Any = None
    query: Any = None
    queries: Any = None
    documents: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None


class AllMediaFields(MediaFields):
    """Also the fields of SGLang's `/generate`, whose values are items: one, a list, or a list for each prompt."""

    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
