"""Prompts with images, audio or video. The router asks an engine once for each item's tokens.

A chat template writes a placeholder for an item, and the engine's media processor replaces it by a run of tokens. So an
engine is asked to render a short chat with only the item. Compared with the router's own rendering, the answer shows
which placeholder became which run. It also has the item's tokens, and the name that is hashed into its blocks
(`features`). From then on the router builds each prompt with this item itself.

An engine that does not render (vLLM without `--enable-scale-out`) returns the run by `/tokenize`, without the name.
Then the prompt's length is known, and the index is searched up to the first item.

The built prompts are checked: the first one, and one from time to time, is rendered as a whole. If an engine cannot be
asked, or differs, prompts are exact only up to their first item.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import structlog
from xxhash import xxh3_128_digest

from http_api.errors import RequestError
from indexer.hashing import TOKEN_BYTES, MediaSpan, PackedPrompt
from router.apis.messages import MODALITIES, is_fetched, media_parts, stand_in
from router.apis.requests import ChatPrompt
from router.tokens import TokenizerUnavailableError
from router.tokens.agreement import CHECK_SECONDS
from router.tokens.engine_client import PromptRefusedError
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.prompt_cache import common_tokens

log = structlog.get_logger()

# The content of a link can change, and an engine that gave no name may give one later.
ASK_AGAIN_SECONDS = 600.0
_ENTRY_BYTES = 600
# Maximum number of items to ask about for one prompt. Later prompts ask about the others.
_MOST_ASKED = 16
# The modalities of a prompt's items, and whether it has several items.
_Case = tuple[frozenset[str], bool]

_encode = msgspec.msgpack.Encoder(order="sorted").encode


class Item(NamedTuple):
    """A media item of a prompt. `key` identifies everything that determines its tokens."""

    key: bytes
    part: dict[str, Any]
    kind: str


class Expanded(NamedTuple):
    """A prompt with media. `known`: the prompt before the first item without a name. `whole`: all of it."""

    known: PackedPrompt
    whole: PackedPrompt


@dataclass(frozen=True)
class Run:
    """The tokens that replace an item's placeholder. `spans`: the item's own tokens among them.

    `named`: the engine gave the item's name, which its events use.
    """

    placeholder: bytes
    tokens: bytes
    spans: tuple[MediaSpan, ...]
    named: bool


@dataclass(frozen=True)
class _Answer:
    """An engine's answer about an item, valid for a time; a missing `run` means that it is of no use."""

    run: Run | None
    until: float


class MediaReader:
    """The media prompts of one model. All times are in seconds.

    - `limit_bytes`: the limit of the cache of items.
    - `timeout`: the limit for all requests about one prompt.
    - `interval`: the time between comparisons, and before a failed engine is asked again.
    """

    def __init__(
        self,
        local: LocalTokenizer,
        engine: EngineTokenizer,
        limit_bytes: int,
        timeout: float = 1.0,
        interval: float = CHECK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.local = local
        self._engine = engine
        self._limit = limit_bytes
        self._timeout = timeout
        self._interval = interval
        self._clock = clock
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._asking: dict[bytes, asyncio.Event] = {}
        self._agrees: dict[_Case, bool] = {}
        self._compare_at: dict[_Case, float] = {}
        self._ask_from = 0.0
        self._learned = False
        self.cached_bytes = 0

    def report(self) -> dict[str, int]:
        """Return how many items have names, have none, or are unknown."""
        runs = [answer.run for answer in self._answers.values()]
        named = sum(run is not None and run.named for run in runs)
        unknown = runs.count(None)
        return {"named": named, "unnamed": len(runs) - named - unknown, "unknown": unknown}

    def asks(self, items: list[Item]) -> bool:
        """Return whether an engine must be asked before this prompt can be built."""
        now, case = self._clock(), _case(items)
        if now < self._ask_from:
            return False
        if now >= self._compare_at.get(case, 0.0):
            return True
        return self._agrees.get(case, False) and any(self._answer(item) is None for item in items)

    def expanded(self, chat: ChatPrompt, items: list[Item], at_most: int) -> Expanded | None:
        """Build a prompt from cached answers; None if an item is unknown, or if built prompts of this kind differ."""
        runs = self._runs(items) if self._agrees.get(_case(items), False) else None
        return None if runs is None else self._put_together(chat, runs, at_most)

    async def read(self, chat: ChatPrompt, in_thread: Callable[..., Awaitable[Any]]) -> Expanded | None:
        """Build a prompt after asking engines what is needed; None if that fails. `in_thread` runs slow functions."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._read(chat, in_thread)
        except TimeoutError:
            self._pause(f"no answer within {self._timeout:g} s")
            return None

    async def _read(self, chat: ChatPrompt, in_thread: Callable[..., Awaitable[Any]]) -> Expanded | None:
        items: list[Item] = await in_thread(media_items, chat)
        if self.asks(items):
            unknown = {item.key: item for item in items if self._answer(item) is None}
            asked = islice(unknown.values(), _MOST_ASKED)
            await asyncio.gather(*(self._learn(item, chat.media_options) for item in asked))
        elif not self._agrees.get(_case(items), False):
            return None
        runs = self._runs(items)
        found: Expanded | None = None if runs is None else await in_thread(self._put_together, chat, runs, sys.maxsize)
        return found if found is not None and await self._compared(chat, items, found) else None

    def _runs(self, items: list[Item]) -> list[Run] | None:
        runs: list[Run] = []
        for item in items:
            answer = self._answers.get(item.key)
            if answer is None or answer.run is None:
                return None
            self._answers.move_to_end(item.key)
            runs.append(answer.run)
        return runs

    def _put_together(self, chat: ChatPrompt, runs: list[Run], at_most: int) -> Expanded | None:
        whole = _put_together(self.local.encode_placeholders(chat, at_most=at_most), runs)
        if whole is None or all(run.named for run in runs):
            return None if whole is None else Expanded(whole, whole)
        return Expanded(_up_to_unnamed(whole, runs), whole)

    async def _compared(self, chat: ChatPrompt, items: list[Item], ours: Expanded) -> bool:
        """Return whether built prompts of this kind equal the engine's; compare this one if a comparison is due."""
        case, now = _case(items), self._clock()
        if now < max(self._compare_at.get(case, 0.0), self._ask_from):
            return self._agrees.get(case, False)
        self._compare_at[case] = now + self._interval
        try:
            (theirs,) = await self._engine.ask(chat)
        except TokenizerUnavailableError as error:
            log.info("a prompt with media cannot be compared", reason=str(error))
            return self._agrees.get(case, False)
        named = bool(theirs.media) and ours.known is ours.whole
        equal = theirs.tokens == ours.whole.tokens and (not named or theirs.media == ours.whole.media)
        if not equal:
            self._answers.clear()  # the engine's processor may have changed
            self.cached_bytes = 0
            log.warning("prompts with media differ from the engine's", kinds=sorted(case[0]))
        self._agrees[case] = equal
        return equal

    def _answer(self, item: Item) -> _Answer | None:
        answer = self._answers.get(item.key)
        return None if answer is None or self._clock() >= answer.until else answer

    async def _learn(self, item: Item, options: dict[str, Any] | None) -> None:
        """Ask about one item, unless another request is already doing so."""
        while self._answer(item) is None and (asking := self._asking.get(item.key)) is not None:
            await asking.wait()
        if self._answer(item) is not None:
            return
        self._asking[item.key] = asking = asyncio.Event()
        try:
            alone = ChatPrompt([{"role": "user", "content": [item.part]}], media_options=options)
            run = await self._asked(alone, stand_in(item.part, item.kind))
            if run is None:
                lasts = self._interval
            else:
                lasts = math.inf if run.named and not is_fetched(item.part, item.kind) else ASK_AGAIN_SECONDS
            self._remember(item.key, _Answer(run, self._clock() + lasts))
        finally:
            del self._asking[item.key]
            asking.set()

    async def _asked(self, alone: ChatPrompt, name: str) -> Run | None:
        try:
            (theirs,) = await self._engine.ask(alone)
            run = _run(self.local, alone, theirs, name)
        except PromptRefusedError as error:
            if not self._learned:  # the engine may not support media, or return no tokens of chats
                self._pause(str(error))
            return None
        except (TokenizerUnavailableError, RequestError) as error:
            self._pause(str(error))
            return None
        self._learned |= run is not None
        return run

    def _pause(self, reason: str) -> None:
        """Stop asking engines for `interval` seconds."""
        self._ask_from = self._clock() + self._interval
        log.info("engines are not asked about media for a while", seconds=self._interval, reason=reason)

    def _remember(self, key: bytes, answer: _Answer) -> None:
        self._forget(key)
        self._answers[key] = answer
        self.cached_bytes += _size(answer)
        while self.cached_bytes > self._limit:
            self._forget(next(iter(self._answers)))

    def _forget(self, key: bytes) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.cached_bytes -= _size(answer)


def media_items(chat: ChatPrompt) -> list[Item]:
    """Return the media items of a conversation in order. Raises TokenizerUnavailableError."""
    try:
        options = _encode(chat.media_options)
        return [Item(xxh3_128_digest(_encode(part) + options), part, kind) for part, kind in media_parts(chat.messages)]
    except (ValueError, OverflowError, RecursionError) as error:  # for example a lone surrogate
        raise TokenizerUnavailableError(f"the prompt cannot be sent to an engine: {error}") from error


def _size(answer: _Answer) -> int:
    return _ENTRY_BYTES + (len(answer.run.tokens) if answer.run else 0)


def _case(items: list[Item]) -> _Case:
    return frozenset(MODALITIES[item.kind] for item in items), len(items) > 1


def _run(local: LocalTokenizer, alone: ChatPrompt, theirs: PackedPrompt, name: str) -> Run | None:
    """Return the run for the placeholder of a chat's only item, if it can be determined, under its own or this name."""
    ours = local.encode_placeholders(alone)
    before, with_stand_ins = local.encode_around_media(alone)
    start = min(common_tokens(ours, theirs), theirs.media[0].start if theirs.media else len(before))
    behind = min(len(ours) - start - 1, len(theirs) - (theirs.media[-1].end if theirs.media else start + 1))
    ends = _common_end(ours.tokens[start * TOKEN_BYTES :], theirs.tokens[start * TOKEN_BYTES :], behind)
    placeholder, tokens = (_slice(each, start, len(each) - ends) for each in (ours, theirs))
    # Text that the template also writes without the item is not a placeholder.
    if not placeholder or placeholder == tokens or not tokens or _count(with_stand_ins.tokens, placeholder):
        return None
    named = bool(theirs.media)
    spans = tuple(span.moved(-start) for span in theirs.media) or (MediaSpan(0, len(tokens) // TOKEN_BYTES, name),)
    return Run(placeholder, tokens, spans, named)


def _put_together(prompt: PackedPrompt, runs: list[Run]) -> PackedPrompt | None:
    """Return a prompt with runs in place of its placeholders; None if the numbers of both differ."""
    wanted = Counter(run.placeholder for run in runs)
    if any(_count(prompt.tokens, placeholder) != count for placeholder, count in wanted.items()):
        return None
    tokens, done = bytearray(), 0
    media: list[MediaSpan] = []
    for run in runs:
        place = _find(prompt.tokens, run.placeholder, done)
        if place < 0:
            return None
        tokens += prompt.tokens[done:place]
        start = len(tokens) // TOKEN_BYTES
        media += [span.moved(start) for span in run.spans]
        tokens += run.tokens
        done = place + len(run.placeholder)
    tokens += prompt.tokens[done:]
    common = _find(prompt.tokens, runs[0].placeholder, 0) // TOKEN_BYTES
    return prompt.extended(bytes(tokens), common, tuple(media))


def _up_to_unnamed(whole: PackedPrompt, runs: list[Run]) -> PackedPrompt:
    """Return the prompt up to its first item without a name."""
    known = 0
    for run in runs:
        if not run.named:
            break
        known += len(run.spans)
    media = whole.media[:known]
    return PackedPrompt(whole.tokens[: whole.media[known].start * TOKEN_BYTES], media)


def _slice(prompt: PackedPrompt, start: int, end: int) -> bytes:
    return prompt.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]


def _common_end(one: bytes, other: bytes, most: int) -> int:
    """Return how many of the last `most` tokens two packed prompts share."""
    ours, theirs = array("I", one), array("I", other)
    count = 0
    while count < most and ours[-1 - count] == theirs[-1 - count]:
        count += 1
    return count


def _find(tokens: bytes, wanted: bytes, start: int) -> int:
    """Return the byte position of packed tokens in a prompt; -1 if they do not occur."""
    place = tokens.find(wanted, start)
    while place >= 0 and place % TOKEN_BYTES:
        place = tokens.find(wanted, place + 1)
    return place


def _count(tokens: bytes, wanted: bytes) -> int:
    count, place = 0, _find(tokens, wanted, 0)
    while place >= 0:
        count += 1
        place = _find(tokens, wanted, place + len(wanted))
    return count
