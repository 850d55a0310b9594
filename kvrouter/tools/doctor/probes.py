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
_WORDS_PER_BLOCK = 4  # each is at least one token
# In vLLM's metrics and in SGLang's description of itself.
_SWITCHED_OFF = {
    "/metrics": re.compile(r'enable_prefix_caching="False"'),
    "/server_info": re.compile(r'"disable_radix_cache"\s*:\s*true'),
}
_RANK_HEADER = "X-data-parallel-rank"


class RequestRefusedError(Exception):
    """A worker did not answer a request as it should, but with `status`; the message says how."""

    def __init__(self, problem: str, status: int) -> None:
        super().__init__(problem)
        self.status = status


@dataclass(frozen=True, slots=True)
class Timing:
    """A streamed answer: seconds to its first bytes and to its end, and how many reads brought it."""

    first_byte: float
    whole: float
    reads: int


class Worker:
    """Sends requests for one model to the worker at `url`. `headers`: what it wants to be shown with each."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, headers: Mapping[str, str]) -> None:
        self._session = session
        self._headers = headers
        self._url = url
        self._model = model

    def unused_text(self, block_size: int) -> str:
        """A text of several blocks that is in no cache."""
        return " ".join(secrets.token_hex(4) for _ in range(_WORDS_PER_BLOCK * block_size))

    async def complete(self, text: str, dp_rank: int) -> int | None:
        """Send a prompt to a DP rank; its cached tokens, None if untold. Raises RequestRefusedError."""
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
        """Stream an answer of this many tokens. Raises RequestRefusedError."""
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
        """Where the engine says that it does not cache prefixes; None if it does not say so."""
        for path, sign in _SWITCHED_OFF.items():
            async with self._session.get(self._url + path, headers=self._headers) as response:
                if response.status == 200 and sign.search(await response.text()):
                    return path
        return None

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


# Random texts may begin alike: what the engine knows may share some tokens more than the one a prompt is held against.
_BY_CHANCE = 4


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """The token ids of a prompt that nobody sent before, but for the first `shared`, which others like it may have."""

    token_ids: list[int]
    shared: int


async def new_prompt(
    tokenizers: Tokenizers, model: str, prompt: TextPrompts | ChatPrompt, another: TextPrompts | ChatPrompt
) -> NewPrompt | None:
    """A prompt beside another as new; None where the router has no tokenizer or chat template for the model."""
    try:
        token_ids, others = [list((await tokenizers.token_ids(model, each))[0]) for each in (prompt, another)]
    except (TokenizerUnavailableError, RequestError):
        return None
    return NewPrompt(token_ids, _equal(token_ids, others) + _BY_CHANCE)


def stored(prompt: NewPrompt, events: Iterable[BlockStored]) -> BlockStored | None:
    """The event that stores the first blocks of a prompt, after those that may have been cached before."""
    return next((event for event in events if _stores(event, prompt)), None)


def _stores(event: BlockStored, prompt: NewPrompt) -> bool:
    """Whether an event stores blocks from one of the shared tokens on, and a new one among them."""
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
    """Where the sequence that an engine began last parts from what was expected."""
    roots = [event for event in events if event.parent_block_hash is None and event.token_ids]
    found = roots[-1].token_ids if roots else []
    at = _equal(expected, found)
    if at == min(len(expected), len(found)):
        return "the engine's events begin no sequence with it"
    return f"token {at} is {expected[at]} here and {found[at]} in the engine's events"


def _equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
