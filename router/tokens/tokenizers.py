"""The token ids of a request's prompts: exactly those the engine will compute.

Each model has its way (router/tokens/model_tokenizer.py). What takes long is done in threads, so that the event loop
never waits for it; the rest takes less time than the way to a thread and back: short prompts, and long ones of which
nearly all was seen before.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.media import has_media, text_length
from router.apis.requests import ChatPrompt, Prompt, TextPrompts, TokenPrompts
from router.tokens.errors import TokenizerUnavailableError, TooLongForNowError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.media_reader import Expanded, MediaReader, items_of
from router.tokens.model_tokenizer import ModelTokenizer, Path

__all__ = ["TokenizerUnavailableError", "Tokenizers"]

# What is tokenized at once, in characters not seen before (eight times as many where fastokens does it): a third of a
# millisecond's work.
INLINE_CHARACTERS = 2048
# What is rendered and looked up at once, in bytes of the body: two milliseconds' work at most.
INLINE_BYTES = 2**18
# Longer prompts are not tokenized: they are longer than any engine takes, and would take minutes and gigabytes.
MOST_CHARACTERS = 8 * 2**20
# Requests whose texts wait for a thread or are in one.
MAX_WAITING = 256


T = TypeVar("T")


class Tokenized(NamedTuple):
    """Prompts as tokens.

    `token_ids` are those the engine computes: all of a prompt, or what comes before its first media item whose name is
    not known. `identities` are the same list for prompts that are exact; of others, tokens in which a name of ours or a
    text stands for each media item, or what is likely.
    """

    token_ids: list[PackedPrompt]
    identities: list[PackedPrompt]


class Tokenizers:
    """The tokenizers by model, and the threads they work in."""

    def __init__(self, threads: int = 2, timeout_seconds: float = 5.0, most_characters: int = MOST_CHARACTERS) -> None:
        """`most_characters`: of a prompt."""
        self._models: dict[str, ModelTokenizer] = {}
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._timeout_seconds = timeout_seconds
        self._most_characters = most_characters
        self._waiting = 0

    def add(self, model: str, tokenizer: ModelTokenizer | LocalTokenizer) -> None:
        """Use this for the model from now on, in place of any other. For the thread of the event loop."""
        if isinstance(tokenizer, LocalTokenizer):
            tokenizer = ModelTokenizer(tokenizer)
        self._models[model] = tokenizer

    def remove(self, model: str) -> None:
        """Forget the model's tokenizer, if it has one."""
        self._models.pop(model, None)

    def by_model(self) -> dict[str, ModelTokenizer]:
        """The tokenizers that there are."""
        return dict(self._models)

    async def token_ids(self, model: str, prompt: Prompt, body_bytes: int = 0) -> list[PackedPrompt]:
        """The token ids of each prompt: one of them for a chat; none for prompts that are embeddings.

        A chat with media has those before the first of them. `body_bytes` is the size of what the prompt was read from.

        Raises RequestError (400, 413) for a prompt that no worker takes, and TokenizerUnavailableError when the ids
        cannot be known (no tokenizer, no engine answers, too much to do already).
        """
        return (await self.tokenize(model, prompt, body_bytes)).token_ids

    async def tokenize(self, model: str, prompt: Prompt, body_bytes: int = 0) -> Tokenized:
        """The same, and what tells apart prompts with media from each other."""
        return self.tokenize_now(model, prompt, body_bytes) or await self.tokenize_aside(model, prompt)

    def tokenize_now(self, model: str, prompt: Prompt, body_bytes: int = 0) -> Tokenized | None:
        """The same at once; None when it takes longer than the event loop may be held up. Raises the same errors."""
        tokenizer = self._models.get(model)
        if isinstance(prompt, TokenPrompts):
            return None if body_bytes > INLINE_BYTES else _of_tokens(prompt, tokenizer)
        self._check_length(prompt, body_bytes)
        if tokenizer is None:
            raise TokenizerUnavailableError(f"no tokenizer for model {model!r}")
        if tokenizer.asks(prompt):
            known = tokenizer.engine.known(prompt) if tokenizer.engine is not None else None
            return None if known is None else Tokenized(known, known)
        if tokenizer.local is None:
            raise TokenizerUnavailableError(f"neither a tokenizer nor an engine to ask for model {model!r}")
        if body_bytes > INLINE_BYTES:
            return None
        begun = time.perf_counter()
        try:
            tokenized = _tokenized(tokenizer.local, prompt, INLINE_CHARACTERS, tokenizer.media)
        except TooLongForNowError:
            return None
        tokenizer.usage.add(Path.LOCAL, begun)
        return tokenized

    async def tokenize_aside(self, model: str, prompt: Prompt) -> Tokenized:
        """The same for what `tokenize_now` leaves: by an engine, or in a thread. Raises the same errors."""
        tokenizer = self._models.get(model)
        if isinstance(prompt, TokenPrompts):
            return await self._run(_of_tokens, prompt, tokenizer)
        if tokenizer is None:
            raise TokenizerUnavailableError(f"no tokenizer for model {model!r} any more")
        begun = time.perf_counter()
        if tokenizer.asks(prompt):
            return await self._asked(tokenizer, prompt, begun)
        if tokenizer.local is None:
            raise TokenizerUnavailableError(f"neither a tokenizer nor an engine to ask for model {model!r}")
        tokenized = await self._read_here(tokenizer, tokenizer.local, prompt)
        tokenizer.usage.add(Path.LOCAL, begun)
        return tokenized

    async def _read_here(
        self, tokenizer: ModelTokenizer, local: LocalTokenizer, prompt: TextPrompts | ChatPrompt
    ) -> Tokenized:
        """A prompt by the local tokenizer, with what engines tell of its media."""
        media = tokenizer.media
        if media is not None and isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            expanded = await media.read(prompt, self._run)
            if expanded is not None:
                return _of_expanded(expanded)
        return await self._in_thread(local, prompt)

    def count_text(self, model: str, begun: float) -> None:
        """A prompt of the model could not be tokenized, and is known by its text alone since then."""
        tokenizer = self._models.get(model)
        if tokenizer is not None:
            tokenizer.usage.add(Path.TEXT, begun)

    async def close(self) -> None:
        """Stop the threads; what they have begun is finished first."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def _check_length(self, prompt: TextPrompts | ChatPrompt, body_bytes: int) -> None:
        """Refuse what is too long. A body has as many bytes as its prompt has characters, or more."""
        if body_bytes <= self._most_characters:
            return
        if isinstance(prompt, TextPrompts):
            characters = sum(map(len, prompt.texts))
        else:
            characters = text_length(prompt.messages) if has_media(prompt.messages) else body_bytes
        if characters > self._most_characters:
            raise RequestError(
                f"The prompt has {characters} characters. Send at most {self._most_characters}, "
                "or raise limits.characters.",
                status=413,
                code="too_much_work",
            )

    async def _asked(self, tokenizer: ModelTokenizer, prompt: TextPrompts | ChatPrompt, begun: float) -> Tokenized:
        """A prompt as an engine reads it; as we do, or as far as we know, where none answers."""
        local, engine = tokenizer.local, tokenizer.engine
        assert engine is not None
        if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            if local is None:
                raise TokenizerUnavailableError(
                    "only a local tokenizer can tell what comes before the first media item"
                )
            return await self._in_thread(local, prompt)
        try:
            answer = await engine.tokenize(prompt)
        except TokenizerUnavailableError:
            if local is None:
                raise
            guessed = await self._in_thread(local, prompt)
            tokenizer.usage.add(Path.LOCAL, begun)
            return Tokenized(guessed.token_ids, list(guessed.identities))
        tokenizer.usage.add(Path.ENGINE, begun)
        if not answer.exact:
            return Tokenized(answer.prompts, list(answer.prompts))
        if tokenizer.suspected and local is not None:
            tokenizer.compare(await self._equal(local, prompt, answer.prompts))
        return Tokenized(answer.prompts, answer.prompts)

    async def _equal(
        self, local: LocalTokenizer, prompt: TextPrompts | ChatPrompt, prompts: list[PackedPrompt]
    ) -> bool:
        try:
            return (await self._in_thread(local, prompt)).identities == prompts
        except (TokenizerUnavailableError, RequestError):
            return False

    async def _in_thread(self, tokenizer: LocalTokenizer, prompt: TextPrompts | ChatPrompt) -> Tokenized:
        return await self._run(_tokenized, tokenizer, prompt)

    async def _run(self, work: Callable[..., T], *given: object) -> T:
        if self._waiting >= MAX_WAITING:
            raise TokenizerUnavailableError(f"{MAX_WAITING} requests wait to be tokenized already")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.get_running_loop().run_in_executor(self._executor, work, *given)
        except TimeoutError as error:
            raise TokenizerUnavailableError(f"not tokenized within {self._timeout_seconds:g} s") from error
        finally:
            self._waiting -= 1


def _tokenized(
    tokenizer: LocalTokenizer,
    prompt: TextPrompts | ChatPrompt,
    at_most: int = sys.maxsize,
    media: MediaReader | None = None,
) -> Tokenized:
    """A prompt as tokens, with what is known of its `media`.

    Raises TooLongForNowError when more than `at_most` characters of it are new, or an engine is to be asked first.
    """
    if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
        expanded = _expanded(media, prompt, at_most) if media is not None else None
        if expanded is not None:
            return _of_expanded(expanded)
        before, whole = tokenizer.encode_around_media(prompt, at_most=at_most)
        return Tokenized([before], [whole])
    prompts = tokenizer.tokenize(prompt, at_most=at_most)
    return Tokenized(prompts, prompts)


def _expanded(media: MediaReader, prompt: ChatPrompt, at_most: int) -> Expanded | None:
    items = items_of(prompt)
    if media.asks(items):
        raise TooLongForNowError
    return media.expanded(prompt, items, at_most)


def _of_expanded(expanded: Expanded) -> Tokenized:
    prompts = [expanded.whole]
    return Tokenized(prompts if expanded.known is expanded.whole else [expanded.known], prompts)


def _of_tokens(prompt: TokenPrompts, tokenizer: ModelTokenizer | None) -> Tokenized:
    if tokenizer is not None and tokenizer.local is not None:
        _check_vocabulary(prompt, tokenizer.local.vocab_size)
    prompts = [PackedPrompt.of(ids) for ids in prompt.token_ids]
    if prompt.truncation:
        prompts = [prompt.truncation.apply(each) for each in prompts]
    return Tokenized(prompts, prompts)


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
