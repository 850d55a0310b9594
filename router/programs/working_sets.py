"""The working set of a target: the tokens that its live sessions will ask for again, shared ones counted once.

A session's context is the list of its marks: the hash of every `MARK_TOKENS` tokens of its prompt. A mark names its
tokens and all tokens before them. So two contexts share exactly their first equal marks, and a set of contexts holds
every prefix of each. Both allow bisection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Container
from typing import Final

from router.cache_state.in_flight_prefixes import CHUNK_TOKENS

MARK_TOKENS: Final = 256
NO_CONTEXT: array[int] = array("Q")
_CHUNKS: Final = MARK_TOKENS // CHUNK_TOKENS


def marks_of(hashes: array[int]) -> array[int]:
    """Return the marks of a prompt by the hashes of its chunks."""
    return hashes[_CHUNKS - 1 :: _CHUNKS]


class WorkingSet:
    """The working set of one target.

    - `sessions`: the number of contexts in it.
    - `announced`: the tokens of those whose session announced that it continues. Shared ones count for each.
    - `prefill`: whether the target only computes prompts, which decode workers fetch.
    """

    __slots__ = ("_answers", "_marks", "announced", "prefill", "sessions")

    def __init__(self, prefill: bool = False) -> None:
        self._marks: dict[int, int] = {}  # contexts by mark
        self._answers = 0
        self.sessions = 0
        self.announced = 0
        self.prefill = prefill

    @property
    def tokens(self) -> int:
        """The tokens of all contexts, and of answers whose marks are not known yet."""
        return len(self._marks) * MARK_TOKENS + self._answers

    def missing(self, context: array[int]) -> int:
        """Return the tokens of a context that are not in the working set."""
        return (len(context) - _leading(context, self._marks)) * MARK_TOKENS

    def add(self, context: array[int]) -> None:
        """Add the context of one more session."""
        self.sessions += 1
        self._reference(context, 0)

    def extend(self, before: array[int], context: array[int]) -> None:
        """Replace the context of a session by its next one, which usually begins with the one before."""
        equal = common(before, context)
        self._reference(context, equal)
        self._release(before, equal)

    def remove(self, context: array[int]) -> None:
        """Remove the context of a session."""
        self.sessions -= 1
        self._release(context, 0)

    def answered(self, tokens: int) -> None:
        """Add the tokens of an answer; a negative number removes them."""
        self._answers += tokens

    def _reference(self, context: array[int], first: int) -> None:
        marks = self._marks
        for mark in context[first:]:
            marks[mark] = marks.get(mark, 0) + 1

    def _release(self, context: array[int], first: int) -> None:
        marks = self._marks
        for mark in context[first:]:
            left = marks[mark] - 1
            if left:
                marks[mark] = left
            else:
                del marks[mark]


def move(source: WorkingSet | None, goal: WorkingSet | None, before: array[int], context: array[int]) -> None:
    """Remove a session's context from the working set that has it, if any does, and add its next one to another."""
    if source is not None and source is goal:
        source.extend(before, context)
        return
    if source is not None:
        source.remove(before)
    if goal is not None:
        goal.add(context)


def common(one: array[int], other: array[int]) -> int:
    """Return how many leading marks two contexts share."""
    shorter = min(len(one), len(other))
    if not shorter or one[shorter - 1] == other[shorter - 1]:  # the usual case: one continues the other
        return shorter
    return bisect_left(range(shorter), True, key=lambda place: one[place] != other[place])


def continues(before: array[int], context: array[int]) -> bool:
    """Return whether a context shares half of the shorter of the two with the one before."""
    return 2 * common(before, context) >= min(len(before), len(context))


def _leading(context: array[int], marks: Container[int]) -> int:
    """Return how many leading marks of a context are among `marks`, which hold every prefix of what they hold."""
    return bisect_left(context, True, key=lambda mark: mark not in marks)
