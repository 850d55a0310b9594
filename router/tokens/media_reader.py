"""Prompts with images, audio or video as engines compute them: what stands for an item is asked of an engine once.

A chat template puts a placeholder where an item is, and the engine's processor of media puts a run of tokens in its
place. So an engine is asked to render a short chat with the item alone. Beside our own rendering of that chat, this
shows what placeholder became what run; and which of its tokens are the item's, and by what name it takes part in the
hashes of its blocks (`features`). From then on each prompt with this item is put together here.

An engine that does not render for others (vLLM without `--enable-scale-out`) tells the run by its `/tokenize`, and no
name: such prompts are as long as they are, and what comes before the first item is looked up in the index.

Whether prompts are put together right is tried: the first one, and one from time to time, is rendered as a whole. What
cannot be asked, or differs, is read as without an engine: exactly up to its first item.
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
from router.apis.media import MODALITIES, is_fetched, media_parts, stand_in
from router.apis.requests import ChatPrompt
from router.tokens.engine_client import PromptRefusedError
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.errors import TokenizerUnavailableError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.prompt_cache import common_tokens

log = structlog.get_logger()

# What is behind a link may change, and an engine that told no name may tell it later.
ASK_AGAIN_SECONDS = 600.0
_ENTRY_BYTES = 600
# Items that are asked about for one prompt; about the others for the next one with them.
_MOST_ASKED = 16
# Kinds of items in a prompt, and whether there are several.
_Case = tuple[frozenset[str], bool]

_encode = msgspec.msgpack.Encoder(order="sorted").encode


class Item(NamedTuple):
    """A media item of a prompt. `key`: for all that decides what it becomes."""

    key: bytes
    part: dict[str, Any]
    kind: str


class Expanded(NamedTuple):
    """A prompt as far as its blocks' hashes are known, and the whole of it: the same where all items are named."""

    known: PackedPrompt
    whole: PackedPrompt


@dataclass(frozen=True)
class Run:
    """What becomes of an item's placeholder: packed tokens become others, of which `spans` are the item's.

    `named`: by the engine, as it names them in its events.
    """

    placeholder: bytes
    tokens: bytes
    spans: tuple[MediaSpan, ...]
    named: bool


@dataclass(frozen=True)
class _Answer:
    """What was learned of an item, if anything of use was, and until when that holds."""

    run: Run | None
    until: float


class MediaReader:
    """One model's prompts with media. `limit_bytes` bounds what is kept of items; all times are in seconds.

    `timeout`: of all that is asked about a prompt. `interval`: between comparisons, and after what went wrong, until it
    is tried again.
    """

    def __init__(
        self,
        local: LocalTokenizer,
        engine: EngineTokenizer,
        limit_bytes: int,
        timeout: float = 5.0,
        interval: float = 60.0,
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
        """How many items are known with their names, without, or not at all."""
        runs = [answer.run for answer in self._answers.values()]
        named = sum(run is not None and run.named for run in runs)
        untold = runs.count(None)
        return {"named": named, "unnamed": len(runs) - named - untold, "untold": untold}

    def asks(self, items: list[Item]) -> bool:
        """Whether something about a prompt is to be asked first."""
        now, case = self._clock(), _case(items)
        if now < self._ask_from:
            return False
        if now >= self._compare_at.get(case, 0.0):
            return True
        return self._agrees.get(case, False) and any(self._answer(item) is None for item in items)

    def expanded(self, chat: ChatPrompt, items: list[Item], at_most: int) -> Expanded | None:
        """A prompt of which nothing is to be asked; None where an item is not known, or such prompts were seen to
        differ. Raises as the local tokenizer.
        """
        runs = self._runs(items) if self._agrees.get(_case(items), False) else None
        return None if runs is None else self._put_together(chat, runs, at_most)

    async def read(self, chat: ChatPrompt, in_thread: Callable[..., Awaitable[Any]]) -> Expanded | None:
        """Any prompt, after what is to be asked about it. `in_thread` calls what takes its time."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._read(chat, in_thread)
        except TimeoutError:
            self._pause(f"nothing told within {self._timeout:g} s")
            return None

    async def _read(self, chat: ChatPrompt, in_thread: Callable[..., Awaitable[Any]]) -> Expanded | None:
        items: list[Item] = await in_thread(items_of, chat)
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
        """Whether prompts like this one are put together as engines do: this one is tried, if that is due."""
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
            self._answers.clear()  # they may be from before the engine's processor changed
            self.cached_bytes = 0
            log.warning("prompts with media are not put together as the engine does", kinds=sorted(case[0]))
        self._agrees[case] = equal
        return equal

    def _answer(self, item: Item) -> _Answer | None:
        """What was answered about an item, unless it is time to ask again."""
        answer = self._answers.get(item.key)
        return None if answer is None or self._clock() >= answer.until else answer

    async def _learn(self, item: Item, options: dict[str, Any] | None) -> None:
        """Ask about one item, unless another request does so already."""
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
        """What an engine makes of an item; None where that tells nothing."""
        try:
            (theirs,) = await self._engine.ask(alone)
            run = _run(self.local, alone, theirs, name)
        except PromptRefusedError as error:
            if not self._learned:  # perhaps it takes no media at all, or tells nothing of any chat
                self._pause(str(error))
            return None
        except (TokenizerUnavailableError, RequestError) as error:
            self._pause(str(error))
            return None
        self._learned |= run is not None
        return run

    def _pause(self, reason: str) -> None:
        """Ask nothing for a while."""
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


def items_of(chat: ChatPrompt) -> list[Item]:
    """The media items of a conversation, in their order. Raises TokenizerUnavailableError."""
    try:
        options = _encode(chat.media_options)
        return [Item(xxh3_128_digest(_encode(part) + options), part, kind) for part, kind in media_parts(chat.messages)]
    except (ValueError, OverflowError, RecursionError) as error:  # half of a surrogate pair, for one
        raise TokenizerUnavailableError(f"no engine can be asked about this: {error}") from error


def _size(answer: _Answer) -> int:
    return _ENTRY_BYTES + (len(answer.run.tokens) if answer.run else 0)


def _case(items: list[Item]) -> _Case:
    return frozenset(MODALITIES[item.kind] for item in items), len(items) > 1


def _run(local: LocalTokenizer, alone: ChatPrompt, theirs: PackedPrompt, name: str) -> Run | None:
    """What became of the placeholder in a chat with one item alone; None where that cannot be seen.

    `name`: what the item is called where the engine gives it no name.
    """
    ours = local.encode_placeholders(alone)
    before, told_apart = local.encode_around_media(alone)
    start = min(common_tokens(ours, theirs), theirs.media[0].start if theirs.media else len(before))
    behind = min(len(ours) - start - 1, len(theirs) - (theirs.media[-1].end if theirs.media else start + 1))
    ends = _common_end(ours.tokens[start * TOKEN_BYTES :], theirs.tokens[start * TOKEN_BYTES :], behind)
    placeholder, tokens = (_slice(each, start, len(each) - ends) for each in (ours, theirs))
    # What a template writes beside an item as well is no placeholder.
    if not placeholder or placeholder == tokens or not tokens or _count(told_apart.tokens, placeholder):
        return None
    named = bool(theirs.media)
    spans = tuple(span.moved(-start) for span in theirs.media) or (MediaSpan(0, len(tokens) // TOKEN_BYTES, name),)
    return Run(placeholder, tokens, spans, named)


def _put_together(prompt: PackedPrompt, runs: list[Run]) -> PackedPrompt | None:
    """A prompt with runs in the place of its placeholders; None where there are more or fewer of those than items."""
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
    """What comes before the first item whose name the engine did not tell."""
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
    """How many tokens two packed prompts end with alike, of `most`."""
    ours, theirs = array("I", one), array("I", other)
    count = 0
    while count < most and ours[-1 - count] == theirs[-1 - count]:
        count += 1
    return count


def _find(tokens: bytes, wanted: bytes, start: int) -> int:
    """The place of some packed tokens among others, in bytes; -1 where they are not."""
    place = tokens.find(wanted, start)
    while place >= 0 and place % TOKEN_BYTES:
        place = tokens.find(wanted, place + 1)
    return place


def _count(tokens: bytes, wanted: bytes) -> int:
    """How often some packed tokens are among others."""
    count, place = 0, _find(tokens, wanted, 0)
    while place >= 0:
        count += 1
        place = _find(tokens, wanted, place + len(wanted))
    return count
