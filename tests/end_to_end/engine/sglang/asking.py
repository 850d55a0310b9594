"""Requests of all formats to a router, and what their answers say about the cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from engine.conversations import VOCABULARY
from engine.servers import RouterProcess
from engine.sglang.installation import MODEL


@dataclass(frozen=True)
class Answer:
    """One whole answer. `predicted` and `cached` are tokens of the prompt; `cached`: None if not reported."""

    status: int
    body: Any
    predicted: int
    cached: int | None
    worker: str
    rank: str

    @property
    def exact(self) -> bool:
        return self.status == 200 and self.predicted == self.cached

    @property
    def text(self) -> str:
        body = self.body
        if "choices" in body:
            choice = body["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        if "output" in body:
            return str(body["output"][0]["content"][0]["text"])
        return str(body["content"][0]["text"] if "content" in body else body["text"])


def ask(router: RouterProcess, path: str, body: dict[str, Any], **headers: str) -> Answer:
    """Send a request that is not streamed, and return its answer, whatever its status."""
    fields = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(f"{router.url}{path}", json.dumps(body).encode(), fields), timeout=120) as reply:
            status, got, answer = reply.status, reply.headers, json.loads(reply.read())
    except HTTPError as error:
        status, got, answer = error.code, error.headers, json.loads(error.read())
    return Answer(
        status,
        answer,
        int(got.get("x-kvrouter-overlap-tokens", -1)),
        _cached(answer),
        got.get("x-kvrouter-worker", ""),
        got.get("x-kvrouter-dp-rank", ""),
    )


def _cached(answer: Any) -> int | None:
    usage = answer.get("usage") or answer.get("meta_info") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    found = details.get("cached_tokens", details.get("cache_read_input_tokens"))
    return found if isinstance(found, int) else None


def text(random: Random, words: int) -> str:
    """Return a text of words that are one token each."""
    return "".join(f" {random.choice(VOCABULARY)}" for _ in range(words))


def completion(prompt: str | list[int], tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def chat(*contents: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    """Return a chat: a system prompt, and turns of user and assistant."""
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, **more}
