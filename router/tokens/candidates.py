"""The possible tokenizers for a model's files, the likely one first. A trial against an engine decides between them.

Models without a tokenizer.json have Mistral's tekken.json or Kimi's tiktoken.model. Mistral's file is read by the
library mistral-common, as vLLM's `--tokenizer-mode mistral` does. Kimi's own Python code is not run: tiktoken reads the
file, and splits words as `tokenization_kimi.py` in the models' repositories does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from http_api.errors import RequestError
from indexer.hashing import pack_tokens
from router.apis.requests import ChatPrompt
from router.tokens import TokenizerUnavailableError
from router.tokens.deepseek_v32 import USER, DeepSeekV32
from router.tokens.harmony import Harmony
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import ModelFiles, model_config, read_by_transformers, read_json

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


KIMI_FILE = "tiktoken.model"
_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LETTERS}*{_SMALL}+{_ENDINGS}",
        f"{_LETTERS}+{_SMALL}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_SPECIAL_TOKENS = 256


class KimiTexts:
    """An encoder of texts. Special tokens inside a text are recognized; none is added before or after."""

    fast = False
    cached_bytes = 0

    def __init__(self, folder: Path) -> None:
        """Load tiktoken.model. Slow: call it in a thread. Raises TokenizerUnavailableError."""
        try:
            import tiktoken
            from tiktoken.load import load_tiktoken_bpe
        except ImportError as error:
            raise TokenizerUnavailableError(
                f"{KIMI_FILE} needs another package: pip install 'kvrouter[kimi]'"
            ) from error
        try:
            ranks = load_tiktoken_bpe(str(folder / KIMI_FILE))
            named = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
            names = {int(number): token["content"] for number, token in named.items()}
            first = len(ranks)
            special = {
                names.get(number, f"<|reserved_token_{number}|>"): number
                for number in range(first, first + _SPECIAL_TOKENS)
            }
            self._encoding: Any = tiktoken.Encoding(
                "kimi", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens=special
            )
        except Exception as error:  # invalid files cause errors of any type
            raise TokenizerUnavailableError(f"tiktoken cannot read {KIMI_FILE}: {error}") from error
        self.vocab_size = first + _SPECIAL_TOKENS
        self.special = self.exact = list(special)

    def encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]:  # noqa: ARG002 (has none)
        """Return the packed token ids of each text."""
        return [pack_tokens(self._encoding.encode(text, allowed_special="all")) for text in texts]


# Loads a tokenizer with a cache of the given bytes. Slow; raises TokenizerUnavailableError.
Load = Callable[[int], LocalTokenizer]


def candidates(folder: Path, sglang: bool = False) -> list[Load]:
    """Return loaders for the files in a folder, which tokenize as vLLM or SGLang does.

    Raises TokenizerUnavailableError without any.
    """
    try:
        vocab_size, model_type = model_config(folder)
    except (OSError, ValueError) as error:
        raise TokenizerUnavailableError(f"{folder}: {error}") from error
    found: list[Load] = []

    def mistral(cache_bytes: int) -> LocalTokenizer:
        encoder = Mistral(folder)
        files = ModelFiles("", vocab_size=vocab_size)
        return LocalTokenizer(files, cache_bytes, encoder, encoder.texts, "mistral-common")

    def harmony(cache_bytes: int) -> LocalTokenizer:
        return LocalTokenizer(ModelFiles.read(folder), cache_bytes, Harmony(), method="harmony")

    def deepseek_v32(cache_bytes: int) -> LocalTokenizer:
        return LocalTokenizer(ModelFiles.read(folder), cache_bytes, DeepSeekV32(), method="deepseek_v32")

    def kimi(cache_bytes: int) -> LocalTokenizer:
        encoder = KimiTexts(folder)
        try:
            files = ModelFiles.beside("", folder)
        except (OSError, ValueError) as error:
            raise TokenizerUnavailableError(f"{folder}: {error}") from error
        return LocalTokenizer(files, cache_bytes, text_encoder=encoder, method="tiktoken", sglang=sglang)

    def as_it_is(cache_bytes: int) -> LocalTokenizer:
        return LocalTokenizer.load(str(folder), cache_bytes, sglang)

    def by_transformers(cache_bytes: int) -> LocalTokenizer:
        return LocalTokenizer(read_by_transformers(folder), cache_bytes, method="transformers", sglang=sglang)

    if (folder / "tekken.json").exists():
        found.append(mistral)
    if model_type == "gpt_oss":
        found.append(harmony)
    if (folder / "tokenizer.json").exists():
        files = ModelFiles.read(folder)
        if not files.templates and USER in files.tokenizer:
            found.append(deepseek_v32)
        found.append(as_it_is)
    elif (folder / KIMI_FILE).exists():
        found.append(kimi)
    if (folder / "tokenizer_config.json").exists():
        found.append(by_transformers)
    if not found:
        raise TokenizerUnavailableError(f"no tokenizer can be loaded from {str(folder)!r}: no tokenizer.json there")
    return found
