"""The sources from which simulated engines load blocks: host tiers, a shared pool, and peers.

    host tier   memory of one worker; every block that its engine stores is copied there
    pool        memory that all workers share; every block that any engine stores is copied there
    peer        another worker, from which a request pulls; it has what its device or its host tier holds

A load continues the prefix that the device holds, block by block, each from the first of these that has it. It lasts
`latency` seconds, and its tokens at the rate of the slower end. Each end serves its loads one after the other, and no
end waits for another. A load is done when both have served it: its worker's link, and the pool or the peer. Where
prefill and decode workers have a network (`simulator.fleet.transfers`), pulls use its links.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from indexer import Match, MatchQuery, PoolHoldings, Target
from indexer.hashing import PackedPrompt


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The sources of a fleet. Sizes in tokens, rates in tokens per second. A source of size 0 does not exist.

    - `host_tokens`, `host_rate`: the host tier of each worker.
    - `pool_tokens`: the pool. A worker loads at `link_rate`, and all workers together at `pool_rate`.
    - `pulls`: whether a request may pull from a peer, at `link_rate`.
    """

    host_tokens: int = 0
    host_rate: float = 400_000.0
    pool_tokens: int = 0
    pool_rate: float = 0.0
    link_rate: float = 0.0
    pulls: bool = False
    latency: float = 0.01


class BlockStore:
    """Blocks outside of devices. The least recently used are evicted first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.removed: list[int] = []  # since they were last taken

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def store(self, blocks: Sequence[int]) -> list[int]:
        """Store or use blocks of a prompt, and return those that are new. The last are evicted before the first."""
        new = [block for block in blocks if block not in self._blocks]
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self.removed.append(self._blocks.popitem(last=False)[0])
        return new


@dataclass(slots=True)
class Link:
    """One end of loads: tokens per second, and the time at which its last load is done."""

    rate: float
    free: float = 0.0

    def transfer(self, tokens: int, now: float) -> float:
        """Transfer tokens after those that were requested before. Return when they are transferred."""
        self.free = max(now, self.free) + tokens / self.rate
        return self.free


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """A load of the blocks that continue a prefix.

    - `blocks`: the number of blocks.
    - `outside`: the number of those that are from the pool or a peer.
    - `ready`: when all are loaded, in seconds of the engine's clock.
    """

    blocks: int
    outside: int
    ready: float


# Returns when a transfer of tokens from one worker to another ends that is requested at a time.
Transfer = Callable[[int, int, int, float], float]


class WorkerSources:
    """The sources of one worker. `host`: its host tier, if it has one."""

    def __init__(
        self,
        spec: SourceSpec,
        cache: Container[int],
        pool: BlockStore | None,
        pool_link: Link,
        block_tokens: int,
        worker: int = 0,
        transfer: Transfer | None = None,
    ) -> None:
        """Create the sources of a worker.

        - `worker`: its number.
        - `transfer`: the network of its pulls; None for links of the rate in `spec`.
        """
        self.host = BlockStore(spec.host_tokens // block_tokens) if spec.host_tokens else None
        self._latency = spec.latency
        self._cache = cache
        self.pool = pool
        self._pool_link = pool_link
        self._block_tokens = block_tokens
        self._host_link = Link(spec.host_rate)
        self._link = Link(spec.link_rate)
        self._worker = worker
        self._network_transfer = transfer

    def __contains__(self, block: int) -> bool:
        """Return whether a peer can pull a block from this worker."""
        return block in self._cache or (self.host is not None and block in self.host)

    def store(self, blocks: Sequence[int]) -> list[int]:
        """Copy blocks that the device stored. Return those that are new in the host tier."""
        if self.pool is not None:
            self.pool.store(blocks)
        return [] if self.host is None else self.host.store(blocks)

    def load(self, blocks: Sequence[int], peer: WorkerSources | None, now: float) -> LoadedBlocks:
        """Begin to load the longest run of `blocks` that sources have. `peer`: the worker to pull from, if any."""
        from_host = from_pool = from_peer = 0
        for block in blocks:
            if self.host is not None and block in self.host:
                from_host += 1
            elif self.pool is not None and block in self.pool:
                from_pool += 1
            elif peer is not None and block in peer:
                from_peer += 1
            else:
                break
        ready = now
        if from_host:
            ready = max(ready, self._transfer(from_host, now, self._host_link))
        if from_pool:
            ready = max(ready, self._latency + self._transfer(from_pool, now, self._link, self._pool_link))
        if from_peer and peer is not None:
            ready = max(ready, self._pull(from_peer, now, peer))
        return LoadedBlocks(from_host + from_pool + from_peer, from_pool + from_peer, ready)

    def _pull(self, blocks: int, now: float, peer: WorkerSources) -> float:
        """Return when a pull from a peer is done."""
        if self._network_transfer is not None:
            return self._network_transfer(peer._worker, self._worker, blocks * self._block_tokens, now)
        return self._latency + self._transfer(blocks, now, self._link, peer._link)

    def _transfer(self, blocks: int, now: float, *links: Link) -> float:
        """Return when a load is done that all its links serve."""
        return max(link.transfer(blocks * self._block_tokens, now) for link in links)


class SimulatedPool:
    """The pool as the router sees it: without delay, by the tokens of prompts."""

    def __init__(self, store: BlockStore, block_tokens: int) -> None:
        self._store = store
        self._block_tokens = block_tokens

    def has_pool(self, target: Target) -> bool:  # noqa: ARG002
        """Return True: all workers load from the pool."""
        return True

    def loads_from(self, target: Target, holdings: PoolHoldings) -> bool:  # noqa: ARG002
        """Return True: all workers load from the pool."""
        return True

    def pooled(self, query: MatchQuery, reach: int) -> list[PoolHoldings]:  # noqa: ARG002
        """Return what the pool holds of a prompt. The tokens of a block are its id."""
        prompt, size = PackedPrompt.of(query.token_ids), self._block_tokens
        intervals: list[tuple[int, int]] = []
        for place, block in enumerate(memoryview(prompt.tokens).cast("I")[::size].tolist()):
            if (place + 1) * size > len(prompt) or block not in self._store:
                continue
            start = intervals.pop()[0] if intervals and intervals[-1][1] == place * size else place * size
            intervals.append((start, (place + 1) * size))
        return [PoolHoldings("pool", size, tuple(intervals))]


class SimulatedPeers:
    """The peers as the router sees them: a target can pull what others hold, on their device or in their host tier."""

    per_source = sys.maxsize
    least_tokens = 1

    def __init__(self, held: Callable[[MatchQuery], Sequence[Match]]) -> None:
        """Create the peers of a fleet. `held`: returns what each target holds of a prompt, by its events."""
        self._held = held

    def holders(self, query: MatchQuery, own: Sequence[tuple[Target, int]]) -> list[tuple[Target, int, int]]:
        """Return all targets that hold a part of a prompt, with the tokens. Only the longest prefixes are peers.

        Targets of the other role are among them: a prefill worker pulls what a decode worker generated.
        """
        known = {match.target: match.matched_tokens for match in self._held(query)} | dict(own)
        return sorted((target, tokens, 1) for target, tokens in known.items() if tokens)  # so that runs repeat

    def may_pull(self, target: Target) -> bool:  # noqa: ARG002
        """Return True: every target can pull."""
        return True


def sources_of(
    spec: SourceSpec, caches: Sequence[Container[int]], block_tokens: int, transfer: Transfer | None = None
) -> list[WorkerSources]:
    """Return the sources of each worker of a fleet. `transfer`: the network of pulls, as in `WorkerSources`."""
    pool = BlockStore(spec.pool_tokens // block_tokens) if spec.pool_tokens else None
    pool_link = Link(spec.pool_rate)
    return [
        WorkerSources(spec, cache, pool, pool_link, block_tokens, worker, transfer)
        for worker, cache in enumerate(caches)
    ]
