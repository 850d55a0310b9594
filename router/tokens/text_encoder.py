"""Texts to token ids by a model's tokenizer.json: by fastokens if it returns the same ids as `tokenizers`.

fastokens supports most models, is about ten times faster, and caches the segments between special tokens. `tokenizers`
defines the format. It is used if fastokens cannot load a tokenizer or differs in the trial.

The trial texts are awkward texts for which tokenizers have special rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from itertools import islice, pairwise
from random import Random
from struct import unpack
from typing import Any, Protocol

import structlog

from http_api.errors import RequestError
from indexer.hashing import TOKEN_BYTES, pack_tokens
from router.tokens import TokenizerUnavailableError
from router.tokens.trial_results import TrialResult, read_result, write_result

# Texts that some tokenizers treat specially: at their start, at their end, or by normalization.
AWKWARD = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\r\n",
    "\t \t",
    " leading",
    "trailing ",
    "  both  ",
    "\nuser\n",
    "user\nWhat holds the cache?",
    "two  spaces,   three",
    "line\n\n\n  indented\n\tand tabbed\n",
    "it's I'll WE'RE d'être",
    "3.14159 1,000,000 20261121 007 ٣٤٥",
    "CamelCaseAndsnake_case-and-kebab_",
    "don't…stop!!!???",
    "naïve café Å ﬁ ½ ² Ω",
    "nai\u0308ve cafe\u0301 A\u030a",
    "\u0301starts with an accent",
    "e\u0301\u0302\u0303\u0304 stacked",
    "漢字かな交じり文、한국어 텍스트",
    "مرحبا بالعالم \u200f\u05e9\u05dc\u05d5\u05dd",
    "👩‍👩‍👧‍👦👍🏽🇩🇪 ✂️",
    "\u00a0no-break\u2003em\u3000wide\u200bzero\ufeff",
    "nul \x00 bell \x07 del \x7f \x85",
    "\U0001d518\U000e0001\ufffd",
    "▁metaspace ▁▁ Ġgpt Ċ ##word",
    "a" * 300,
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 8,
    "ab" * 200 + " " + "é" * 100,
    "</s><s>[INST] <unk> [CLS][SEP][MASK]<pad>",
    "<|im_start|>system\nfake<|im_end|>",
    "<|im_start|",
    "im_end|>",
    "<|<|im_end|>|>",
    '<tool_call>{"name": "f", "arguments": {"x": [1, -2.5e3, null]}}</tool_call>',
    '{"a":{"b":"c\\n\\u00e9"}}',
    "def f(x):\n    return x ** 2  # ok\n\n\nclass A:\n    pass\n",
    "http://example.com/a?b=c&d=%20#e x@y.zz",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "$\\int_0^\\infty e^{-x^2}\\,dx$",
)
# Some models have hundreds of special tokens, most of them reserved: the number that is tried.
_BOUNDARIES = 12
_RANDOM_TEXTS = 200
# Characters whose category can differ between versions of Unicode's tables: all current scripts, symbols and emoji.
_CHARACTERS = [*range(0x20, 0xD800), *range(0xF900, 0xFFFE), *range(0x1F000, 0x1FB00), *range(0x20000, 0x20100)]
_CHARACTERS_A_TEXT = 64


def trial_texts(special: list[str]) -> Iterator[str]:
    """Yield awkward texts around special tokens: alone, between two, beside other characters, at random."""
    yield from AWKWARD
    boundaries = [*special[: _BOUNDARIES // 2], *special[_BOUNDARIES // 2 :][-_BOUNDARIES // 2 :]]
    for number, token in enumerate(boundaries):
        for place, text in enumerate(AWKWARD):
            after = boundaries[(number + place) % len(boundaries)]
            before = AWKWARD[(place * 7 + number) % len(AWKWARD)]
            yield f"{before}{token}{text}{after}{AWKWARD[place - number - 1]}"
    yield from islice(_random_texts(boundaries), _RANDOM_TEXTS)
    for start in range(0, len(_CHARACTERS), _CHARACTERS_A_TEXT):
        yield "".join(f"{chr(code)}a{chr(code)}1 " for code in _CHARACTERS[start : start + _CHARACTERS_A_TEXT])


def _random_texts(boundaries: list[str]) -> Iterator[str]:
    random = Random(0)
    characters = "".join(AWKWARD)
    while True:
        parts = []
        for _ in range(random.randrange(1, 8)):
            kind = random.randrange(4)
            if kind == 0 and boundaries:
                parts.append(random.choice(boundaries))
            elif kind == 1:
                parts.append(random.choice(AWKWARD))
            else:
                parts.append("".join(random.choices(characters, k=random.randrange(12))))
        yield "".join(parts)


log = structlog.get_logger()

# The libraries that a trial compares.
_COMPARED = ("fastokens", "tokenizers")
# Results of trials by the file's hash, so that models that share a tokenizer need not build the texts again.
_trials: dict[bytes, str | None] = {}
_MOST_TRIALS = 64


class Encoder(Protocol):
    """An encoder of texts: `TextEncoder`, or a model family's replacement.

    - `vocab_size`: one more than the largest id.
    - `special`: the texts of the tokens that are recognized inside any text.
    - `exact`: those special tokens that are recognized literally, without normalization of the text around them.
    """

    vocab_size: int
    special: list[str]
    exact: list[str]

    @property
    def fast(self) -> bool: ...

    @property
    def cached_bytes(self) -> int: ...

    def encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]: ...


class TextEncoder:
    """An encoder of texts to packed token ids. It can be used by several threads."""

    def __init__(self, tokenizer_json: str, cache_bytes: int = 0) -> None:
        """Load a tokenizer; `cache_bytes` limits the cache of fastokens. Raises TokenizerUnavailableError."""
        from tokenizers import Tokenizer  # the import takes tenths of a second, which other commands do not need

        try:
            whole: Any = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # invalid files cause errors of any type
            raise TokenizerUnavailableError(f"tokenizer.json cannot be read: {error}") from error
        whole.no_padding()
        whole.no_truncation()
        added = whole.get_added_tokens_decoder()
        self.special = [token.content for token in added.values() if token.content]
        self.exact = [
            token.content
            for token in added.values()
            if token.content and not (token.normalized or token.single_word or token.lstrip)
        ]
        self.vocab_size = max(whole.get_vocab().values(), default=-1) + 1
        self._whole: Any = whole
        self._fast = _fast_one(tokenizer_json, cache_bytes)
        difference = "fastokens cannot load it" if self._fast is None else self._trial_result(tokenizer_json)
        if difference is not None:
            log.info("fastokens is not used for this tokenizer", reason=difference)
            self._fast = None
        else:
            self._whole = None  # frees tens of megabytes
            self._fast.enable_segment_cache(cache_bytes)  # drops the segments of the trial

    @property
    def fast(self) -> bool:
        """True if fastokens is used."""
        return self._fast is not None

    @property
    def cached_bytes(self) -> int:
        """Bytes of texts that fastokens caches."""
        stats = self._fast.segment_cache_stats() if self._fast is not None else None
        return int(stats["bytes"]) if stats else 0

    def drop_cache(self) -> None:
        """Stop caching texts, because a cached text would not be encoded again."""
        if self._fast is not None:
            self._fast.enable_segment_cache(0)

    def encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[bytes]:
        """Return each text's packed token ids. Raises RequestError (400) for a lone surrogate."""
        encode = self._by_fastokens if self._fast is not None else self._by_tokenizers
        try:
            return encode(texts, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("The prompt has a lone surrogate. Send valid Unicode.") from error

    def decode(self, tokens: bytes) -> str:
        """Return the text of packed token ids, with special tokens."""
        ids = list(unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens))
        whole = self._whole if self._fast is None else self._fast
        return str(whole.decode(ids, skip_special_tokens=False))

    def _by_fastokens(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        ids, offsets = self._fast.encode_batch_flat(texts, add_special_tokens)
        if len(texts) == 1:
            return [ids]
        ends = unpack(f"<{len(texts) + 1}Q", offsets)
        return [ids[4 * start : 4 * end] for start, end in pairwise(ends)]

    def _by_tokenizers(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        # Unlike `encode`, this releases the interpreter's lock, and skips the offsets, which are a third of the work.
        encodings = self._whole.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [pack_tokens(encoding.ids) for encoding in encodings]

    def _trial_result(self, tokenizer_json: str) -> str | None:
        """Return the known or new result of the trial, as in `_difference`."""
        key = sha256(tokenizer_json.encode(errors="surrogatepass")).digest()
        if key not in _trials:
            if len(_trials) >= _MOST_TRIALS:
                _trials.clear()
            _trials[key] = self._stored_result(key)
        return _trials[key]

    def _stored_result(self, file: bytes) -> str | None:
        """Return the result on disk, which depends on the file, both libraries and all texts; else try and store it.

        A trial takes half a second of processor time.
        """
        texts = list(trial_texts(self.special))
        digest = sha256(file + repr([version(name) for name in _COMPARED]).encode())
        for text in texts:
            digest.update(text.encode(errors="surrogatepass") + b"\xff")
        result = read_result(digest.hexdigest())
        if result is None:
            result = TrialResult(digest.hexdigest(), self._difference(texts))
            write_result(result)
        return result.difference

    def _difference(self, texts: list[str]) -> str | None:
        """Return how fastokens differs; None if it encodes all texts alike, new and cached."""
        for add in (False, True):
            expected = self._by_tokenizers(texts, add)
            for _ in range(2):
                try:
                    found = self._by_fastokens(texts, add)
                except Exception as error:
                    return str(error)
                if found != expected:
                    text = next(text for place, text in enumerate(texts) if expected[place] != found[place])
                    return f"it encodes {text!r} differently"
        return None


def _fast_one(tokenizer_json: str, cache_bytes: int) -> Any:
    """Return the tokenizer by fastokens; None if the package is missing or cannot load it."""
    try:
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(tokenizer_json)
        fast.no_padding()
        fast.no_truncation()
        fast.enable_segment_cache(cache_bytes)
    except Exception as error:
        log.debug("fastokens", reason=str(error))
        return None
    return fast
