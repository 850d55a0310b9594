"""The time to tokenize growing conversations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pydoc_data.topics import topics
from random import Random
from statistics import median
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from indexer.hashing import PackedPrompt
from router.apis.openai_requests import decode_chat
from router.apis.requests import ChatPrompt
from router.cache_state.in_flight_prefixes import prompt_hashes
from router.tokens.local_tokenizer import CACHE_BYTES, LocalTokenizer
from router.tokens.model_files import ModelFiles
from router.tokens.text_encoder import TextEncoder

# minimal and maximal characters of a message
_USER = (40, 1200)
_ASSISTANT = (200, 2800)


def bodies(seed: int, characters: int) -> list[bytes]:
    """Return the bodies of a conversation's requests, each one turn longer, up to `characters` characters."""
    random = Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": _passage(random, (1500, 2500))}]
    found: list[bytes] = []
    length = 0
    while length < characters:
        messages.append({"role": "user", "content": _passage(random, _USER)})
        found.append(msgspec.json.encode({"model": "m", "messages": messages, "stream": True}))
        length = len(found[-1])
        messages.append({"role": "assistant", "content": _passage(random, _ASSISTANT)})
    return found


def _passage(random: Random, lengths: tuple[int, int]) -> str:
    """Return a passage of Python's language reference, with a unique number."""
    length = random.randint(*lengths)
    start = random.randrange(len(_reference()) - length)
    return f"{random.randrange(10**9)}: {_reference()[start : start + length]}"


@cache
def _reference() -> str:
    return "\n".join(text for _, text in sorted(topics.items()))


# Prompts are measured at the first turn with this number of tokens.
SIZES = (1_000, 3_000, 10_000, 20_000, 30_000)
_CHARACTERS = 5 * SIZES[-1]

T = TypeVar("T")


class UnequalError(Exception):
    """A prompt whose token IDs differ between whole and incremental tokenization."""


@dataclass
class Costs:
    """The seconds of one kind of turn, one entry for each conversation. They are CPU time, because nothing waits."""

    tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """Add one measurement."""
        self.seconds.setdefault(name, []).append(seconds)

    def milliseconds(self, name: str) -> float:
        """Return the median, in milliseconds."""
        return 1000 * median(self.seconds[name])


@dataclass
class Comparison:
    """The measurements of one tokenizer by the size of prompts, and the number of equal comparisons."""

    costs: dict[int, Costs] = field(default_factory=dict)
    again: Costs = field(default_factory=Costs)
    prompts: int = 0
    tokens: int = 0


def compare(files: ModelFiles, conversations: int) -> Comparison:
    """Measure conversations with a model's tokenizer.

    Every turn's token IDs are compared with those of the whole text. Raises UnequalError.
    """
    found, reference = Comparison(), Tokenizer.from_str(files.tokenizer)
    for seed in range(conversations):
        known, anew = LocalTokenizer(files), LocalTokenizer(files, cache_bytes=0)
        uncut = TextEncoder(files.tokenizer, CACHE_BYTES)
        before, sizes = 0, list(SIZES)
        for body in bodies(seed, _CHARACTERS):
            text = known.render(_prompt(body))
            expected = _whole(reference, text)
            timed = sizes and len(expected) >= sizes[0]
            costs = found.costs.setdefault(sizes.pop(0), Costs()) if timed else Costs()
            _timed(costs, "uncut", partial(uncut.encode, [text]))
            # The sides take turns, because each leaves the machine in another state.
            for side in (0, 1) if seed % 2 else (1, 0):
                if side and timed:
                    _time_anew(costs, reference, anew, body)
                elif not side:
                    _check(_time_known(costs, known, body), expected)
            found.prompts += 1
            found.tokens += len(expected)
            costs.tokens.append(len(expected))
            costs.new_tokens.append(len(expected) - before)
            before = len(expected)
            if not sizes:
                _check(_time_known(found.again, known, body), expected)
                _timed(found.again, "uncut", partial(uncut.encode, [text]))
                found.again.tokens.append(len(expected))
                found.again.new_tokens.append(0)
                break
    return found


def _time_known(costs: Costs, tokenizer: LocalTokenizer, body: bytes) -> PackedPrompt:
    """Time the steps of a request after earlier turns."""
    begun = time.process_time()
    prompt = _timed(costs, "decode", lambda: _prompt(body))
    text = _timed(costs, "render", lambda: tokenizer.render(prompt))
    token_ids = _timed(costs, "tokenize", lambda: tokenizer.encode([text], add_special_tokens=False)[0])
    _timed(costs, "hash", lambda: _hash(token_ids))
    costs.add("known", time.process_time() - begun)
    return token_ids


def _time_anew(costs: Costs, reference: Tokenizer, anew: LocalTokenizer, body: bytes) -> None:
    """Time the steps without earlier turns: by the model's own tokenizer, and as the router does a new conversation."""
    _timed(costs, "whole", lambda: _hash(_whole(reference, anew.render(_prompt(body)))))
    _timed(costs, "new", lambda: _hash(anew.encode([anew.render(_prompt(body))], add_special_tokens=False)[0]))


def _prompt(body: bytes) -> ChatPrompt:
    prompt = decode_chat(body).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def _whole(tokenizer: Tokenizer, text: str) -> PackedPrompt:
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return PackedPrompt.of(encoding.ids)


def _hash(prompt: PackedPrompt) -> None:
    prompt_hashes("m", None, None, prompt)


def _timed(costs: Costs, name: str, act: Callable[[], T]) -> T:
    begun = time.process_time()
    done = act()
    costs.add(name, time.process_time() - begun)
    return done


def _check(found: PackedPrompt, expected: PackedPrompt) -> None:
    if found != expected:
        raise UnequalError(f"a prompt of {len(expected)} tokens has {len(found)} incrementally, or other IDs")
