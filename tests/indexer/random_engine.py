"""A naive model of an engine's prefix cache: copies of blocks, each named by its prompt up to the block's end."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TypeAlias

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event

# The tokens of a prompt. Each block has one token.
Prompt: TypeAlias = tuple[int, ...]


class Engine:
    """The cache of an engine between two restarts. Methods that change it return the events to publish."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.copies: Counter[Prompt] = Counter()
        self.prompts: set[Prompt] = set()

    def hit(self, prompt: Prompt) -> int:
        """Return the number of cached blocks at the start of a prompt."""
        return next((end for end in range(len(prompt)) if not self.copies[prompt[: end + 1]]), len(prompt))

    def serve(self, prompt: Prompt) -> Event:
        """Compute the blocks that are not cached, but at least the last one, which may become a second copy."""
        first = min(self.hit(prompt), len(prompt) - 1)
        self.copies.update(prompt[: end + 1] for end in range(first, len(prompt)))
        self.prompts.add(prompt)
        return self.stored(prompt, first)

    def stored(self, prompt: Prompt, first: int) -> BlockStored:
        names = [self.name(prompt[: end + 1]) for end in range(len(prompt))]
        return BlockStored(list(names[first:]), names[first - 1] if first else None, list(prompt[first:]), 1)

    def evict(self, block: Prompt) -> Event:
        """Free one copy of a block."""
        self.copies[block] -= 1
        self.copies += Counter()
        return BlockRemoved([self.name(block)])

    def clear(self) -> Event:
        self.copies.clear()
        return AllBlocksCleared()

    def step(self, random: Random, room: int = 100) -> list[Event]:
        """Serve a random prompt, and evict random blocks beyond `room` copies."""
        events = [self.serve(tuple(random.choices(range(4), k=random.randint(2, 8))))]
        while len(self.copies) > room:
            events.append(self.evict(random.choice(list(self.copies))))
        return events

    def name(self, block: Prompt) -> int:
        return hash((self.seed, block)) & 2**63 - 1
