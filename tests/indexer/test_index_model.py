"""The index agrees with a naive model of engines under random events.

The model counts, for each target, the copies of each block in each medium, and matches a prompt block by block. A
block is named by its prompt up to the block's end; each engine has its own hash of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from state_machines import case_of

from indexer import Target
from indexer.hashing import Namespace, PackedPrompt
from indexer.native import CORES
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Tier, tier_of

# A prompt is a path of symbols, each of which represents `stretch` blocks. A block is its prompt's path up to it and
# its number within the last symbol. An engine may have two hashes of one block, for example for different images.
Path: TypeAlias = tuple[int, ...]
Block: TypeAlias = tuple[Path, int]
Name: TypeAlias = int

TARGETS = [Target("a", 0, "m"), Target("a", 1, "m"), Target("b", 0, "m")]
MEDIA = ["GPU", "CPU_PINNED", "DISK"]
BLOCK_SIZE = 2
NAMESPACE = Namespace("m", "default", None, None, BLOCK_SIZE)

targets = st.sampled_from(TARGETS)
media = st.sampled_from(MEDIA[:2])
paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


@dataclass
class Parked:
    """A stored event whose parent is unknown, with the later removals of its blocks."""

    parent: Name
    names: list[Name]
    medium: str
    removals: list[tuple[Name, str]] = field(default_factory=list)


@dataclass
class Engine:
    """The blocks of one target."""

    copies: Counter[tuple[Name, str]] = field(default_factory=Counter)
    parked: list[Parked] = field(default_factory=list)

    def knows(self, name: Name) -> bool:
        return any(self.copies[name, medium] for medium in MEDIA)

    def store(self, parent: Name | None, names: list[Name], medium: str) -> None:
        if parent is not None and not self.knows(parent):
            self.parked.append(Parked(parent, names, medium))
            return
        # Known blocks without a parent are an earlier event that the engine repeats.
        if parent is not None or not all(self.copies[name, medium] for name in names):
            self.copies.update((name, medium) for name in names)
        removals = []
        while found := next((parked for parked in self.parked if self.knows(parked.parent)), None):
            self.parked.remove(found)
            self.copies.update((name, found.medium) for name in found.names)
            removals += found.removals
        for name, medium in removals:
            self.remove(name, medium)

    def remove(self, name: Name, medium: str) -> None:
        if self.copies[name, medium]:
            self.copies[name, medium] -= 1
        elif waiting := [parked for parked in self.parked if name in parked.names]:
            waiting[-1].removals.append((name, medium))

    def clear(self, medium: str | None = None) -> None:
        if medium is None:
            self.copies.clear()
            self.parked.clear()
        for key in [key for key in self.copies if key[1] == medium]:
            del self.copies[key]
        self.parked = [parked for parked in self.parked if parked.medium != medium]


class RandomEngines(RuleBasedStateMachine):
    """Engines that store and evict blocks, lose events, and register again. Each symbol has `stretch` blocks."""

    stretch = 1

    @initialize()
    def begin(self) -> None:
        self.index = self.make_index()
        self.engines = {target: Engine() for target in TARGETS}
        self.names: dict[tuple[Target, Block, bool], Name] = {}
        self.blocks: dict[Name, Block] = {}
        for target in TARGETS:
            self.index.add(target)

    @rule(rank=targets, path=paths, start=st.integers(0, 4), medium=media, alias=st.booleans(), cut=st.integers(0, 9))
    def store(self, rank: Target, path: Path, start: int, medium: str, alias: bool, cut: int) -> None:
        """Store the last part of a prompt. The index may not know the first part."""
        alias = alias and cut == 0
        blocks = self.blocks_of(path)
        first = min(start * self.stretch + cut % self.stretch, len(blocks) - 1)
        names = [self.name(rank, block, alias) for block in blocks]
        parent = names[first - 1] if first else None
        tokens = self.tokens_of(path)[first * BLOCK_SIZE :]
        self.apply(rank, BlockStored(list(names[first:]), parent, tokens, BLOCK_SIZE, medium=medium))
        self.engines[rank].store(parent, names[first:], medium)

    @rule(rank=targets, medium=media, data=st.data(), count=st.integers(1, 4))
    def evict_from_the_leaves(self, rank: Target, medium: str, data: st.DataObject, count: int) -> None:
        for _ in range(count * self.stretch):
            engine = self.engines[rank]
            held = [name for name, where in +engine.copies if where == medium]
            if not held:
                return
            longest = max(len(self.blocks[name][0]) for name in held)
            leaves = sorted(name for name in held if len(self.blocks[name][0]) == longest)
            self.evict(rank, data.draw(st.sampled_from(leaves)) if self.stretch == 1 else leaves[-1], medium)

    @rule(rank=targets, medium=media, data=st.data())
    def evict_any(self, rank: Target, medium: str, data: st.DataObject) -> None:
        """Evict any block that the engine ever named: one within a prefix, an orphan, or a removed block."""
        names = [name for (owner, _, _), name in self.names.items() if owner == rank]
        if names:
            self.evict(rank, data.draw(st.sampled_from(names)), medium)

    @rule(rank=targets, medium=st.none() | media)
    def clear(self, rank: Target, medium: str | None) -> None:
        self.apply(rank, AllBlocksCleared(medium))
        self.engines[rank].clear(medium)

    @rule(rank=targets)
    def register_again(self, rank: Target) -> None:
        self.index.drop(rank)
        self.index.add(rank)
        self.engines[rank] = Engine()

    @rule(path=paths, missing=st.integers(0, 3))
    def match(self, path: Path, missing: int) -> None:
        tokens = self.tokens_of(path)
        self.check_agreement(path, tokens[: max(len(tokens) - missing, 0)])

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.index.check_integrity()
        self.check_agreement((0, 1, 2), self.tokens_of((0, 1, 2)))

    def teardown(self) -> None:
        for target, engine in self.engines.items():
            status = self.index.status(target)
            assert status is not None
            for medium in MEDIA:
                held = sum(1 for name, where in +engine.copies if where == medium)
                assert status.blocks[tier_of(medium)] == held
            waiting = {name for parked in engine.parked for name in parked.names}
            assert status.orphans == len(waiting)
        for target in self.engines:
            self.index.drop(target)
        for _ in range(20):
            self.index.sweep()
        self.index.check_integrity()
        assert self.index.runs == 0

    def blocks_of(self, path: Path) -> list[Block]:
        return [(path[: depth + 1], number) for depth in range(len(path)) for number in range(self.stretch)]

    def tokens_of(self, path: Path) -> list[int]:
        return [token for symbol in path for number in range(self.stretch) for token in (symbol, number)]

    def name(self, target: Target, block: Block, alias: bool) -> Name:
        name = self.names.setdefault((target, block, alias), len(self.names) - 2**63)
        self.blocks[name] = block
        return name

    def evict(self, target: Target, name: Name, medium: str) -> None:
        self.apply(target, BlockRemoved([name], medium))
        self.engines[target].remove(name, medium)

    def apply(self, target: Target, event: Event) -> None:
        assert self.index.apply(target, EventBatch(0.0, [event])) == []

    def check_agreement(self, path: Path, tokens: list[int]) -> None:
        found = {match.target: match for match in self.index.match(NAMESPACE, PackedPrompt.of(tokens))}
        whole = self.blocks_of(path)[: len(tokens) // BLOCK_SIZE]
        for target, engine in self.engines.items():
            expected: Counter[Tier] = Counter()
            held: dict[Block, Tier] = {}
            for name, medium in +engine.copies:
                held[self.blocks[name]] = min(held.get(self.blocks[name], Tier.UNKNOWN), tier_of(medium))
            for block in whole:
                if block not in held:
                    break
                expected[held[block]] += BLOCK_SIZE
            match = found.get(target)
            if match is None:
                assert not expected
                continue
            assert match.tiers == {tier: expected[tier] for tier in Tier}
            assert match.matched_tokens == sum(match.tiers.values()) > 0


class LongStretches(RandomEngines):
    """Engines with prompts of thousands of blocks, which need several runs."""

    stretch = 700


for core in CORES:
    globals()[f"TestRandomEngines{core.title()}"] = case_of(RandomEngines, core, 80, 40)
    globals()[f"TestLongStretches{core.title()}"] = case_of(LongStretches, core, 6, 8)
