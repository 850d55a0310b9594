"""Resumable requests: streams that another worker can continue exactly, and the request for the rest.

A completion continues from its prompt and the text so far, or from their token ids if the engine returns them. A chat
continues from its messages with the text so far as the last one. vLLM and SGLang support this by
`continue_final_message`.

Only fields that are known to be safe may be in the body. Other fields may depend on the answer so far (penalties, bad
words, grammars), draw on a seed, or change the answer's format.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvevents.decoding import read_json
from router.apis.endpoints import CHAT, COMPLETIONS
from router.apis.json_edit import field, with_field
from router.apis.openai_requests import COMPLETION_MAX_TOKENS

# Fields that do not affect a continuation, whatever their value.
_PLAIN: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        "allowed_token_ids",
        "ignore_eos",
        "stop_token_ids",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "session_id",
        "cache_salt",
        "priority",
        "add_special_tokens",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "parallel_tool_calls",
    }
)
# Fields with values that have no effect; null never has one.
_NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "suffix": ("",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "modalities": (["text"],),
}
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "min_tokens")
_STREAM_OPTIONS: Final = frozenset({"include_usage", "continuous_usage_stats"})


class ResumableRequest:
    """A request for a stream.

    - `body`: the body that is sent first, which asks for what a continuation needs.
    - `shows_ids`, `shows_usage`, `shows_each_usage`: what the client itself asked for.
    """

    def __init__(self, path: str, body: bytes, fields: dict[str, Any], tells_ids: bool, tells_usage: bool) -> None:
        options = fields.get("stream_options") or {}
        self.is_chat = path == CHAT
        self.shows_ids = fields.get("return_token_ids") is True
        self.shows_usage = options.get("include_usage") is True
        self.shows_each_usage = self.shows_usage and options.get("continuous_usage_stats") is True
        self._asked = body
        self._fields = fields
        if tells_ids:
            body = with_field(body, "return_token_ids", b"true")
        if tells_usage:
            body = with_field(body, "stream_options", b'{"include_usage":true,"continuous_usage_stats":true}')
        self.body = body

    @property
    def prompt(self) -> str | list[int] | None:
        """A completion's prompt: a text or token ids; None for a chat."""
        prompt = self._fields.get("prompt")
        return prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt

    @property
    def max_tokens(self) -> int | None:
        """The limit of the answer's tokens; None if only the context limits it."""
        given = [self._fields.get(name) for name in _LIMITS[:2]]
        if self.is_chat:
            return given[1] if given[1] is not None else given[0]
        return given[0] if "max_tokens" in self._fields else COMPLETION_MAX_TOKENS

    @property
    def needs_count(self) -> bool:
        """True if the number of answered tokens must be known, for another worker or for the client."""
        return self.max_tokens is not None or self.shows_usage

    def chat_from(self, text: str, tokens: int | None) -> bytes:
        """Return the chat that continues this text; `tokens` is the text's length if a limit depends on it."""
        body = self._reduced(tokens)
        if not text:
            return body
        messages = (field(body, "messages") or b"[]").rstrip()[:-1]
        message = msgspec.json.encode({"role": "assistant", "content": text})
        body = with_field(body, "messages", b"%b,%b]" % (messages, message))
        body = with_field(body, "add_generation_prompt", b"false")
        return with_field(body, "continue_final_message", b"true")

    def completion_from(self, prompt: str | list[int], tokens: int | None) -> bytes:
        """Return the completion that continues this prompt, of which `tokens` belong to the answer."""
        return with_field(self._reduced(tokens), "prompt", msgspec.json.encode(prompt))

    def _reduced(self, tokens: int | None) -> bytes:
        body = self.body
        if not tokens:
            return body
        limits = {name: self._fields[name] for name in _LIMITS if self._fields.get(name) is not None}
        if not self.is_chat and "max_tokens" not in self._fields:
            limits["max_tokens"] = COMPLETION_MAX_TOKENS
        for name, limit in limits.items():
            body = with_field(body, name, b"%d" % max(limit - tokens, 0))
        return body


def resumable_request(path: str, body: bytes, tells_ids: bool, tells_usage: bool) -> ResumableRequest | None:
    """Return the request if another worker could continue its stream.

    - `body`: the admitted body.
    - `tells_ids`, `tells_usage`: every possible worker returns token ids, and usage in each chunk, if asked.
    """
    if path not in (CHAT, COMPLETIONS):
        return None
    try:
        fields = read_json(body)
    except msgspec.DecodeError:
        return None
    if not isinstance(fields, dict) or fields.get("stream") is not True or not _is_plain(fields):
        return None
    request = ResumableRequest(path, body, fields, tells_ids, tells_usage)
    if request.is_chat:
        return request if _are_messages(fields.get("messages")) else None
    return request if _is_one_prompt(fields.get("prompt")) else None


def _is_plain(fields: dict[str, Any]) -> bool:
    for name, value in fields.items():
        if value is None or name in _PLAIN:
            continue
        if name == "seed" and fields.get("temperature") == 0:
            continue  # greedy sampling uses no seed
        if name == "return_token_ids" and isinstance(value, bool):
            continue
        if name == "stream_options" and isinstance(value, dict) and value.keys() <= _STREAM_OPTIONS:
            continue
        if not any((value == each and type(each) is not bool) or value is each for each in _NOTHING.get(name, ())):
            return False
    return all(fields.get(name) is None or type(fields[name]) is int for name in _LIMITS)


def _are_messages(messages: object) -> bool:
    return isinstance(messages, list) and bool(messages) and all(isinstance(each, dict) for each in messages)


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    if isinstance(prompt[0], str | list) and len(prompt) == 1:
        return _is_one_prompt(prompt[0])
    return all(type(token) is int for token in prompt)
