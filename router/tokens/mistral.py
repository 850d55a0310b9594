"""Mistral's chats and texts, by the library mistral-common, as vLLM's `--tokenizer-mode mistral` does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from http_api.errors import RequestError
from indexer.hashing import pack_tokens
from router.apis.requests import ChatPrompt
from router.tokens import TokenizerUnavailableError

# Longer ids of tool calls are cut to their last characters.
_CALL_ID = 9
# The first version that supports reasoning_effort.
_KNOWS_EFFORT = 15


class Mistral:
    """An encoder of Mistral's chats and texts. It can be used by several threads."""

    truncates = True
    ignores_template = False
    keeps_items = False

    def __init__(self, folder: Path) -> None:
        """Load tekken.json. Slow: call it in a thread. Raises TokenizerUnavailableError."""
        try:
            from mistral_common.protocol.instruct.request import ChatCompletionRequest
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError as error:
            raise TokenizerUnavailableError(
                "tekken.json needs another package: pip install 'kvrouter[mistral]'"
            ) from error
        self._request: Any = ChatCompletionRequest
        try:
            self._tokenizer: Any = MistralTokenizer.from_file(str(folder / "tekken.json"), mode=ValidationMode.test)
        except Exception as error:  # the library raises its own types
            raise TokenizerUnavailableError(f"mistral-common cannot read tekken.json: {error}") from error
        self.texts = TekkenTexts(self._tokenizer.instruct_tokenizer.tokenizer)
        version = int(str(self._tokenizer.instruct_tokenizer.tokenizer.version.value).split("v")[-1])
        self._knows_effort = version >= _KNOWS_EFFORT

    def encode(self, chat: ChatPrompt) -> bytes:
        """Return a conversation's packed token ids. Raises RequestError (400) if Mistral's models do not support it."""
        if chat.chat_template_kwargs:
            raise RequestError(
                "Mistral's tokenizers do not support chat_template_kwargs. Omit it.", param="chat_template_kwargs"
            )
        last = chat.messages[-1].get("role")
        if chat.add_generation_prompt and last == "assistant":
            raise RequestError(
                "The last message is an answer. Send continue_final_message, or a message of the user.",
                param="messages",
            )
        if chat.continue_final_message and last != "assistant":
            raise RequestError(
                "continue_final_message requires an answer as the last message.", param="continue_final_message"
            )
        others = {"reasoning_effort": chat.reasoning_effort} if self._knows_effort else {}
        try:
            request = self._request.from_openai(
                messages=[_message(message) for message in chat.messages],
                tools=chat.tools,
                continue_final_message=chat.continue_final_message,
                **others,
            )
            return pack_tokens(self._tokenizer.encode_chat_completion(request).tokens)
        except Exception as error:  # the library raises its own types and assertions
            raise RequestError(f"Mistral's models do not support this request: {error}", param="messages") from error


class TekkenTexts:
    """An encoder of texts. The text of a special token is encoded as plain text."""

    fast = False
    cached_bytes = 0

    def __init__(self, tekkenizer: Any) -> None:
        self._tekkenizer = tekkenizer
        self.special: list[str] = []
        self.exact: list[str] = []
        self.vocab_size = int(tekkenizer.n_words)

    def encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]:
        """Return the packed token ids of each text."""
        return [pack_tokens(self._tekkenizer.encode(text, bos=add_special_tokens, eos=False)) for text in texts]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form in which vLLM passes it to the library."""
    message = copy.copy(message)
    if message.get("role") == "assistant":
        calls = message.get("tool_calls") or []
        message["tool_calls"] = [call | {"id": str(call.get("id", ""))[-_CALL_ID:]} for call in calls]
    elif message.get("role") == "tool" and isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = message["tool_call_id"][-_CALL_ID:]
    return message
