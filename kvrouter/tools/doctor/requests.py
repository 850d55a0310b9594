"""Requests that the doctor sends to a worker: prompts that were never sent before."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from router.apis.usage import UsageTail

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
