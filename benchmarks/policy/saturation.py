"""The search for saturation: the highest load at which a fleet still meets its goals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_STEPS: Final = 5
# A search that finds no load within the goals stops at this share of its lower bound.
_LEAST_SHARE: Final = 1 / 16


def find_saturation(meets_goals: Callable[[float], bool], below: float, above: float) -> float:
    """Return the highest load that meets the goals, to a 32nd of the difference of both bounds.

    - `below`: a load that probably meets the goals. It is halved until it does.
    - `above`: a load that does not meet them.

    Raises ValueError if even a 16th of `below` does not meet the goals.
    """
    least = below * _LEAST_SHARE
    while not meets_goals(below):
        below, above = below / 2, below
        if below < least:
            raise ValueError(f"even a load of {2 * below:g} misses the goals: the fleet cannot serve this workload")
    for _ in range(_STEPS):
        middle = (below + above) / 2
        below, above = (middle, above) if meets_goals(middle) else (below, middle)
    return below
