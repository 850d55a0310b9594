"""Texts to try out whether one tokenizer does the same as another: those that are treated specially somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

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
# Characters whose kind (letter, number, mark, …) libraries may know by other versions of Unicode's tables: all scripts
# that are written today, symbols and emoji.
_CHARACTERS = [*range(0x20, 0xD800), *range(0xF900, 0xFFFE), *range(0x1F000, 0x1FB00), *range(0x20000, 0x20100)]
_CHARACTERS_A_TEXT = 64


def trial_texts(special: list[str]) -> Iterator[str]:
    """Awkward texts around special tokens: each alone, each between any two tokens, and many at random; and every
    character beside a letter, a digit and a space.
    """
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
