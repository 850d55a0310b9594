"""Preble's E2 scheduling with its own record of prompts: https://arxiv.org/abs/2407.00023

    exploit     if a prompt shares most of its tokens with earlier ones: the targets of the longest shared node
    explore     otherwise: all targets
    choice      the least load + eviction of these
    load        of each large node on a target in the last three minutes: misses · prefill / its targets, and its
                requests in flight · their answers · the median TPOT there
    eviction    the same misses · prefill of the least recently used nodes that the prompt displaces
    rebalance   nodes move, the cheapest first, while one target has 1.5 times the load of the least loaded one

A large node adds more tokens than all nodes before it. A single large node is copied if its TTFT doubled. Source:
WukLab/preble, multi_node/global_scheduler_with_time.py, with rebalancing as the released server has it at 8e7906a3.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Final

from benchmarks.policy.rivals.rule import Parts
from indexer import Target
from router.policies.rates import Rates, prefill_seconds
from router.policies.records import Candidate, CostUnit, Decision, Request, cheapest
from simulator.fleet.observer import Observer
from simulator.fleet.trace import TracedRequest

_WINDOW: Final = 180.0
_HIGH_LOAD: Final = 1.5
_OVERLOADED: Final = 2.0
_FIRST_REQUESTS: Final = 50  # of each target, before rebalancing
_FIRST_TPOT: Final = 0.15
_TPOTS: Final = 200


@dataclass(slots=True, eq=False)
class Node:
    """A part of prompts that all prompts below it share.

    - `own`, `before`: its tokens, and those of the nodes above it.
    - `targets`: where it is allocated.
    - `count`, `missed`, `asked`: requests of the window, their uncached tokens, and their tokens.
    - `active`: its requests in flight by target.
    """

    blocks: tuple[int, ...]
    own: int
    before: int
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    targets: set[Target] = field(default_factory=set)
    count: int = 0
    missed: int = 0
    asked: int = 0
    active: Counter[Target] = field(default_factory=Counter)

    @property
    def large(self) -> bool:
        return self.own > self.before

    def above(self) -> Iterator[Node]:
        """Yield the node and all nodes above it."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node]:
        """Yield the node and all nodes below it."""
        yield self
        for child in self.children.values():
            yield from child.below()

    def misses(self) -> float:
        """Return the seconds of the window's prefills of this node."""
        if not self.asked:
            return 0.0
        whole = self.before + self.own
        return self.missed / self.asked * self.count * prefill_seconds(Rates(), whole, self.before, 0, 0)


class PromptTree:
    """The prompts that were sent, as nodes that share prefixes."""

    def __init__(self, block_tokens: int, on_split: Callable[[Node, Node], None]) -> None:
        """Create an empty tree. `on_split`: called with a node that was split, and with the new node of its rest."""
        self.root = Node((), 0, 0, None)
        self.on_split = on_split
        self._block_tokens = block_tokens

    def insert(self, blocks: tuple[int, ...]) -> tuple[Node, int]:
        """Return the node in which a prompt ends, and the tokens that it shares with earlier prompts."""
        node, place = self.root, 0
        while place < len(blocks):
            child = node.children.get(blocks[place])
            if child is None:
                child = Node(blocks[place:], self._tokens(len(blocks) - place), self._tokens(place), node)
                node.children[blocks[place]] = child
                return child, self._tokens(place)
            shared = _shared(child.blocks, blocks[place:])
            if shared < len(child.blocks):
                child = self._split(child, shared)
            node, place = child, place + shared
        return node, self._tokens(place)

    def _tokens(self, blocks: int) -> int:
        return blocks * self._block_tokens

    def _split(self, node: Node, at: int) -> Node:
        """Split a node after some blocks, and return the upper part. The record stays with a part that is large."""
        parent, own = node.parent, self._tokens(at)
        assert parent is not None
        upper_large, lower_large = own > node.before, node.own - own > node.before + own
        other = Node(node.blocks, node.own, node.before, parent, targets=set(node.targets))
        upper, lower = (node, other) if upper_large and not lower_large else (other, node)
        if lower is other:
            lower.children = node.children
            for child in lower.children.values():
                child.parent = lower
        upper.children = {node.blocks[at]: lower}
        lower.parent, lower.before, lower.own = upper, node.before + own, node.own - own
        upper.blocks, lower.blocks, upper.parent = node.blocks[:at], node.blocks[at:], parent
        upper.before, upper.own = lower.before - own, own
        parent.children[upper.blocks[0]] = upper
        self.on_split(node, other)
        return upper


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    if a == b[: len(a)]:
        return len(a)
    return next(place for place in range(len(a)) if place >= len(b) or a[place] != b[place])


@dataclass(slots=True)
class _Sent:
    """A request in flight. `node`: its large node."""

    node: Node
    target: Target


class Preble(Observer):
    """Preble's rule."""

    def __init__(self, parts: Parts) -> None:
        self._random = parts.random
        self._tree = PromptTree(1, self._split)
        self._kv_tokens = 0
        self._asked: TracedRequest | None = None
        self._now = 0.0
        self._window: deque[tuple[float, Node, int, int]] = deque()
        self._nodes: dict[Node, None] = {}  # large nodes of the window
        self._cached: dict[Target, OrderedDict[Node, None]] = {}  # the least recently used first
        self._held: Counter[Target] = Counter()
        self._tpots: dict[Target, deque[float]] = {}
        self._ttfts: dict[tuple[Node, Target], deque[tuple[float, float]]] = {}
        self._sent: dict[int, _Sent] = {}
        self._requests = 0
        self._output = 0.0

    def start(self, block_tokens: int, kv_tokens: int) -> None:
        self._tree, self._kv_tokens = PromptTree(block_tokens, self._split), kv_tokens

    def arrives(self, request: TracedRequest) -> None:
        self._asked = request

    def began(self, request: TracedRequest, target: Target, ttft: float) -> None:
        node = self._sent[id(request)].node
        self._ttfts.setdefault((node, target), deque()).append((self._now, ttft))

    def ended(self, request: TracedRequest, target: Target, tpot: float) -> None:
        sent = self._sent.pop(id(request))
        sent.node.active[target] -= 1
        if request.output_tokens > 1:
            self._tpots[target].append(tpot)

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:
        self._now, self._output = request.at, request.output_tokens
        targets = [candidate.target for candidate in candidates]
        for target in targets:
            self._tpots.setdefault(target, deque([_FIRST_TPOT], _TPOTS))
        self._forget_before(self._now - _WINDOW)
        asked = self._asked
        leaf, shared = self._tree.insert(() if asked is None else asked.blocks)
        allowed: set[Target] = set()
        if 2 * shared > request.tokens:
            allowed = next((node.targets for node in leaf.above() if node.targets), set())
        allowed = allowed.intersection(targets) or set(targets)
        loads = self._loads(targets)
        new = request.tokens - shared
        among = [candidate for candidate in candidates if candidate.target in allowed]
        evictions = {each.target: self._eviction(each.target, new) for each in among} if len(among) > 1 else {}

        def terms(candidate: Candidate) -> dict[str, float]:
            return {"load": loads[candidate.target], "eviction": evictions.get(candidate.target, 0.0)}

        decision = cheapest(among, terms, self._random, unit=CostUnit.SECONDS)
        if asked is not None:
            self._send(asked, leaf, new, request.tokens, decision.chosen.target)
            self._rebalance(targets)
        return decision

    def _send(self, asked: TracedRequest, leaf: Node, new: int, tokens: int, target: Target) -> None:
        node = next((each for each in leaf.above() if each.large), leaf)
        node.count += 1
        node.missed += new
        node.asked += tokens
        node.active[target] += 1
        self._nodes[node] = None
        self._window.append((self._now, node, new, tokens))
        self._sent[id(asked)] = _Sent(node, target)
        self._requests += 1
        cached = self._cached.setdefault(target, OrderedDict())
        for each in leaf.above():
            each.targets.add(target)
            if each not in cached:
                self._held[target] += each.own
            cached[each] = None
            cached.move_to_end(each)
        while self._held[target] > self._kv_tokens and len(cached) > 1:
            self._held[target] -= cached.popitem(last=False)[0].own

    def _split(self, node: Node, other: Node) -> None:
        for cached in self._cached.values():
            if node in cached:
                cached[other] = None

    def _forget_before(self, at: float) -> None:
        while self._window and self._window[0][0] < at:
            _, node, new, tokens = self._window.popleft()
            node.count, node.missed, node.asked = node.count - 1, node.missed - new, node.asked - tokens
            if not node.count:
                self._nodes.pop(node, None)
                node.targets = set()

    def _loads(self, targets: list[Target], fewest: int = 1) -> dict[Target, float]:
        loads = dict.fromkeys(targets, 0.0)
        tpots = {target: median(self._tpots[target]) for target in targets}
        for node in self._nodes:
            if node.count >= fewest:
                for target in node.targets:
                    loads[target] += self._cost(node, target, tpots[target])
        return loads

    def _cost(self, node: Node, target: Target, tpot: float) -> float:
        return node.misses() / len(node.targets) + node.active[target] * self._output * tpot

    def _eviction(self, target: Target, tokens: int) -> float:
        """Return the cost of the nodes that a prompt displaces, as if the cache were full."""
        cost = 0.0
        for node in self._cached.get(target, ()):
            if tokens <= 0:
                break
            if node.active[target]:
                continue
            tokens -= node.own
            cost += node.misses() if node.large else 0.0
        return cost

    def _rebalance(self, targets: list[Target]) -> None:
        if self._requests < _FIRST_REQUESTS * len(targets):
            return
        loads = self._loads(targets, fewest=2)
        by_load = sorted(targets, key=lambda target: -loads[target])
        least = by_load[-1]
        for most in by_load[:-1]:
            if loads[most] < _HIGH_LOAD * loads[least]:
                return
            self._move(most, least, loads)

    def _move(self, most: Target, least: Target, loads: dict[Target, float]) -> None:
        """Move nodes from one target to another until their loads are similar."""
        tpot = median(self._tpots[most])
        nodes = [node for node in self._nodes if most in node.targets and node.large and node.count > 1]
        costs = sorted(((self._cost(node, most, tpot), number) for number, node in enumerate(nodes)))
        if len(costs) == 1:
            node = nodes[0]
            if least not in node.targets and self._overloaded(node, most):
                loads[most] -= costs[0][0] / 2
                loads[least] += costs[0][0] / 2
                node.targets.add(least)
                del self._ttfts[(node, most)]
            return
        for cost, number in costs:
            if loads[most] - cost < loads[least] + cost:
                return
            loads[most] -= cost
            loads[least] += cost
            for each in nodes[number].below():
                each.targets = {least}
            if loads[most] < _HIGH_LOAD * loads[least]:
                return

    def _overloaded(self, node: Node, target: Target) -> bool:
        """Return whether a node's TTFT doubled in the second half of the window."""
        seen = self._ttfts.get((node, target), deque())
        while seen and seen[0][0] < self._now - _WINDOW:
            seen.popleft()
        first = [ttft for at, ttft in seen if at < self._now - _WINDOW / 2]
        second = [ttft for at, ttft in seen if at >= self._now - _WINDOW / 2]
        return bool(first and second) and mean(second) >= _OVERLOADED * mean(first)
