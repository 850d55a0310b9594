"""A model's own tokenizer and chat template, in this process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import structlog
from jinja2 import TemplateSyntaxError

from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens.boundary import Boundary, boundary_of
from router.tokens.chat_template import ChatTemplate
from router.tokens.common_start import common_start
from router.tokens.errors import TokenizerUnavailableError, TooLongForNowError
from router.tokens.model_files import ModelFiles
from router.tokens.prompt_cache import PromptCache
from router.tokens.text_encoder import Encoder, TextEncoder

log = structlog.get_logger()

CACHE_BYTES = 64 * 2**20
# About how many times faster than `tokenizers` fastokens is with texts it never saw, at least.
_FASTER = 8


class ChatEncoder(Protocol):
    """What a model family has in the place of a chat template. `truncates`: whether `truncate_prompt_tokens` counts."""

    truncates: bool

    def encode(self, chat: ChatPrompt) -> bytes | str:
        """A conversation's packed token ids, or its text.

        Raises RequestError (400) for what no engine takes, TokenizerUnavailableError for what only an engine knows.
        """


class LocalTokenizer:
    """Makes the same token ids as vLLM does of the same request. Any number of threads may use one.

    `vocab_size` is one more than the largest token id the model takes. `way` names how chats become tokens.
    """

    def __init__(
        self,
        files: ModelFiles,
        cache_bytes: int = CACHE_BYTES,
        chat_encoder: ChatEncoder | None = None,
        text_encoder: Encoder | None = None,
        way: str = "",
    ) -> None:
        """`cache_bytes` bounds what is kept of the texts seen before. `chat_encoder` stands in for the chat template,
        `text_encoder` for tokenizer.json.

        Raises TokenizerUnavailableError.
        """
        self._encoder: Encoder = text_encoder or TextEncoder(files.tokenizer, cache_bytes // 2)
        self._chat_encoder = chat_encoder
        self._template = _template(files, tools=False)
        self._tools_template = _template(files, tools=True)
        # Models pad their vocabulary, and tokenizers have tokens of their own: the larger one counts, as in vLLM.
        self.vocab_size = max(files.vocab_size, self._encoder.vocab_size)
        self.way = way or ("fastokens" if self._encoder.fast else "tokenizers")
        self._prompts = PromptCache(cache_bytes - cache_bytes // 2, self._boundary())

    def _boundary(self) -> Boundary | None:
        """Where this model's conversations can be cut."""
        turns = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
        try:
            text = self._text_of(ChatPrompt(turns))
        except (RequestError, TokenizerUnavailableError):
            return None
        return boundary_of(self._encoder, text) if isinstance(text, str) else None

    @classmethod
    def load(cls, folder: str, cache_bytes: int = CACHE_BYTES) -> LocalTokenizer:
        """The tokenizer of a model's folder. Slow: call it in a thread. Raises TokenizerUnavailableError."""
        return cls(ModelFiles.read(Path(folder)), cache_bytes)

    @property
    def fast(self) -> bool:
        """Whether texts are tokenized by fastokens."""
        return self._encoder.fast

    @property
    def has_chat_encoder(self) -> bool:
        """Whether chats are encoded by what their model family has in the place of a chat template."""
        return self._chat_encoder is not None

    @property
    def cached_bytes(self) -> int:
        """What the texts seen before take."""
        return self._encoder.cached_bytes + self._prompts.bytes

    def tokenize(self, prompt: ChatPrompt | TextPrompts, *, at_most: int = sys.maxsize) -> list[PackedPrompt]:
        """The token ids of each prompt. Raises as `render` and `encode` do."""
        if isinstance(prompt, ChatPrompt):
            return [self.encode_chat(prompt, at_most=at_most)]
        prompts = self.encode(prompt.texts, add_special_tokens=prompt.add_special_tokens, at_most=at_most)
        return [prompt.truncation.apply(each) for each in prompts] if prompt.truncation else prompts

    def encode_chat(self, chat: ChatPrompt, *, at_most: int = sys.maxsize) -> PackedPrompt:
        """The token ids of a conversation without media. Raises as `render` and `encode` do."""
        rendered = self._text_of(chat)
        truncation = chat.truncation if self._chat_encoder is None or self._chat_encoder.truncates else None
        if isinstance(rendered, str):
            (prompt,) = self.encode([rendered], add_special_tokens=chat.add_special_tokens, at_most=at_most)
        else:
            prompt = self._prompts.of_tokens(rendered)
        return truncation.apply(prompt) if truncation else prompt

    def _text_of(self, chat: ChatPrompt) -> str | bytes:
        """A conversation's text, or its packed token ids where the model family's encoder makes those at once."""
        if self._chat_encoder is None:
            return self.render(chat)
        _check_own_template(chat)
        return self._chat_encoder.encode(chat)

    def encode_around_media(self, chat: ChatPrompt, *, at_most: int = sys.maxsize) -> tuple[PackedPrompt, PackedPrompt]:
        """The token ids of a conversation up to its first media item, and those of all of it, with other texts in the
        place of media. Raises as `render` and `encode` do.
        """
        if self._chat_encoder is not None:
            raise TokenizerUnavailableError("this model's media are not told apart here")
        add = chat.add_special_tokens
        before, whole = self.encode(self._around_media(chat), add_special_tokens=add, at_most=at_most)
        return before, whole

    def encode_placeholders(self, chat: ChatPrompt, *, at_most: int = sys.maxsize) -> PackedPrompt:
        """The token ids of a conversation with what the template has in the place of media. Raises as those above."""
        if chat.truncation:
            raise TokenizerUnavailableError("only an engine can tell how much of media a truncation leaves")
        if self._chat_encoder is not None:
            raise TokenizerUnavailableError("this model's media are not told apart here")
        return self.encode_chat(chat, at_most=at_most)

    def _around_media(self, chat: ChatPrompt) -> list[str]:
        """A chat's text up to its first media item, and all of it with other texts in the place of those."""
        if chat.truncation:
            raise TokenizerUnavailableError("only an engine can tell how much of media a truncation leaves")
        told_apart = self.render(chat, media_as_text=True)
        # Whatever the template does differently for media, up to here it renders the same.
        return [told_apart[: common_start(told_apart, self.render(chat))], told_apart]

    def render(self, chat: ChatPrompt, *, media_as_text: bool = False) -> str:
        """The text that the model's chat template makes of a conversation.

        `media_as_text`: with a text of their own in the place of images and the like.

        Raises RequestError (400) when the template refuses it, TokenizerUnavailableError when the request brings its
        own template (a program, which only a worker told to trust it runs) or the model has none.
        """
        _check_own_template(chat)
        template = self._template if chat.tools is None else self._tools_template
        if template is None:
            raise TokenizerUnavailableError("the model has no chat template that can be read")
        if chat.thinking_off or chat.merges_system:
            chat = self._adapted(chat)
        return template.render(chat, media_as_text=media_as_text)

    def _adapted(self, chat: ChatPrompt) -> ChatPrompt:
        """What another API leaves to the template, said as this one takes it."""
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
        """The token ids of each text. Special tokens that stand in a text are read as such.

        Raises TooLongForNowError when it takes more work than `tokenizers` has with `at_most` characters, and
        RequestError (400) for half of a surrogate pair, which JSON inside of JSON can smuggle into a text.
        """
        plain = not add_special_tokens  # what is put before or after a text depends on the whole
        begun, rests, work, new = [], [], 0, 0
        for text in texts:
            known = self._prompts.find(text, plain=plain)
            rest = text[known.cut[0] :]
            begun.append(known)
            rests.append(rest)
            work += len(rest)
            new += len(text) - known.common
        if self.fast:  # what it saw before it only looks up
            work = new // _FASTER + work // (_FASTER * _FASTER)
        if work > at_most:
            raise TooLongForNowError
        encoded = self._encoder.encode(rests, add_special_tokens=add_special_tokens)
        return [
            self._prompts.prompt(text, tokens, known, plain=plain)
            for text, known, tokens in zip(texts, begun, encoded, strict=True)
        ]


def _check_own_template(chat: ChatPrompt) -> None:
    variables = chat.chat_template_kwargs
    if chat.chat_template is not None or (variables and variables.get("chat_template") is not None):
        raise TokenizerUnavailableError("the request brings its own chat template")


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system}, *others] if system else others


def _template(files: ModelFiles, *, tools: bool) -> ChatTemplate | None:
    """The template for conversations with or without tools (some models have one of its own), if it can be read."""
    source = files.template_for(tools)
    try:
        return None if source is None else ChatTemplate(source, files.special_tokens)
    except TemplateSyntaxError:
        return None
