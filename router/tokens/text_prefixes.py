"""Prompts that cannot be tokenized: their common prefixes are found by their text.

The text has the messages with their roles in the order of a chat template: tools and settings first. So a
conversation's next turn begins with the whole turn before. Four bytes replace one token, which is the average of
English text. A chunk of 16 tokens is then 64 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.apis.messages import without_billing_line
from router.apis.requests import ChatPrompt, Prompt, TextPrompts
from router.tokens import TokenizerUnavailableError

_encode = msgspec.json.Encoder(order="sorted").encode
# Fields of a message that templates show beside its role and content.
_SHOWN = ("name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")


def text_prefixes(prompt: Prompt) -> list[PackedPrompt]:
    """Return each prompt as if its text were tokens.

    Raises TokenizerUnavailableError if a prompt has no text, or if its text does not begin where the prompt does.
    """
    try:
        if isinstance(prompt, ChatPrompt) and (prompt.truncation is None or prompt.truncation.side == "right"):
            return [_packed(_chat_text(prompt))]
        if isinstance(prompt, TextPrompts) and (prompt.truncation is None or prompt.truncation.side == "right"):
            return [_packed(text.encode()) for text in prompt.texts]
    except (ValueError, OverflowError, RecursionError) as error:
        raise TokenizerUnavailableError(f"its text cannot be read: {error}") from error
    raise TokenizerUnavailableError("its text does not begin as the prompt does")


def _packed(text: bytes) -> PackedPrompt:
    return PackedPrompt(text[: len(text) - len(text) % TOKEN_BYTES])


def _chat_text(prompt: ChatPrompt) -> bytes:
    pieces: list[bytes] = []
    settings = (
        prompt.tools,
        prompt.documents,
        prompt.chat_template,
        prompt.chat_template_kwargs,
        prompt.reasoning_effort,
    )
    if any(settings):
        pieces.append(_encode(settings))
    for message in prompt.messages:
        pieces += (b"\n\n", _text(message.get("role")), b"\n")
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, str | list):
            content = list(without_billing_line(content if isinstance(content, list) else [content]))
        if isinstance(content, list):
            pieces += map(_part, content)
        elif content is not None:
            pieces.append(_text(content))
        pieces += (_encode(message[field]) for field in _SHOWN if message.get(field) is not None)
    return b"".join(pieces)


def _part(part: Any) -> bytes:
    """Return the bytes of a content part: its text, or a hash of other parts."""
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        return _text(part.get("text"))
    return _text(part) if isinstance(part, str) else xxh3_128_digest(_encode(part))


def _text(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else _encode(value)
