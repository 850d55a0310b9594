"""Matches by row equal matches by target while targets are registered and removed."""

from __future__ import annotations

from random import Random

import pytest

from indexer import Indexer, Match, MatchQuery, Registration, RowMatches, Target, TargetRows
from kvevents import AllBlocksCleared, BlockStored, EventBatch, Tier

MEDIA = [None, "GPU", "CPU_PINNED", "DISK"]
TOKENS = list(range(96))


def targets(count: int) -> list[Target]:
    return [Target(f"w{number}", number % 2, "m") for number in range(count)]


def stored(random: Random, medium: str | None, block_size: int) -> BlockStored:
    """Return an event that stores some first blocks of the prompt."""
    blocks = random.randint(1, len(TOKENS) // block_size)
    tokens = TOKENS[: blocks * block_size]
    names = [1000 * block_size + block for block in range(blocks)]
    return BlockStored(names, None, tokens, block_size, medium=medium)


def expected(match: Match | None) -> tuple[int, tuple[int, int] | None]:
    if match is None:
        return 0, None
    cpu, disk = match.tiers[Tier.CPU], match.tiers[Tier.DISK] + match.tiers[Tier.UNKNOWN]
    return match.matched_tokens, (cpu, disk) if cpu or disk else None


@pytest.mark.parametrize("seed", range(20))
def test_rows_equal_the_matches_of_their_targets(seed: int) -> None:
    random = Random(seed)
    everyone = targets(12)
    indexer = Indexer()
    query = MatchQuery("m", TOKENS)
    rows = TargetRows(12, {target: row for row, target in enumerate(everyone) if row % 4})  # some targets have no row
    try:
        for target in everyone:
            indexer.register(Registration(target, None, block_size=4))
        for _ in range(60):
            target = random.choice(everyone)
            match random.randrange(6):
                case 0:
                    indexer.unregister([target])
                    indexer.register(Registration(random.choice(everyone), None, block_size=4))
                    indexer.register(Registration(target, None, block_size=4))  # perhaps with another number
                case 1:
                    indexer.index.apply(target, EventBatch(0.0, [AllBlocksCleared()], 0))
                case _:
                    event = stored(random, random.choice(MEDIA), random.choice([4, 4, 8]))
                    indexer.index.apply(target, EventBatch(0.0, [event], 0))
            by_target = {match.target: match for match in indexer.match(query)}
            found = RowMatches(rows)
            indexer.match_rows(query, rows, found)
            in_rows = [(found.tokens[row], found.transfers.get(row)) for row in range(12)]
            assert in_rows == [expected(by_target.get(each) if row % 4 else None) for row, each in enumerate(everyone)]
    finally:
        indexer.stop()


def test_unknown_prompt_has_zero_tokens_in_each_row() -> None:
    indexer = Indexer()
    try:
        indexer.register(Registration(targets(1)[0], None, block_size=4))
        rows = TargetRows(3, {targets(1)[0]: 1})
        found = RowMatches(rows)
        indexer.match_rows(MatchQuery("m", [7]), rows, found)
        assert (list(found.tokens), found.transfers) == ([0, 0, 0], {})
    finally:
        indexer.stop()
