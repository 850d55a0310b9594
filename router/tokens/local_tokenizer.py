"""A model's tokenizer and chat template in this process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import structlog
from jinja2 import TemplateSyntaxError

from http_api.errors import RequestError
from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens import TokenizerUnavailableError, TooLongForNowError
from router.tokens.chat_template import ChatTemplate
from router.tokens.model_files import ModelFiles
from router.tokens.prompt_cache import Boundary, PromptCache, common_start, find_boundary
from router.tokens.sglang_template import SglangTemplate
from router.tokens.text_encoder import Encoder, TextEncoder

log = structlog.get_logger()

CACHE_BYTES = 64 * 2**20
# fastokens is at least this many times faster than `tokenizers` for new texts.
_FASTER = 8


class ChatEncoder(Protocol):
    """A model family's replacement for a chat template.

    - `truncates`: whether it supports `truncate_prompt_tokens`.
    - `ignores_template`: whether the engine ignores a request's own chat template.
    - `keeps_items`: whether the engine keeps reasoning and calls of earlier responses, and their instructions.
    """

    truncates: bool
    ignores_template: bool
    keeps_items: bool

    def encode(self, chat: ChatPrompt) -> bytes | str:
        """Return a conversation's packed token ids, or its text.

        Raises RequestError (400) if no engine accepts it, TokenizerUnavailableError if only an engine knows the ids.
        """


class LocalTokenizer:
    """A tokenizer that returns the same token ids as an engine for the same request. It can be used by several threads.

    - `truncates`: whether that engine supports `truncate_prompt_tokens`; SGLang does not.
    - `vocab_size`: one more than the largest token id of the model.
    - `method`: the library or encoder that makes the tokens.
    """

    def __init__(
        self,
        files: ModelFiles,
        cache_bytes: int = CACHE_BYTES,
        chat_encoder: ChatEncoder | None = None,
        text_encoder: Encoder | None = None,
        method: str = "",
        sglang: bool = False,
    ) -> None:
        """Create a tokenizer from a model's files. Raises TokenizerUnavailableError.

        - `chat_encoder`: replaces the chat template.
        - `text_encoder`: replaces tokenizer.json.
        - `method`: a name for `/workers`; "" names the library.
        - `sglang`: return the ids of SGLang instead of those of vLLM.
        """
        text_encoder = text_encoder or TextEncoder(files.tokenizer, cache_bytes // 2)
        self._encoder: Encoder = text_encoder
        self._chat_encoder = chat_encoder
        self.truncates = not sglang
        self._template = _template(files, sglang, tools=False)
        self._tools_template = _template(files, sglang, tools=True)
        bos = files.special_tokens.get("bos_token")
        self._bos = text_encoder.encode([bos])[0] if bos else b""
        # Models pad their vocabulary and tokenizers add tokens: the larger size counts, as in vLLM.
        self.vocab_size = max(files.vocab_size, self._encoder.vocab_size)
        self.method = method or ("fastokens" if self._encoder.fast else "tokenizers")
        boundary = self._boundary()
        self._adds_tokens = _adds_tokens(text_encoder)
        # If every text can be cut after its cached part, the encoder has only new segments, which need no cache.
        self._only_new_segments = boundary is not None and not self._adds_tokens
        if self._only_new_segments and isinstance(text_encoder, TextEncoder):
            text_encoder.drop_cache()
            self._prompts = PromptCache(cache_bytes, boundary)
        else:
            self._prompts = PromptCache(cache_bytes - cache_bytes // 2, boundary)

    def _boundary(self) -> Boundary | None:
        """Return where this model's conversations can be cut; None if they cannot."""
        turns = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
        try:
            text = self._text_of(ChatPrompt(turns))
        except (RequestError, TokenizerUnavailableError):
            return None
        return find_boundary(self._encoder, text) if isinstance(text, str) else None

    @classmethod
    def load(cls, folder: str, cache_bytes: int = CACHE_BYTES, sglang: bool = False) -> LocalTokenizer:
        """Load the tokenizer of a model's folder. Slow: call it in a thread. Raises TokenizerUnavailableError."""
        return cls(ModelFiles.read(Path(folder)), cache_bytes, sglang=sglang)

    @property
    def has_chat_encoder(self) -> bool:
        """True if chats are encoded by the model family's encoder instead of a chat template."""
        return self._chat_encoder is not None

    @property
    def keeps_items(self) -> bool:
        """True if the engine keeps all items of earlier responses in a conversation."""
        return self._chat_encoder is not None and self._chat_encoder.keeps_items

    @property
    def depends_on_more(self) -> bool:
        """True if tokens may depend on more than the request: on the date, or on a family's encoder."""
        templates = (self._template, self._tools_template)
        return self.has_chat_encoder or any(template and template.reads_clock for template in templates)

    @property
    def cached_bytes(self) -> int:
        """Bytes that cached texts occupy."""
        return self._encoder.cached_bytes + self._prompts.bytes

    def text_of(self, tokens: bytes) -> str | None:
        """Return the text of packed token ids; None if the encoder of a model family cannot decode them."""
        return self._encoder.decode(tokens) if isinstance(self._encoder, TextEncoder) else None

    def tokenize(self, prompt: ChatPrompt | TextPrompts, *, at_most: int = sys.maxsize) -> list[PackedPrompt]:
        """Return the token ids of each prompt. Raises as `render` and `encode` do."""
        if isinstance(prompt, ChatPrompt):
            return [self.encode_chat(prompt, at_most=at_most)]
        add = prompt.add_special_tokens or not self.truncates  # SGLang always adds them
        prompts = self.encode(prompt.texts, add_special_tokens=add, at_most=at_most)
        return [prompt.truncation.apply(each) for each in prompts] if prompt.truncation and self.truncates else prompts

    def encode_chat(self, chat: ChatPrompt, *, at_most: int = sys.maxsize) -> PackedPrompt:
        """Return the token ids of a conversation without media. Raises as `render` and `encode` do."""
        rendered = self._text_of(chat)
        truncates = self.truncates and (self._chat_encoder is None or self._chat_encoder.truncates)
        truncation = chat.truncation if truncates else None
        if isinstance(rendered, str):
            add = chat.add_special_tokens and self.truncates  # SGLang never adds them
            (prompt,) = self.encode([rendered], add_special_tokens=add, at_most=at_most)
            if chat.continue_final_message and (template := self._template_of(chat)):
                prompt = self._continued(prompt, template.answer_to_continue(chat))
        else:
            prompt = self._prompts.prompt_for_tokens(rendered)
        return truncation.apply(prompt) if truncation else prompt

    def _continued(self, prompt: PackedPrompt, answer: str) -> PackedPrompt:
        """Return a prompt with the tokens of an answer, which SGLang encodes as a text of its own."""
        if not answer:
            return prompt
        tokens = self._encoder.encode([answer], add_special_tokens=True)[0]
        if len(self._bos) == TOKEN_BYTES:
            tokens = tokens.removeprefix(self._bos)
        return self._prompts.prompt_for_tokens(bytes(prompt.tokens) + tokens)

    def _text_of(self, chat: ChatPrompt) -> str | bytes:
        """Return a conversation's text, or its packed token ids if the model family's encoder returns those."""
        if self._chat_encoder is None:
            return self.render(chat)
        if not self._chat_encoder.ignores_template:
            _check_own_template(chat)
        return self._chat_encoder.encode(chat)

    def encode_around_media(self, chat: ChatPrompt, *, at_most: int = sys.maxsize) -> tuple[PackedPrompt, PackedPrompt]:
        """Return a chat's token ids up to its first media item, and all with texts for media. Raises as `encode`."""
        if self._chat_encoder is not None:
            raise TokenizerUnavailableError("the router cannot separate this model's media")
        add = chat.add_special_tokens
        before, whole = self.encode(self._around_media(chat), add_special_tokens=add, at_most=at_most)
        return before, whole

    def encode_placeholders(self, chat: ChatPrompt, *, at_most: int = sys.maxsize) -> PackedPrompt:
        """Return the token ids of a chat with its template's placeholders for media.

        Raises as `render` and `encode` do, and TokenizerUnavailableError if the chat is truncated.
        """
        if chat.truncation:
            raise TokenizerUnavailableError("only an engine knows how much of media a truncation leaves")
        if self._chat_encoder is not None:
            raise TokenizerUnavailableError("the router cannot separate this model's media")
        return self.encode_chat(chat, at_most=at_most)

    def _around_media(self, chat: ChatPrompt) -> list[str]:
        """Return a chat's text up to its first media item, and its text with other texts in place of media."""
        if chat.truncation:
            raise TokenizerUnavailableError("only an engine knows how much of media a truncation leaves")
        with_stand_ins = self.render(chat, media_as_text=True)
        # Up to the first difference between both renderings, the text does not depend on media.
        return [with_stand_ins[: common_start(with_stand_ins, self.render(chat))], with_stand_ins]

    def render(self, chat: ChatPrompt, *, media_as_text: bool = False) -> str:
        """Return the text that the model's chat template makes of a conversation.

        `media_as_text`: replace each media item by a text of its own.

        Raises RequestError (400) if the template refuses. Raises TokenizerUnavailableError if the model has no
        template, or if the request has its own: a template is a program, which only a trusting worker runs.
        """
        _check_own_template(chat)
        template = self._template_of(chat)
        if template is None:
            raise TokenizerUnavailableError("the model has no valid chat template")
        if (chat.thinking_off or chat.merges_system) and not isinstance(template, SglangTemplate):
            chat = self._adapted(chat)
        return template.render(chat, media_as_text=media_as_text)

    def _template_of(self, chat: ChatPrompt) -> ChatTemplate | None:
        return self._template if chat.tools is None else self._tools_template

    def _adapted(self, chat: ChatPrompt) -> ChatPrompt:
        """Return a chat of another API with its options in the form that this template supports."""
        if chat.thinking_off and self._template:
            chat = replace(chat, reasoning_effort=self._template.effort_without_thinking)
        templates = (self._template, self._tools_template)
        if (
            chat.merges_system
            and any(message["role"] == "system" for message in chat.messages[1:])
            and any(template and template.takes_system_first for template in templates)
        ):
            chat = replace(chat, messages=_with_one_system(chat.messages))
        return chat

    def encode(self, texts: list[str], *, add_special_tokens: bool, at_most: int = sys.maxsize) -> list[PackedPrompt]:
        """Return the token ids of each text. Special tokens inside a text are recognized.

        Raises TooLongForNowError if the work exceeds that of `tokenizers` with `at_most` characters. Raises
        RequestError (400) for a lone surrogate, which nested JSON can contain.
        """
        # Added tokens depend on the whole text, so it cannot be cut.
        plain = not (add_special_tokens and self._adds_tokens)
        begun, rests, work, new = [], [], 0, 0
        for text in texts:
            known = self._prompts.find(text, plain=plain)
            rest = text[known.cut[0] :]
            begun.append(known)
            rests.append(rest)
            work += len(rest)
            new += len(text) - known.common
        fast = self._encoder.fast
        if fast and self._only_new_segments:
            work = work // _FASTER
        elif fast:  # it looks up known segments
            work = new // _FASTER + work // (_FASTER * _FASTER)
        if work > at_most:
            raise TooLongForNowError
        encoded = self._encoder.encode(rests, add_special_tokens=add_special_tokens)
        prompts = list[PackedPrompt]()
        for text, known, tokens in zip(texts, begun, encoded, strict=True):
            prompts.append(self._prompts.prompt(text, tokens, known, plain=plain))
        return prompts


def _adds_tokens(encoder: Encoder) -> bool:
    texts = ["", "Hi"]
    return encoder.encode(texts, add_special_tokens=True) != encoder.encode(texts)


def _check_own_template(chat: ChatPrompt) -> None:
    variables = chat.chat_template_kwargs
    if chat.chat_template is not None or (variables and variables.get("chat_template") is not None):
        raise TokenizerUnavailableError("the request has its own chat template")


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system}, *others] if system else others


def _template(files: ModelFiles, sglang: bool, *, tools: bool) -> ChatTemplate | None:
    """Return the chat template for conversations with or without tools; None if it is missing or invalid."""
    source = files.template_for(tools)
    try:
        if source is None:
            return None
        return (SglangTemplate if sglang else ChatTemplate)(source, files.special_tokens)
    except TemplateSyntaxError:
        return None
