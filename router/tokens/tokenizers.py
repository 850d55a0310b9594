"""The token ids of a request's prompts: exactly those that the engine will compute.

Each model has a tokenizer (router/tokens/model_tokenizer.py). Slow work runs in threads, so that the event loop never
waits. Short prompts, and long ones that are mostly cached, take less time than a switch of threads and run on the loop.
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
from router.apis.messages import has_media, media_length
from router.apis.requests import ChatPrompt, Prompt, TextPrompts, TokenPrompts
from router.tokens import OnTrialError, TokenizerUnavailableError, TooLongForNowError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.media_reader import Expanded, MediaReader, media_items
from router.tokens.model_tokenizer import ModelTokenizer

__all__ = ["OnTrialError", "TokenizerUnavailableError", "Tokenizers"]

# Limit of uncached characters to tokenize on the event loop: a third of a millisecond. fastokens does eight times as
# many.
INLINE_CHARACTERS = 2048
# Limit of body bytes to render and look up on the event loop: at most two milliseconds.
INLINE_BYTES = 2**18
# Longer prompts are refused: no engine accepts them, and tokenizing would take minutes and gigabytes.
MOST_CHARACTERS = 8 * 2**20
# A prompt that takes more seconds, here or at an engine, is routed by load alone.
TOKENIZING_SECONDS = 5.0
# Maximum number of requests that wait for a thread or use one.
MAX_WAITING = 256


T = TypeVar("T")


class Tokenized(NamedTuple):
    """Prompts as tokens.

    - `token_ids`: the ids that the engine computes, up to the first media item without a known name.
    - `identities`: the same list if the prompts are exact. Otherwise a name or text replaces each media item, or the
      ids are a guess.
    """

    token_ids: list[PackedPrompt]
    identities: list[PackedPrompt]


class Tokenizers:
    """The tokenizers by model, and the threads they run in."""

    def __init__(
        self,
        threads: int = 2,
        timeout_seconds: float = TOKENIZING_SECONDS,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        """Create a set of tokenizers without models. One prompt has `timeout_seconds`."""
        self._models: dict[str, ModelTokenizer] = {}
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._timeout_seconds = timeout_seconds
        self._most_characters = most_characters
        self._waiting = 0

    def add(self, model: str, tokenizer: ModelTokenizer | LocalTokenizer) -> None:
        """Use this tokenizer for the model from now on. Call it on the event loop."""
        if isinstance(tokenizer, LocalTokenizer):
            tokenizer = ModelTokenizer(tokenizer)
        self._models[model] = tokenizer

    def remove(self, model: str) -> None:
        """Drop the model's tokenizer, if it has one."""
        self._models.pop(model, None)

    def by_model(self) -> dict[str, ModelTokenizer]:
        return dict(self._models)

    def keeps_items(self, model: str) -> bool:
        """Return whether the model's engine keeps all items of earlier responses in a conversation."""
        tokenizer = self._models.get(model)
        return tokenizer is not None and tokenizer.local is not None and tokenizer.local.keeps_items

    def text_of(self, model: str, tokens: bytes) -> str | None:
        """Return the text of a model's packed token ids; None if they cannot be decoded here."""
        tokenizer = self._models.get(model)
        return None if tokenizer is None or tokenizer.local is None else tokenizer.local.text_of(tokens)

    def states(self) -> dict[str, str]:
        """Return each model's route to tokens, or that its trial is running."""
        return {name: "trial running" if each.on_trial else each.route for name, each in self._models.items()}

    async def token_ids(self, model: str, prompt: Prompt, body_bytes: int = 0) -> list[PackedPrompt]:
        """Return the token ids of each prompt: one for a chat, none for embeddings.

        A chat with media has the ids up to its first item. `body_bytes` is the size of the parsed body.

        Raises RequestError (400, 413) if no worker accepts the prompt. Raises TokenizerUnavailableError if the ids are
        not available: no tokenizer, no answer from engines, or too much waiting work.
        """
        return (await self.tokenize(model, prompt, body_bytes)).token_ids

    async def tokenize(self, model: str, prompt: Prompt, body_bytes: int = 0) -> Tokenized:
        """Return the token ids of each prompt, and their identities. Raises as `token_ids` does."""
        return self.tokenize_now(model, prompt, body_bytes) or await self.tokenize_aside(model, prompt)

    def tokenize_now(self, model: str, prompt: Prompt, body_bytes: int = 0) -> Tokenized | None:
        """Return the tokens without waiting; None if that takes too long. Raises as `token_ids` does."""
        tokenizer = self._models.get(model)
        if isinstance(prompt, TokenPrompts):
            return None if body_bytes > INLINE_BYTES else _from_token_ids(prompt, tokenizer)
        self._check_length(prompt, body_bytes)
        if tokenizer is None:
            raise TokenizerUnavailableError(f"no tokenizer for model {model!r}")
        guesses = tokenizer.engine is not None and tokenizer.asks(prompt)
        if tokenizer.engine is not None and guesses:
            known = tokenizer.engine.cached(prompt)
            if known is not None:
                return Tokenized(known, known)
            if tokenizer.local is None or tokenizer.on_trial or tokenizer.engine.offers(prompt):
                return None
        if tokenizer.local is None:
            raise TokenizerUnavailableError(f"model {model!r} has neither a tokenizer nor an engine to ask")
        if body_bytes > INLINE_BYTES:
            return None
        started = time.perf_counter()
        try:
            tokenized = _tokenized(tokenizer.local, prompt, INLINE_CHARACTERS, tokenizer.media)
        except TooLongForNowError:
            return None
        tokenizer.usage.local.add(started)
        return _guess(tokenized) if guesses else tokenized

    async def tokenize_aside(self, model: str, prompt: Prompt) -> Tokenized:
        """Return the tokens by an engine or in a thread. Raises as `token_ids` does."""
        tokenizer = self._models.get(model)
        if isinstance(prompt, TokenPrompts):
            return await self._run(_from_token_ids, prompt, tokenizer)
        if tokenizer is None:
            raise TokenizerUnavailableError(f"the tokenizer for model {model!r} was removed")
        started = time.perf_counter()
        if tokenizer.asks(prompt):
            return await self._tokenize_by_engine(tokenizer, prompt, started)
        if tokenizer.local is None:
            raise TokenizerUnavailableError(f"model {model!r} has neither a tokenizer nor an engine to ask")
        tokenized = await self._tokenize_locally(tokenizer, tokenizer.local, prompt)
        tokenizer.usage.local.add(started)
        return tokenized

    async def _tokenize_locally(
        self, tokenizer: ModelTokenizer, local: LocalTokenizer, prompt: TextPrompts | ChatPrompt
    ) -> Tokenized:
        """Return the tokens by the local tokenizer, with engines' answers about media."""
        media = tokenizer.media
        if media is not None and isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            expanded = await media.read(prompt, self._run)
            if expanded is not None:
                return _from_expanded(expanded)
        return await self._in_thread(local, prompt)

    def count_text(self, model: str, started: float) -> None:
        """Count a prompt that is known only by its text; `started` is its start by `time.perf_counter`."""
        tokenizer = self._models.get(model)
        if tokenizer is not None:
            tokenizer.usage.text.add(started)

    async def close(self) -> None:
        """Stop the threads after their current work."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def _check_length(self, prompt: TextPrompts | ChatPrompt, body_bytes: int) -> None:
        """Raise RequestError (413) if a prompt is too long. Its body has a byte for each character.

        All bytes count that are not media, because a template can write any field of a chat.
        """
        if body_bytes <= self._most_characters:
            return
        if isinstance(prompt, TextPrompts):
            characters = sum(map(len, prompt.texts))
        else:
            characters = body_bytes - media_length(prompt.messages)
        if characters > self._most_characters:
            raise RequestError(
                f"The prompt has {characters} characters. Send at most {self._most_characters}, "
                "or raise limits.characters.",
                status=413,
                code="too_much_work",
            )

    async def _tokenize_by_engine(
        self, tokenizer: ModelTokenizer, prompt: TextPrompts | ChatPrompt, started: float
    ) -> Tokenized:
        """Return the tokens by an engine; if none answers, by the local tokenizer or from an earlier turn."""
        local, engine = tokenizer.local, tokenizer.engine
        assert engine is not None
        if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
            if tokenizer.on_trial:
                raise OnTrialError("prompts with media are tokenized after the trial")
            if local is None:
                raise TokenizerUnavailableError("only a local tokenizer knows the tokens before the first media item")
            return await self._in_thread(local, prompt)
        answer = None
        try:
            answer = await engine.tokenize(prompt, renders=tokenizer.on_trial and tokenizer.needs_rendering(prompt))
        except TokenizerUnavailableError as error:
            if tokenizer.on_trial:
                raise OnTrialError(f"the trial of its tokenizer is running: {error}") from error
            if local is None:
                raise
        if answer is None:
            assert local is not None
            guess = _guess(await self._in_thread(local, prompt))
            tokenizer.usage.local.add(started)
            return guess
        tokenizer.usage.engine.add(started)
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
            raise TokenizerUnavailableError(f"{MAX_WAITING} requests are already waiting to be tokenized")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.get_running_loop().run_in_executor(self._executor, work, *given)
        except TimeoutError as error:
            raise TokenizerUnavailableError(f"not tokenized within {self._timeout_seconds:g} s") from error
        finally:
            self._waiting -= 1


def _guess(tokenized: Tokenized) -> Tokenized:
    """Return tokens as a guess: an engine should have been asked."""
    return Tokenized(tokenized.token_ids, list(tokenized.identities))


def _tokenized(
    tokenizer: LocalTokenizer,
    prompt: TextPrompts | ChatPrompt,
    at_most: int = sys.maxsize,
    media: MediaReader | None = None,
) -> Tokenized:
    """Return a prompt as tokens, with the known runs of its `media`.

    Raises TooLongForNowError if more than `at_most` characters are new, or if an engine must be asked first.
    """
    if isinstance(prompt, ChatPrompt) and has_media(prompt.messages):
        expanded = _expanded(media, prompt, at_most) if media is not None else None
        if expanded is not None:
            return _from_expanded(expanded)
        before, whole = tokenizer.encode_around_media(prompt, at_most=at_most)
        return Tokenized([before], [whole])
    prompts = tokenizer.tokenize(prompt, at_most=at_most)
    return Tokenized(prompts, prompts)


def _expanded(media: MediaReader, prompt: ChatPrompt, at_most: int) -> Expanded | None:
    items = media_items(prompt)
    if media.asks(items):
        raise TooLongForNowError
    return media.expanded(prompt, items, at_most)


def _from_expanded(expanded: Expanded) -> Tokenized:
    prompts = [expanded.whole]
    return Tokenized(prompts if expanded.known is expanded.whole else [expanded.known], prompts)


def _from_token_ids(prompt: TokenPrompts, tokenizer: ModelTokenizer | None) -> Tokenized:
    if tokenizer is not None and tokenizer.local is not None:
        _check_vocabulary(prompt, tokenizer.local.vocab_size)
    prompts = [PackedPrompt.of(ids) for ids in prompt.token_ids]
    if prompt.truncation and (tokenizer is None or tokenizer.local is None or tokenizer.local.truncates):
        prompts = [prompt.truncation.apply(each) for each in prompts]
    return Tokenized(prompts, prompts)


def _check_vocabulary(prompt: TokenPrompts, vocab_size: int) -> None:
    for index, token_ids in enumerate(prompt.token_ids):
        if max(token_ids) >= vocab_size:
            place = next(place for place, token in enumerate(token_ids) if token >= vocab_size)
            field = prompt.param if len(prompt.token_ids) == 1 else f"{prompt.param}[{index}]"
            raise RequestError(
                f"{field}[{place}] is {token_ids[place]}, which is not in the model's vocabulary. "
                f"Send token ids from 0 to {vocab_size - 1}.",
                param=prompt.param,
            )
