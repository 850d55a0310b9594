"""The token ids of a request's prompts: exactly those the engine will compute, by the model's tokenizer.

A model's tokenizer is local where there is one, else a worker's. Long texts are tokenized in threads, so that the event
loop never waits for one; short ones take less time than the way to a thread and back.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from indexer.errors import RequestError
from router.errors import TokenizerUnavailableError
from router.local_tokenizer import LocalTokenizer
from router.media import has_media
from router.remote_tokenizer import RemoteTokenizer
from router.requests import ChatPrompt, Prompt, TextPrompts, TokenPrompts, Truncation

__all__ = ["TokenizerUnavailableError", "Tokenizers"]

# A quarter of a millisecond's work.
INLINE_CHARACTERS = 2048
# Requests whose texts wait for a thread or are in one.
MAX_WAITING = 256


class Tokenized(NamedTuple):
    """Prompts as tokens.

    `token_ids` are those the engine computes: all of a prompt, or what comes before its first media item. `identities`
    are the same for prompts without media; of others, tokens in which a text stands for each item.
    """

    token_ids: list[list[int]]
    identities: list[list[int]]


class Tokenizers:
    """The tokenizers by model, and the threads they work in."""

    def __init__(self, threads: int = 2, timeout_seconds: float = 5.0) -> None:
        self._tokenizers: dict[str, LocalTokenizer | RemoteTokenizer] = {}
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._timeout_seconds = timeout_seconds
        self._waiting = 0

    def add(self, model: str, tokenizer: LocalTokenizer | RemoteTokenizer) -> None:
        """Use this tokenizer for the model from now on, in place of any other."""
        self._tokenizers[model] = tokenizer

    def remove(self, model: str) -> None:
        """Forget the model's tokenizer, if it has one."""
        self._tokenizers.pop(model, None)

    async def token_ids(self, model: str, prompt: Prompt) -> list[list[int]]:
        """The token ids of each prompt: one list for a chat; none for prompts that are embeddings.

        A chat with media has those before the first of them.

        Raises RequestError (400) for a prompt that no worker would take, and TokenizerUnavailableError when the ids
        cannot be known (no tokenizer, its worker does not answer, too much to do already).
        """
        return (await self.tokenize(model, prompt)).token_ids

    async def tokenize(self, model: str, prompt: Prompt) -> Tokenized:
        """The same, and what tells apart prompts with media from each other."""
        tokenizer = self._tokenizers.get(model)
        if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            return await self._tokenize_around_media(tokenizer, prompt)
        if isinstance(prompt, TokenPrompts):
            if isinstance(tokenizer, LocalTokenizer):
                _check_vocabulary(prompt, tokenizer.vocab_size)
            token_ids = prompt.token_ids
        elif isinstance(tokenizer, LocalTokenizer):
            token_ids = await self._encode(tokenizer, prompt)
        elif tokenizer is not None:
            token_ids = await tokenizer.token_ids(prompt)
        else:
            raise TokenizerUnavailableError(f"no tokenizer for model {model!r}")
        if prompt.truncation:
            token_ids = [_truncated(ids, prompt.truncation) for ids in token_ids]
        return Tokenized(token_ids, token_ids)

    async def _tokenize_around_media(
        self, tokenizer: LocalTokenizer | RemoteTokenizer | None, chat: ChatPrompt
    ) -> Tokenized:
        if not isinstance(tokenizer, LocalTokenizer) or chat.truncation:
            raise TokenizerUnavailableError("only a local tokenizer can tell what comes before the first media item")
        told_apart = tokenizer.render(chat, media_as_text=True)
        # Whatever the template does differently for media, up to here it renders the same.
        exact = _common_start(told_apart, tokenizer.render(chat))
        before, whole = await self._encode_texts(
            tokenizer, [exact, told_apart], add_special_tokens=chat.add_special_tokens
        )
        return Tokenized([before], [whole])

    async def close(self) -> None:
        """Stop the threads; what they have begun is finished first."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    async def _encode(self, tokenizer: LocalTokenizer, prompt: TextPrompts | ChatPrompt) -> list[list[int]]:
        # A template is Python, which a second thread would not make faster: rendering stays here.
        texts = prompt.texts if isinstance(prompt, TextPrompts) else [tokenizer.render(prompt)]
        return await self._encode_texts(tokenizer, texts, add_special_tokens=prompt.add_special_tokens)

    async def _encode_texts(
        self, tokenizer: LocalTokenizer, texts: list[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return tokenizer.encode(texts, add_special_tokens=add_special_tokens)
        if self._waiting >= MAX_WAITING:
            raise TokenizerUnavailableError(f"{MAX_WAITING} requests wait to be tokenized already")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.get_running_loop().run_in_executor(
                    self._executor, lambda: tokenizer.encode(texts, add_special_tokens=add_special_tokens)
                )
        except TimeoutError as error:
            raise TokenizerUnavailableError(f"not tokenized within {self._timeout_seconds:g} s") from error
        finally:
            self._waiting -= 1


def _check_vocabulary(prompt: TokenPrompts, vocab_size: int) -> None:
    for index, token_ids in enumerate(prompt.token_ids):
        if max(token_ids) >= vocab_size:
            place = next(place for place, token in enumerate(token_ids) if token >= vocab_size)
            field = prompt.param if len(prompt.token_ids) == 1 else f"{prompt.param}[{index}]"
            raise RequestError(
                f"{field}[{place}] is {token_ids[place]}, which the model's vocabulary lacks. "
                f"Send token ids from 0 to {vocab_size - 1}.",
                param=prompt.param,
            )


def _common_start(text: str, other: str) -> str:
    return text[: bisect_left(range(len(text)), True, key=lambda place: not other.startswith(text[: place + 1]))]


def _truncated(token_ids: list[int], truncation: Truncation) -> list[int]:
    if truncation.side == "right":
        return token_ids[: truncation.tokens]
    return token_ids[-truncation.tokens :] if truncation.tokens else []
