"""How much work a text is for an encoder whose time grows with the square of a word's length.

Encoders split a text into words (letters and their marks, white space, or other characters, up to one of another kind)
and merge within each.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

# A shorter text is little work, whatever is in it.
_SHORT = 4096


def exceeds_work(texts: Iterable[str], most: int) -> bool:
    """Whether the sum of the squares of the words' lengths in bytes is more, about; short texts count for nothing."""
    done = 0.0
    for text in texts:
        if len(text) <= _SHORT:
            continue
        of_a_square = (len(text.encode("utf-8", "replace")) / len(text)) ** 2
        for found in word_pattern().finditer(text):
            done += of_a_square * (found.end() - found.start()) ** 2
            if done > most:
                return True
    return False


def strings_in(value: Any) -> Iterator[str]:
    """Every text in what JSON says, but for names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_in(each)


@cache
def word_pattern() -> re.Pattern[str]:
    """Finds words. Slow at first: it looks at all characters there are."""
    marks = "".join(
        char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(char) in ("Mn", "Mc", "Me")
    )
    # A word of very many marks is found in parts: no other thread runs while one is looked for.
    return re.compile(rf"[^\W\d_]+(?:[{marks}]+[^\W\d_]*){{0,8192}}|\s+|(?:[^\w\s]|_)+")
