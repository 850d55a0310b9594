"""The memory that running requests need: each shared prefix once."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from indexer import Target
from router.load.running_prompts import RunningPrompts
from router.load.target_load import ReservedLoad, TargetLoad

TARGET, OTHER = Target("w", 0, "m"), Target("w", 0, "other")


def chunks(*ids: int) -> array[int]:
    """Return the hashes of a prompt: each depends on all chunks before it."""
    return array("Q", [hash((1, *ids[: place + 1])) % 2**64 for place in range(len(ids))])


def test_shared_prefix_of_running_requests_counts_once() -> None:
    running, load = RunningPrompts(), TargetLoad()
    first, second = (ReservedLoad(load, 0, 64 + 7, output=100) for _ in range(2))
    release = running.hold(load, TARGET, chunks(1, 2, 3, 4), first)
    running.hold(load, TARGET, chunks(1, 2, 3, 9), second)
    assert load.shared == 5 * 16
    assert (load.unshared, load.outputs) == (2 * 7, 2 * 100)
    assert running.overlaps(chunks(1, 2, 8)) == {TARGET: 32}
    release()
    first.release()
    assert (load.shared, load.unshared, load.outputs) == (64, 7, 100)  # the second request still has the shared prefix


prompts = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.booleans()), max_size=12)


@given(prompts, st.randoms(use_true_random=False))
def test_shared_tokens_are_the_distinct_chunks_of_running_prompts(
    asked: list[tuple[list[int], bool]], random: object
) -> None:
    running, load = RunningPrompts(), TargetLoad()
    held = []
    for ids, other in asked:
        reservation = ReservedLoad(load, 0, 16 * len(ids))
        target = OTHER if other else TARGET
        held.append((ids, target, running.hold(load, target, chunks(*ids), reservation), reservation))
    random.shuffle(held)  # type: ignore[attr-defined]
    while True:
        distinct = {(target, tuple(ids[: end + 1])) for ids, target, *_ in held for end in range(len(ids))}
        assert load.shared == 16 * len(distinct)
        assert load.unshared == 0
        if not held:
            break
        *_, release, reservation = held.pop()
        release()
        reservation.release()
    assert running.overlaps(chunks(0, 1)) == {}
