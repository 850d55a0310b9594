"""Send chats at a steady rate until the file /tmp/stop exists, and print counts each second, then all failures.

Every second chat is streamed. Two of four have a connection of their own, as those of short-lived clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

import aiohttp

STOP = "/tmp/stop"
LONGEST = 600.0  # seconds of load


class Load:
    """The chats that were sent, and their outcomes."""

    def __init__(self, url: str, model: str, tokens: int) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model, self._tokens = model, tokens
        self.sent = self.answered = 0
        self.failures: list[dict[str, Any]] = []

    async def chat(self, session: aiohttp.ClientSession, kept: bool) -> None:
        """Send one chat, and count its outcome. `kept`: whether the session keeps its connections."""
        number = self.sent
        self.sent += 1
        stream = number % 2 == 0
        text = f"conversation {number % 40} " + "word " * 200 + str(number)
        body = {"model": self._model, "stream": stream, "max_tokens": self._tokens, "user": str(number)}
        body["messages"] = [{"role": "user", "content": text}]
        began = time.time()
        try:
            async with session.post(self._url, json=body) as response:
                problem = outcome(response.status, await response.read(), stream)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            failure = {"at": began, "seconds": round(time.time() - began, 2), "stream": stream, "kept": kept}
            self.failures.append(failure | {"problem": problem[:300]})
        else:
            self.answered += 1


def outcome(status: int, data: bytes, stream: bool) -> str:
    """Return what is wrong with an answer, or an empty text."""
    if status != 200:
        return f"status {status}: {data[:200]!r}"
    if stream:
        return "" if b"data: [DONE]" in data else f"stream without an end: {data[-200:]!r}"
    return "" if json.loads(data)["choices"] else "no choices"


async def main() -> None:
    """Run the load of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    given = parser.parse_args()
    load = Load(given.url, given.model, given.tokens)
    timeout = aiohttp.ClientTimeout(total=400, sock_connect=10)
    closing, keeping = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=closing, timeout=timeout) as fresh,
        aiohttp.ClientSession(connector=keeping, timeout=timeout) as kept,
        asyncio.TaskGroup() as chats,
    ):
        began = printed = time.monotonic()
        while not os.access(STOP, os.F_OK) and time.monotonic() < began + LONGEST:
            keeps = load.sent % 4 >= 2
            chats.create_task(load.chat(kept if keeps else fresh, keeps))
            await asyncio.sleep(max(0.0, began + load.sent / given.rate - time.monotonic()))
            if time.monotonic() > printed + 1:
                printed = time.monotonic()
                print(json.dumps({"sent": load.sent, "answered": load.answered, "lost": len(load.failures)}))
    print(json.dumps({"sent": load.sent, "answered": load.answered, "failures": load.failures}))
    await asyncio.sleep(LONGEST)  # The pod stays, so that its log can be read.


if __name__ == "__main__":
    asyncio.run(main())
