"""Working sets count shared marks once, while contexts are added, extended and removed."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from router.programs.working_sets import MARK_TOKENS, WorkingSet, common

# A context is a path in a tree of chunks. A chunk's hash names its whole path, as real hashes do.
PATHS = st.lists(st.integers(0, 2), max_size=6)


def hashes(path: list[int]) -> array[int]:
    return array("Q", [hash(tuple(path[: end + 1])) % 2**64 for end in range(len(path))])


def prefixes(path: list[int]) -> set[tuple[int, ...]]:
    return {tuple(path[: end + 1]) for end in range(len(path))}


@given(st.lists(st.tuples(st.integers(0, 3), st.none() | PATHS), max_size=30), PATHS)
def test_a_working_set_is_the_union_of_its_contexts(
    changes: list[tuple[int, list[int] | None]], asked: list[int]
) -> None:
    found = WorkingSet()
    contexts: dict[int, list[int]] = {}
    for session, path in changes:
        before = contexts.pop(session, None)
        if path is None:
            if before is not None:
                found.remove(hashes(before))
            continue
        if before is None:
            found.add(hashes(path))
        else:
            found.extend(hashes(before), hashes(path))
        contexts[session] = path
    held = set().union(*[prefixes(path) for path in contexts.values()])
    assert found.tokens == len(held) * MARK_TOKENS
    assert found.sessions == len(contexts)
    assert found.missing(hashes(asked)) == len(prefixes(asked) - held) * MARK_TOKENS


@given(PATHS, PATHS)
def test_common_chunks_are_the_leading_equal_ones(one: list[int], other: list[int]) -> None:
    assert common(hashes(one), hashes(other)) == len(prefixes(one) & prefixes(other))
