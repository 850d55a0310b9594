"""The price of a copy of a shared prefix, divided between the sessions that will use the copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

# A target that holds all but this many tokens of a part has a copy, because engines hold whole blocks.
_TOLERANCE: Final = 256


class SharedTokens:
    """The parts of a prompt that several sessions asked for, in the order of the prompt.

    A copy that k of them will use costs each of them 1/k, while the fleet has time to spare for it. If c targets hold a
    part, one more copy is used by a (c + 1)-th of its sessions.

    - `depths`: where each part ends, in tokens.
    - `others`: the share of a token's price that the other sessions pay.
    """

    __slots__ = ("_after", "depths", "others")

    def __init__(self, depths: array[int], others: array[float]) -> None:
        self.depths = depths
        self.others = others
        self._after: dict[int, float] = {}  # most targets hold as many tokens as others

    @classmethod
    def paid(cls, asked: list[tuple[int, float]], copies: Callable[[int], int], spare: float) -> SharedTokens | None:
        """Return the parts of a prompt; None if others pay for none.

        - `asked`: where each part ends, and the sessions that asked for it.
        - `copies`: returns the number of targets that hold a number of tokens.
        - `spare`: the share of its time that the fleet can spare, from 0 to 1.
        """
        depths, others = array("I"), array("d")
        for depth, sessions in asked:
            share = 1 - (copies(depth - _TOLERANCE) + 1) / sessions
            if share > 0:
                depths.append(depth)
                others.append(spare * share)
        return cls(depths, others) if depths else None

    def after(self, held: int) -> float:
        """Return the tokens that the other sessions pay for, of those after the first `held` tokens."""
        paid = self._after.get(held)
        if paid is None:
            paid, start = 0.0, held
            for depth, share in zip(self.depths, self.others, strict=True):
                if depth > start:
                    paid += (depth - start) * share
                    start = depth
            self._after[held] = paid
        return paid

    def part_of_load(self, held: int, reached: int) -> float:
        """Return the share that the other sessions pay of a load, from 0 to 1.

        The target holds `held` tokens, and loads those after them up to `reached`.
        """
        return (self.after(held) - self.after(reached)) / (reached - held) if reached > held else 0.0
