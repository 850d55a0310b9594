"""Made-up prompts that share prefixes exactly as the block ids of a trace say."""

from __future__ import annotations

from array import array
from functools import lru_cache
from random import Random

from simulator.fleet.trace import TraceLine

# Ids that every vocabulary has, and that are special in none.
_TOKENS = range(1000, 3000)
# One token each, with the space before, in the vocabularies of most models.
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my now "
    "over such our man me even most made after also did many off before must well back through years much where "
)
_WORDS = tuple(_TEXT.split())


class Prompts:
    """The prompts of a replay. Those of another `seed` have nothing in common with them."""

    def __init__(self, seed: str, block_tokens: int) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._block = lru_cache(maxsize=2**25 // block_tokens)(self._made)

    def token_ids(self, line: TraceLine, number: int) -> list[int]:
        """The prompt of a line as token ids, as many as the trace says. `number`: its place in the trace."""
        return [_TOKENS[draw % len(_TOKENS)] for draw in self._draws(line, number)]

    def text(self, line: TraceLine, number: int) -> str:
        """The same as text: of about as many tokens."""
        return "".join(f" {_WORDS[draw % len(_WORDS)]}" for draw in self._draws(line, number))

    def _draws(self, line: TraceLine, number: int) -> array[int]:
        draws = array("H")
        for block in line.hash_ids:
            draws += self._block(str(block))
        while len(draws) < line.input_length:  # a trace need not name the last block
            draws += self._made(f"end of {number}, {len(draws)}")
        return draws[: max(line.input_length, 1)]

    def _made(self, name: str) -> array[int]:
        return array("H", Random(f"{self._seed} {name}").randbytes(2 * self._block_tokens))
