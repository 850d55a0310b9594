"""A model's own tokenizer and chat template, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from jinja2 import TemplateSyntaxError

from indexer.errors import RequestError
from indexer.hashing import PackedPrompt, pack_tokens
from router.apis.requests import ChatPrompt
from router.errors import TokenizerUnavailableError, TooLongForNowError
from router.tokens.chat_template import ChatTemplate
from router.tokens.fast_bpe import ASCII_SPEED, FastPieces, UnfitError, trial_characters
from router.tokens.segments import Cutter, Encode, SegmentedEncoder, ends_of
from router.tokens.tokenizer_check import difference, trial_texts

log = structlog.get_logger()

CACHE_BYTES = 64 * 2**20


class LocalTokenizer:
    """Makes the same token ids as vLLM does of the same request. Any number of threads may use one.

    `vocab_size` is one more than the largest token id the model takes.
    """

    def __init__(self, tokenizer: Any, vocab_size: int = 0, cache_bytes: int = CACHE_BYTES) -> None:
        """`tokenizer` is one of transformers, of the fast kind; `vocab_size` what the model's configuration says.

        `cache_bytes` bounds what is kept of the texts seen before.
        """
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_padding()
        self.backend.no_truncation()
        self._pieces: FastPieces | None = None
        self._segmented = self._piece_by_piece(cache_bytes)
        self._template = _template(tokenizer, None)
        self._tools_template = _template(tokenizer, [])
        # Models pad their vocabulary, and tokenizers have tokens of their own: the larger one counts, as in vLLM.
        self.vocab_size = max(vocab_size, max(tokenizer.get_vocab().values()) + 1)

    @classmethod
    def load(cls, path_or_name: str, cache_bytes: int = CACHE_BYTES) -> LocalTokenizer:
        """The tokenizer of a model's directory or, over the network, of a name on the Hugging Face Hub.

        Slow: call it in a thread. Raises TokenizerUnavailableError, saying why.
        """
        # It takes seconds, which who has no local tokenizer need not wait; and it advises to install PyTorch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer, PretrainedConfig

        options = {"local_files_only": Path(path_or_name).is_dir()}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path_or_name, **options)
        except Exception as error:
            # Whatever it meets in a stranger's files it raises in its own way.
            raise TokenizerUnavailableError(f"no tokenizer can be loaded from {path_or_name!r}: {error}") from error
        if not tokenizer.is_fast:
            raise TokenizerUnavailableError(
                f"the tokenizer of {path_or_name!r} is {type(tokenizer).__name__}, which has no tokenizer.json; "
                "let a worker tokenize for this model"
            )
        try:
            config, _ = PretrainedConfig.get_config_dict(path_or_name, **options)
        except OSError:
            config = {}
        return cls(tokenizer, (config.get("text_config") or config).get("vocab_size") or 0, cache_bytes)

    @property
    def fast(self) -> bool:
        """Whether tiktoken does the most of it."""
        return self._pieces is not None

    @property
    def by_pieces(self) -> bool:
        """Whether texts are tokenized piece by piece, because that is exact for this tokenizer."""
        return self._segmented is not None

    @property
    def way(self) -> str:
        """`pieces` or `whole`: how texts are tokenized."""
        return "pieces" if self.by_pieces else "whole"

    @property
    def cached_bytes(self) -> int:
        """What the texts seen before take."""
        return self._segmented.cached_bytes if self._segmented else 0

    def claim(self) -> None:
        """Be the fastest in this thread. For the first use after the tokenizer was loaded."""
        if self._pieces is not None:
            self._pieces.claim()

    def render(self, chat: ChatPrompt, *, media_as_text: bool = False) -> str:
        """The text that the model's chat template makes of a conversation.

        `media_as_text`: with a text of their own in the place of images and the like.

        Raises RequestError (400) when the template refuses it, TokenizerUnavailableError when the request brings its
        own template (a program, which only a worker told to trust it runs) or the model has none.
        """
        variables = chat.chat_template_kwargs
        if chat.chat_template is not None or (variables and variables.get("chat_template") is not None):
            raise TokenizerUnavailableError("the request brings its own chat template")
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
            chat = replace(chat, messages=_with_one_system(chat.messages), conversation=None)
        return chat

    def encode(self, texts: list[str], *, add_special_tokens: bool, at_most: int = sys.maxsize) -> list[PackedPrompt]:
        """The token ids of each text. Special tokens that stand in a text are read as such.

        Raises TooLongForNowError when it takes more work than the model's own tokenizer has with `at_most` characters,
        and RequestError (400) for half of a surrogate pair, which JSON inside of JSON can smuggle into a text.
        """
        if self._segmented is not None:
            return self._segmented.encode(texts, add_special_tokens=add_special_tokens, at_most=at_most)
        if sum(map(len, texts)) > at_most:
            raise TooLongForNowError
        return self._whole(texts, add_special_tokens=add_special_tokens)

    def _whole(self, texts: list[str], *, add_special_tokens: bool) -> list[PackedPrompt]:
        return [PackedPrompt(ids) for ids in self._ids(texts, add_special_tokens)]

    def _ids(self, texts: list[str], add_special_tokens: bool = False) -> list[bytes]:
        try:
            # Unlike `encode`, this lets other threads run; and it skips the offsets, a third of the work.
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise RequestError("The prompt has half of a surrogate pair in it. Send valid Unicode.") from error
        return [pack_tokens(encoding.ids) for encoding in encodings]

    def _piece_by_piece(self, cache_bytes: int) -> SegmentedEncoder | None:
        """The tokenizer used piece by piece; None when that is not the same as using it on whole texts."""
        cutter, ends = Cutter(self.backend), ends_of(self.backend)

        def differs(encode: Encode, texts: Iterable[str] = ()) -> str | None:
            trial = SegmentedEncoder(encode, cutter, ends, cache_bytes=0)
            return difference(self._whole, trial.encode, [*trial_texts(cutter.boundaries), *texts])

        if (text := differs(self._ids)) is not None:
            log.warning("prompts are tokenized whole: special tokens do not separate texts here", text=text)
            return None
        try:
            fast = FastPieces(self.backend, cutter, self._ids)
            if (text := differs(fast, trial_characters())) is not None:
                raise UnfitError(f"it reads {text!r} in another way")
            fast.renew()
            self._pieces = fast
            return SegmentedEncoder(fast, cutter, ends, cache_bytes, ASCII_SPEED)
        except UnfitError as error:
            log.info("tiktoken does not stand in for this tokenizer", reason=str(error))
        return SegmentedEncoder(self._ids, cutter, ends, cache_bytes)


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system}, *others] if system else others


def _template(tokenizer: Any, tools: list[Any] | None) -> ChatTemplate | None:
    """The template for conversations with these tools (some models have one of its own for them), if it can be read."""
    try:
        return ChatTemplate(tokenizer.get_chat_template(tools=tools), tokenizer)
    except (ValueError, TemplateSyntaxError):
        return None
