"""Requests to `/generate` (SGLang's own API and vLLM's old one) and `/inference/v1/generate` (vLLM, token ids)."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from http_api.errors import RequestError
from router.apis.agent_hints import hints_in_body
from router.apis.body_fields import SessionFields
from router.apis.fields import (
    adapter_of,
    has_unlike_adapters,
    kind_of,
    kinds_of,
    lenient,
    optional_string,
    read_body,
    salt_with,
    token_ids,
)
from router.apis.identities import find_identity
from router.apis.json_edit import SpliceError, with_field
from router.apis.requests import Prompt, RoutedRequest, TextPrompts, TokenPrompts
from router.http.headers import HeaderItems

GENERATE: Final = "/generate"

_TEXTS = ("text", "prompt")
_TOKENS = ("input_ids", "token_ids")
# Fields of prompts that are not, or not only, tokens.
_OTHERS = ("input_embeds", "image_data", "audio_data", "video_data", "features")


class _GenerateFields(SessionFields):
    model: Any = None
    lora_path: Any = None
    text: Any = None
    prompt: Any = None
    input_ids: Any = None
    token_ids: Any = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    features: Any = None
    sampling_params: Any = None
    max_tokens: Any = None
    n: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    stream: bool | None = None
    priority: int | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None


def decode_generate(body: bytes, headers: HeaderItems = ()) -> RoutedRequest:
    """Parse what routing needs of the body. Raises RequestError (400) that names the invalid field."""
    fields = read_body(body, _GenerateFields)
    sampling = fields.sampling_params if isinstance(fields.sampling_params, dict) else {}
    max_tokens = sampling.get("max_new_tokens", sampling.get("max_tokens", fields.max_tokens))
    return RoutedRequest(
        name=adapter_of(fields.lora_path) or optional_string(fields.model, "model"),
        prompt=None if has_unlike_adapters(fields.lora_path) else _prompt(fields),
        streamed=fields.stream or False,
        cache_salt=salt_with(optional_string(fields.cache_salt, "cache_salt"), fields.extra_key),
        other_prompts=bool(fields.extra_key),
        max_tokens=lenient(max_tokens, int, None),
        answers=lenient(sampling.get("n", fields.n), int, 1),
        priority=fields.priority or 0,
        identity=find_identity(headers, fields),
        hints=hints_in_body(fields.nvext),
        reads_cache=not _computes_all(fields, sampling),
    )


def _computes_all(fields: _GenerateFields, sampling: dict[str, Any]) -> bool:
    """Return whether the engine computes the whole prompt for its probabilities (`skip_reading_prefix_cache`).

    SGLang reuses only tokens before `logprob_start_len`.
    """
    skips = sampling.get("skip_reading_prefix_cache")
    if isinstance(skips, bool):
        return skips
    if any(sampling.get(name) is not None for name in ("prompt_logprobs", "prompt_logprob_token_ids")):
        return True
    start = fields.logprob_start_len
    return bool(fields.return_logprob) and start is not None and start >= 0


def _prompt(fields: _GenerateFields) -> Prompt | None:
    if any(getattr(fields, name) for name in _OTHERS):
        return None
    for name in (*_TEXTS, *_TOKENS):
        value = getattr(fields, name)
        if value is not None:
            return _texts(value, name) if name in _TEXTS else _tokens(value, name)
    raise RequestError("Found no prompt. Send text, or input_ids.", param="text")


def _texts(value: Any, param: str) -> TextPrompts:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or set(map(type, texts)) != {str}:
        found = f"a list of {kinds_of(texts)}" if isinstance(texts, list) and texts else kind_of(value)
        raise RequestError(f"{param} is {found}. Send a string or a list of strings.", param=param)
    return TextPrompts(texts)


def _tokens(value: Any, param: str) -> TokenPrompts:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return TokenPrompts([token_ids(ids, f"{param}[{index}]") for index, ids in enumerate(value)], param=param)
    return TokenPrompts([token_ids(value, param)], param=param)


def with_adapter(path: str, body: bytes, adapter: str, model: str) -> bytes:
    """Return the body for an engine that takes an adapter as `model` there, or at `/generate` in a field of its own."""
    name, value = ("lora_path", adapter) if path == GENERATE else ("model", model)
    try:
        return with_field(body, name, msgspec.json.encode(value))
    except SpliceError:
        return body  # a form, which names no adapter
