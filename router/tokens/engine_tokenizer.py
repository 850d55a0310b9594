"""Prompts whose tokens only the engine knows: each is sent to one of the model's workers.

Answers are cached by the messages of the conversation. While no worker answers, a conversation's next turn uses the
tokens of the turn before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from indexer.hashing import PackedPrompt
from router.apis.requests import ChatPrompt, TextPrompts
from router.tokens import TokenizerUnavailableError
from router.tokens.chat_template import template_variables
from router.tokens.engine_client import EngineClient, NotOfferedError, PromptRefusedError
from router.tokens.prompt_cache import common_tokens

# Maximum number of requests to engines that wait for answers.
MAX_ASKED = 256
_ATTEMPTS = 2
_ENTRY_BYTES = 300
_HASHED_TIMES = 2
_TOKENIZE = "/tokenize"
_NONE: set[str] = set()

_encode = msgspec.json.Encoder(order="sorted").encode
_Ask = Callable[[str, ChatPrompt | TextPrompts], Awaitable[list[PackedPrompt]]]


class EngineAnswer(NamedTuple):
    """The tokens of prompts; `exact` is false if they are those of an earlier turn, because no engine answered."""

    prompts: list[PackedPrompt]
    exact: bool


class EngineTokenizer:
    """A tokenizer that asks the workers at `urls()` about one model's prompts, with a cache of `limit_bytes`."""

    def __init__(self, client: EngineClient, urls: Callable[[], Sequence[str]], limit_bytes: int) -> None:
        self._client = client
        self._urls = urls
        self._limit = limit_bytes
        self._known: OrderedDict[bytes, list[PackedPrompt]] = OrderedDict()
        self._asked: Counter[str] = Counter()
        self._not_offered: dict[str, set[str]] = {}  # the paths, by worker
        self._turn = 0
        self.cached_bytes = 0

    def forget(self) -> None:
        """Drop all answers, because an engine restarted or renders differently."""
        self._known.clear()
        self._not_offered.clear()
        self.cached_bytes = 0

    def try_again(self, url: str) -> None:
        """Try all endpoints of a worker again."""
        self._not_offered.pop(url, None)

    def cached(self, prompt: ChatPrompt | TextPrompts) -> list[PackedPrompt] | None:
        """Return the cached answer for the same prompt; None without one."""
        return self._known.get(_keys(prompt)[-1])

    def offers(self, prompt: ChatPrompt | TextPrompts) -> bool:
        """Return whether any worker may have an endpoint that returns a prompt's tokens."""
        paths = {self._client.render_path(prompt), _TOKENIZE}
        return any(not paths <= self._not_offered.get(url, _NONE) for url in self._urls())

    async def tokenize(self, prompt: ChatPrompt | TextPrompts, renders: bool = False) -> EngineAnswer:
        """Return a prompt's tokens. If `renders`, `/tokenize` is not used. Raises TokenizerUnavailableError."""
        keys = _keys(prompt)
        found = self._known.get(keys[-1])
        if found is not None:
            self._known.move_to_end(keys[-1])
            return EngineAnswer(found, exact=True)
        earlier = next((known for key in reversed(keys[:-1]) if (known := self._known.get(key))), None)
        try:
            prompts = await self.ask(prompt, renders)
        except TokenizerUnavailableError:
            if earlier is None:
                raise
            return EngineAnswer(earlier, exact=False)
        if earlier is not None:
            prompts = [earlier[0].extended(each.tokens, common_tokens(each, earlier[0])) for each in prompts]
        self._remember(keys[-1], prompts)
        return EngineAnswer(prompts, exact=True)

    async def ask(self, prompt: ChatPrompt | TextPrompts, renders: bool = False) -> list[PackedPrompt]:
        """Ask the worker with the fewest open requests, then another one. Raises TokenizerUnavailableError."""
        if self._asked.total() >= MAX_ASKED:
            raise TokenizerUnavailableError(f"{MAX_ASKED} requests to engines are already waiting")
        urls = self._in_turn()
        if not urls:
            raise TokenizerUnavailableError("no worker can be asked")
        last: TokenizerUnavailableError | None = None
        for url in urls[:_ATTEMPTS]:
            self._asked[url] += 1
            try:
                return await self._ask(url, prompt, renders)
            except PromptRefusedError:
                raise  # other workers would refuse it too
            except TokenizerUnavailableError as error:
                last = error
            finally:
                self._asked[url] -= 1
        assert last is not None
        try:
            raise last
        finally:
            del last  # breaks a reference cycle that would keep the prompt

    async def _ask(self, url: str, prompt: ChatPrompt | TextPrompts, renders: bool) -> list[PackedPrompt]:
        ways: dict[str, _Ask] = {self._client.render_path(prompt): self._client.rendered}
        if not renders:
            ways[_TOKENIZE] = self._client.tokenized
        missing = self._not_offered.setdefault(url, set())
        for path, ask in ways.items():
            if path not in missing:
                try:
                    return await ask(url, prompt)
                except NotOfferedError:
                    missing.add(path)
        raise NotOfferedError(f"{url}: it offers neither render nor /tokenize")

    def _in_turn(self) -> list[str]:
        urls = list(self._urls())
        self._turn += 1
        start = self._turn % len(urls) if urls else 0
        return sorted(urls[start:] + urls[:start], key=lambda url: self._asked[url])

    def _remember(self, key: bytes, prompts: list[PackedPrompt]) -> None:
        size = _size(prompts)
        if size > self._limit or key in self._known:
            return
        self._known[key] = prompts
        self.cached_bytes += size
        while self.cached_bytes > self._limit:
            self.cached_bytes -= _size(self._known.popitem(last=False)[1])


def _size(prompts: list[PackedPrompt]) -> int:
    return _ENTRY_BYTES + sum(_HASHED_TIMES * len(prompt.tokens) for prompt in prompts)


def _keys(prompt: ChatPrompt | TextPrompts) -> list[bytes]:
    """Return a key for each beginning of a conversation, the whole conversation last; one key for texts."""
    if isinstance(prompt, TextPrompts):
        return [_digest(b"", [prompt.texts, prompt.add_special_tokens, str(prompt.truncation)])]
    settings = (
        *(prompt.chat_template, prompt.merges_system, prompt.thinking_off, prompt.add_special_tokens),
        *(prompt.reasoning, prompt.tool_choice),
    )
    path, truncation = prompt.call[0] if prompt.call else "", str(prompt.truncation)
    key = _digest(b"", [path, prompt.tools, template_variables(prompt), settings, truncation])
    keys: list[bytes] = []
    for message in prompt.messages:
        key = _digest(key, message)
        keys.append(key)
    return keys


def _digest(before: bytes, value: object) -> bytes:
    try:
        return xxh3_128_digest(before + _encode(value))
    except (ValueError, OverflowError, RecursionError) as error:  # for example a lone surrogate
        raise TokenizerUnavailableError(f"the prompt cannot be sent to an engine: {error}") from error
