"""The doctor's probes: requests with new prompts, and the events in which an engine stores them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import aiohttp
import msgspec

from http_api.errors import RequestError
from kvevents import BlockStored
from router.apis.requests import ChatPrompt, TextPrompts
from router.apis.usage import UsageTail
from router.tokens.tokenizers import Tokenizers, TokenizerUnavailableError

STREAMED_TOKENS = 24
_WORDS_PER_BLOCK = 4  # each word has at least one token
# Signs of a switched-off cache, in vLLM's metrics and in SGLang's server info.
_SWITCHED_OFF = {
    "/metrics": re.compile(r'enable_prefix_caching="False"'),
    "/server_info": re.compile(r'"disable_radix_cache"\s*:\s*true'),
}
_RANK_HEADER = "X-data-parallel-rank"
# Random texts may begin alike. The engine may have cached a prompt that shares these further tokens.
_BY_CHANCE = 4


class RequestRefusedError(Exception):
    """A request that a worker answered with an error `status`. The message has its answer."""

    def __init__(self, problem: str, status: int) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a streamed answer: seconds to its first bytes and to its end, and its number of reads."""

    first_byte: float
    whole: float
    reads: int


class Worker:
    """A client for one model of the worker at `url`, which sends `headers` with each request."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, headers: Mapping[str, str]) -> None:
        self._session = session
        self._headers = headers
        self._url = url
        self._model = model

    def unused_text(self, block_size: int) -> str:
        """Return a text of several blocks that is in no cache."""
        return " ".join(secrets.token_hex(4) for _ in range(_WORDS_PER_BLOCK * block_size))

    async def complete(self, text: str, dp_rank: int) -> int | None:
        """Send a prompt to a DP rank. Return its cached tokens, `None` if not reported. Raises RequestRefusedError."""
        return await self._cached_tokens("/v1/completions", {"prompt": text}, dp_rank)

    async def chat(self, messages: list[dict[str, Any]], dp_rank: int) -> None:
        """Send a conversation to a DP rank. Raises RequestRefusedError."""
        await self._cached_tokens("/v1/chat/completions", {"messages": messages}, dp_rank)

    async def _cached_tokens(self, path: str, prompt: dict[str, Any], dp_rank: int) -> int | None:
        tail = UsageTail()
        async with self._post(path, prompt | {"max_tokens": 1}, {_RANK_HEADER: str(dp_rank)}) as response:
            tail.feed(await _answer(response))
        usage = tail.usage()
        return usage.cached if usage else None

    async def stream(self, text: str, tokens: int) -> Timing:
        """Stream an answer of `tokens` tokens. Raises RequestRefusedError."""
        body = {"prompt": text, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "stream": True}
        began = time.monotonic()
        async with self._post("/v1/completions", body, {}) as response:
            if response.status != 200:
                await _answer(response)
            first, reads = 0.0, 0
            async for _ in response.content.iter_any():
                first = first or time.monotonic() - began
                reads += 1
        return Timing(first, time.monotonic() - began, reads)

    async def switched_off(self) -> str | None:
        """Return the path that reports a switched-off prefix cache; `None` if no path does."""
        for path, sign in _SWITCHED_OFF.items():
            if sign.search(await self.get(path) or ""):
                return path
        return None

    async def get(self, path: str) -> str | None:
        """Return the text of an answer; `None` for another status than 200."""
        async with self._session.get(self._url + path, headers=self._headers) as response:
            return await response.text() if response.status == 200 else None

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        data = msgspec.json.encode({"model": self._model, "temperature": 0} | body)
        sent = {"Content-Type": "application/json", **self._headers, **headers}
        return self._session.post(self._url + path, data=data, headers=sent)


async def _answer(response: aiohttp.ClientResponse) -> bytes:
    body = await response.read()
    if response.status != 200:
        shown = body[:200].decode(errors="replace")
        raise RequestRefusedError(
            f"POST {response.url.path} is answered with {response.status}: {shown}", response.status
        )
    return body


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """The token IDs of a prompt that was never sent, except for the first `shared` ones, as others share them."""

    token_ids: list[int]
    shared: int


async def new_prompt(
    tokenizers: Tokenizers, model: str, prompt: TextPrompts | ChatPrompt, another: TextPrompts | ChatPrompt
) -> NewPrompt | None:
    """Return a new prompt, compared with `another`; `None` without a tokenizer or chat template for the model."""
    try:
        token_ids, others = [list((await tokenizers.token_ids(model, each))[0]) for each in (prompt, another)]
    except (TokenizerUnavailableError, RequestError):
        return None
    return NewPrompt(token_ids, _equal(token_ids, others) + _BY_CHANCE)


def stored(prompt: NewPrompt, events: Iterable[BlockStored]) -> BlockStored | None:
    """Return the event that stores the first blocks of a prompt, after the ones that may have been cached."""
    return next((event for event in events if _stores(event, prompt)), None)


def _stores(event: BlockStored, prompt: NewPrompt) -> bool:
    """Return whether an event stores blocks from a shared token on, and a new block among them."""
    size, stored_ids = event.block_size, event.token_ids
    if size <= 0:
        return False
    for start in (0,) if event.parent_block_hash is None else range(size, prompt.shared + 1, size):
        expected = prompt.token_ids[start : start + len(stored_ids)]
        is_new = len(expected) >= size and start + len(expected) > prompt.shared
        if is_new and stored_ids[: len(expected)] == expected:
            return True
    return False


def difference(expected: Sequence[int], events: Iterable[BlockStored]) -> str:
    """Describe the first difference between the expected tokens and the sequence that an engine began last."""
    roots = [event for event in events if event.parent_block_hash is None and event.token_ids]
    found = roots[-1].token_ids if roots else []
    at = _equal(expected, found)
    if at == min(len(expected), len(found)):
        return "the engine's events begin no sequence with it"
    return f"token {at} is {expected[at]} here and {found[at]} in the engine's events"


def _equal(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
