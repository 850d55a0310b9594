"""Requests of clients: most read their answers, some abort, stall, or read slowly."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from yarl import URL

PROMPTS = 400
_WORDS = ["river", "stone", "cloud", "market", "winter", "letter", "garden", "engine", "paper", "window"]
_PATIENCE = 30.0


class Clients:
    """A source of clients, one for each call of `one`. `outcomes` counts their results."""

    def __init__(self, url: str, random: Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = URL(url)
        self._random = random
        self._ways: list[tuple[float, str, Callable[[bool], Awaitable[str]]]] = [
            (0.30, "whole answers", self._whole),
            (0.40, "streams", self._stream),
            (0.10, "left while it streamed", self._leave),
            (0.05, "left before an answer", self._leave_at_once),
            (0.05, "left in their own bodies", self._leave_in_body),
            (0.05, "stalled in their bodies", self._stall),
            (0.05, "read slowly", self._read_slowly),
        ]

    async def one(self) -> None:
        """Run one client, from its connection to its end."""
        (chosen,) = self._random.choices(self._ways, weights=[way[0] for way in self._ways])
        _, name, way = chosen
        try:
            async with asyncio.timeout(_PATIENCE):
                outcome = await way(name != "whole answers")
        except (OSError, asyncio.IncompleteReadError):
            outcome = "connection lost"
        except TimeoutError:
            outcome = "NO END"
        self.outcomes[f"{name}: {outcome}" if outcome else name] += 1

    async def _whole(self, stream: bool) -> str:
        return await self._ask(stream, self._rest)

    async def _stream(self, stream: bool) -> str:
        return await self._ask(stream, self._rest)

    async def _leave(self, stream: bool) -> str:
        return await self._ask(stream, lambda reader: reader.read(300))

    async def _leave_at_once(self, stream: bool) -> str:
        return await self._ask(stream, lambda _: asyncio.sleep(self._random.random() * 0.02))

    async def _read_slowly(self, stream: bool) -> str:
        async def slowly(reader: asyncio.StreamReader) -> bytes:
            await asyncio.sleep(1)
            return await self._rest(reader)

        return await self._ask(stream, slowly)

    async def _leave_in_body(self, stream: bool) -> str:
        return await self._ask(stream, lambda _: asyncio.sleep(0.01), part=0.5)

    async def _stall(self, stream: bool) -> str:
        return await self._ask(stream, self._rest, part=0.5)

    async def _ask(
        self, stream: bool, then: Callable[[asyncio.StreamReader], Awaitable[bytes | None]], part: float = 1.0
    ) -> str:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            body = self._body(stream)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
            sent = head + b"content-length: %d\r\n\r\n" % len(body) + body
            writer.write(sent[: int(len(sent) * part)])
            answer = await then(reader)
            return answer.split(b" ")[1].decode() if answer else ""
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    @staticmethod
    async def _rest(reader: asyncio.StreamReader) -> bytes:
        answer = await reader.readuntil(b"\r\n\r\n")
        head = answer.lower()
        if b"content-length:" in head:
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            return answer + await reader.readexactly(length)
        while not answer.endswith(b"0\r\n\r\n"):
            more = await reader.read(65536)
            if not more:
                raise ConnectionError("the answer was interrupted")
            answer = answer[-64:] if len(answer) > 100_000 else answer
            answer += more
        return answer

    def _body(self, stream: bool) -> bytes:
        words = Random(self._random.randrange(PROMPTS)).choices(_WORDS, k=200)
        messages = [{"role": "system", "content": " ".join(words)}, {"role": "user", "content": "go on"}]
        tokens = self._random.randint(4, 40)
        return json.dumps({"model": "simulated", "messages": messages, "max_tokens": tokens, "stream": stream}).encode()
