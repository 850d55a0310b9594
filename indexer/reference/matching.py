"""Matches of a prompt: from its path in the prefix tree to the tokens that each target would serve from its cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

from indexer.index import Match
from indexer.reference.holdings import Holder, Holdings
from indexer.reference.tree import Span
from kvevents import Tier

_NONE = dict.fromkeys(Tier, 0)
# A target's holders in one span, each with the bits of its blocks there.
_Held: TypeAlias = list[tuple[Holder, int]]


def follow(spans: Iterable[Span[Holder]], block_size: int) -> list[Match]:
    """Return the match of each target that holds a part of a prompt, which is given by its spans in the tree.

    Spans are taken from the iterator only up to the first one in which no target matches all blocks.
    """
    trails: dict[Holdings, list[tuple[int, _Held]]] = {}  # by target: matched blocks and holders in each span
    following: Collection[Holdings] | None = None
    for run, _, count in spans:
        held: dict[Holdings, _Held] = {}
        for pair in run.held.items():  # a run may have thousands of holders
            owner = pair[0].owner
            if owner in held:
                held[owner].append(pair)
            elif owner.alive:
                held[owner] = [pair]
        if following is None:
            following = held
            trails = {owner: [] for owner in held}
        whole, further = (1 << count) - 1, []
        for owner in following:
            here = held.get(owner, [])
            bits = here[0][1] if len(here) == 1 and not owner.hybrid else _whole_prefix_bits(owner, here)
            if whole & ~bits:
                trails[owner].append((_leading_ones(bits, count), here))
            else:
                trails[owner].append((count, here))
                further.append(owner)
        following = further
        if not following:
            break
    matches = []
    for owner, trail in trails.items():
        blocks = trail[0][0] if len(trail) == 1 else sum([reach for reach, _ in trail])
        if owner.hybrid and blocks:
            blocks = _within_windows(owner, trail, blocks)
        if blocks:
            matches.append(Match(owner.target, blocks * block_size, _tiers(trail, blocks, block_size)))
    return matches


def _whole_prefix_bits(owner: Holdings, held: _Held) -> int:
    """Return the bits of the blocks that every whole-prefix group of a target holds, in any medium."""
    groups: Collection[int] = owner.whole_groups
    if owner.hybrid:
        groups = owner.counting_groups(groups, {holder.group for holder, _ in held if holder.window is None})
    by_group = dict.fromkeys(groups, 0)
    for holder, bits in held:
        if holder.window is None and holder.group in by_group:
            by_group[holder.group] |= bits
    common = -1 if by_group else 0
    for bits in by_group.values():
        common &= bits
    return common


def _within_windows(owner: Holdings, trail: list[tuple[int, _Held]], blocks: int) -> int:
    """Return the longest hit, of at most `blocks` blocks, after which every window group has its last blocks."""
    possible = (1 << blocks + 1) - 1  # bit n: a hit of n blocks
    windows = owner.windows
    for group in owner.counting_groups(windows, {holder.group for _, held in trail for holder, _ in held}):
        window = min(windows[group], blocks)  # the window of an event may be longer than any prompt
        live, before = 0, 0
        for reach, held in trail:
            for holder, bits in held:
                if holder.group == group:
                    live |= (bits & (1 << reach) - 1) << before
            before += reach
        # A hit that is shorter than the window needs all its blocks: treat the blocks before the prompt as live.
        run = live << window | (1 << window) - 1
        length = 1
        while length < window:  # bit n is set if the blocks n - length + 1 … n are live
            step = min(length, window - length)
            run &= run << step
            length += step
        possible &= run >> window - 1 if window else possible
    return possible.bit_length() - 1


def _tiers(trail: list[tuple[int, _Held]], blocks: int, block_size: int) -> dict[Tier, int]:
    """Return the matched tokens by the fastest tier that has them."""
    tokens = _NONE.copy()
    for reach, held in trail:
        matched = reach if reach < blocks else blocks
        blocks -= matched
        if len(held) == 1:  # the only holder has every matched block
            tokens[held[0][0].tier] += matched * block_size
            continue
        left = (1 << matched) - 1
        for holder, bits in sorted(held, key=lambda pair: pair[0].tier):
            if holder.window is None:
                tokens[holder.tier] += (bits & left).bit_count() * block_size
                left &= ~bits
    return tokens


def _leading_ones(bits: int, count: int) -> int:
    """Return how many of the lowest `count` bits are set without a gap."""
    missing = ~bits & (1 << count) - 1
    return count if not missing else (missing & -missing).bit_length() - 1
