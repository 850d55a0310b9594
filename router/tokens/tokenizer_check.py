"""Trying out whether a tokenizer may be used piece by piece: it must give the same ids as for the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Protocol

from indexer.hashing import PackedPrompt

# Texts that are treated specially somewhere: at their start, at their end, or by normalization.
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
# Some models have hundreds of special tokens, reserved ones the most of them: these are tried.
_BOUNDARIES = 12
_RANDOM_TEXTS = 200


class Encode(Protocol):
    """Token ids of texts, with or without those that begin and end every text."""

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> list[PackedPrompt]: ...


def difference(whole: Encode, by_pieces: Encode, texts: list[str]) -> str | None:
    """A text of which the pieces give other token ids than the whole; None when there is none among these."""
    for add in (False, True):
        expected, found = whole(texts, add_special_tokens=add), by_pieces(texts, add_special_tokens=add)
        if expected != found:
            return next(text for place, text in enumerate(texts) if expected[place] != found[place])
    return None


def trial_texts(special: list[str]) -> Iterator[str]:
    """Awkward texts around special tokens: each alone, each between any two tokens, and many at random."""
    yield from AWKWARD
    boundaries = [*special[: _BOUNDARIES // 2], *special[_BOUNDARIES // 2 :][-_BOUNDARIES // 2 :]]
    for number, token in enumerate(boundaries):
        for place, text in enumerate(AWKWARD):
            after = boundaries[(number + place) % len(boundaries)]
            before = AWKWARD[(place * 7 + number) % len(AWKWARD)]
            yield f"{before}{token}{text}{after}{AWKWARD[place - number - 1]}"
    yield from islice(_random_texts(boundaries), _RANDOM_TEXTS)


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
