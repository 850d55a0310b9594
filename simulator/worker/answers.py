"""Answers of the simulated model: words of its vocabulary, chosen by the prompt alone.

If a prompt ends with the beginning of an answer, the answer continues there, as a real model's would.
"""

from __future__ import annotations

import random
import re
from array import array
from hashlib import blake2b

from simulator.worker.engine import Answer
from simulator.worker.tokens import ChatTokenizer

MIN_LENGTH, MAX_LENGTH = 16, 256  # tokens of an answer that ends by itself
MAX_BEGUN = 2048  # tokens of a begun answer at the end of a prompt that can be continued


class AnswerWriter:
    """A writer of answers in ordinary tokens. The same prompt always has the same answer.

    The tokens are whole words that the tokenizer encodes to the same tokens. Therefore an answer that is part of the
    next prompt is found in the cache.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._eos = tokenizer.eos_token
        self._text: dict[int, str] = {}
        for token in range(tokenizer.vocabulary_size):
            text = tokenizer.decode([token], skip_special_tokens=True)
            if text and "\ufffd" not in text:
                self._text[token] = text
        words = [token for token, text in self._text.items() if re.fullmatch(r" [a-z]{2,}", text)]
        openings = [token for token, text in self._text.items() if re.fullmatch(r"[A-Z][a-z]+", text)]
        self._words, self._openings = (
            [token for token in tokens if tokenizer.encode(self._text[token], add_special_tokens=False) == [token]]
            or list(self._text)
            for tokens in (words, openings)
        )
        self._word_set, self._opening_set = frozenset(self._words), frozenset(self._openings)

    def answer(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        adapter: str | None = None,
        choice: int = 0,
    ) -> Answer:
        """Return an answer of at most `max_tokens` tokens. If it ends by itself, its last token is the end token."""
        key = f"{choice} {adapter}".encode()
        begun = self._begun(prompt, key)
        source = _source(prompt[: len(prompt) - begun], key)
        length = max(source.randint(MIN_LENGTH, MAX_LENGTH) - begun, min_tokens)
        stops = length < max_tokens and not ignore_eos and self._eos is not None
        count = max(length, 0) if stops else max_tokens
        tokens = self._tokens(source, begun + count)[begun:]
        if stops and self._eos is not None:
            return Answer([*tokens, self._eos], "stop")
        return Answer(tokens, "length")

    def _tokens(self, source: random.Random, count: int) -> list[int]:
        return [source.choice(self._openings), *source.choices(self._words, k=max(count - 1, 0))][:count]

    def _begun(self, prompt: list[int], key: bytes) -> int:
        """Return the number of tokens at the end of a prompt that continue an answer to the tokens before them."""
        for begun in range(1, min(MAX_BEGUN, len(prompt) - 1) + 1):
            token = prompt[-begun]
            if token in self._opening_set:
                source = _source(prompt[: len(prompt) - begun], key)
                source.randint(MIN_LENGTH, MAX_LENGTH)
                return begun if self._tokens(source, begun) == prompt[-begun:] else 0
            if token not in self._word_set:
                return 0
        return 0

    def text(self, token: int) -> str:
        """Return the text of an answer's token, empty for the end token."""
        return self._text.get(token, "")


def _source(prompt: list[int], key: bytes) -> random.Random:
    """Return the random source of a prompt's answer."""
    seed = blake2b(array("I", prompt).tobytes(), digest_size=8)
    seed.update(key)
    return random.Random(seed.digest())
