"""The rule of NVIDIA Dynamo's KV router: prefill and decode cost, and its queue.

    cost     scale · max(pending + tokens - credit, 0) + decode + request · requests
    credit   overlap · device + 0.75 · CPU memory + 0.25 · disk + 0.5 · pool, in cached tokens
    decode   distinct tokens of active prompts, and the tokens of this prompt that are not among them

Sources: ai-dynamo/dynamo, lib/kv-router/src/scheduling: selector/default.rs at 07a6c9ce3bb0, and config.rs at
0243c51bb6e8.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Final

from benchmarks.policy.rivals.rule import Parts
from indexer import Target
from router.admission.admission import Admission
from router.admission.ticket import Ticket
from router.apis.requests import RoutedRequest
from router.fleet.worker import Worker
from router.policies.rates import CHUNK
from router.policies.records import Candidate, Decision, Request, cheapest
from router.routing.assignment import Assignment
from simulator.fleet.observer import Observer
from simulator.fleet.trace import TracedRequest

# The defaults of host_cache_hit_weight, disk_cache_hit_weight and shared_cache_multiplier.
_HOST: Final = 0.75
_DISK: Final = 0.25
_SHARED: Final = 0.5
# The default of router_queue_threshold, in engine steps of max_num_batched_tokens.
_QUEUE_STEPS: Final = 16
# The weight of an active request in the agentic preset: 64 blocks of 16 tokens.
_AGENTIC_REQUEST: Final = 1024


@dataclass(frozen=True, slots=True)
class DynamoWeights:
    """The weights of the cost. `floor`: the prefill cost is at least 0."""

    overlap: float = 1.0
    scale: float = 1.0
    request: float = 0.0
    floor: bool = True


AGENTIC = DynamoWeights(2.0, 4.0, _AGENTIC_REQUEST)
AGENTIC_WITHOUT_FLOOR = DynamoWeights(2.0, 4.0, _AGENTIC_REQUEST, floor=False)


@dataclass(slots=True)
class _Active:
    """The prompts of active requests on a target: uses of each block, and the tokens after the last full blocks."""

    uses: Counter[int] = field(default_factory=Counter)
    tails: int = 0


class Dynamo(Observer):
    """Dynamo's cost. It records the blocks of active requests itself."""

    def __init__(self, parts: Parts, weights: DynamoWeights = DynamoWeights()) -> None:
        self._random = parts.random
        self._weights = weights
        self._block_tokens = 1
        self._active: dict[Target, _Active] = {}
        self.asked: TracedRequest | None = None

    def start(self, block_tokens: int, kv_tokens: int) -> None:  # noqa: ARG002
        self._block_tokens = block_tokens

    def arrives(self, request: TracedRequest) -> None:
        self.asked = request

    def sent(self, request: TracedRequest, target: Target) -> None:
        active = self._active.setdefault(target, _Active())
        active.uses.update(request.blocks)
        active.tails += self._tail(request)

    def ended(self, request: TracedRequest, target: Target, tpot: float) -> None:  # noqa: ARG002
        active = self._active[target]
        active.tails -= self._tail(request)
        for block in request.blocks:
            if active.uses[block] == 1:
                del active.uses[block]
            else:
                active.uses[block] -= 1

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:
        weights = self._weights

        def terms(candidate: Candidate) -> dict[str, float]:
            prefill = candidate.pending + request.tokens - _credit(candidate, weights.overlap)
            return {
                "prefill": weights.scale * (max(prefill, 0.0) if weights.floor else prefill),
                "decode": float(self._decode(candidate.target, request.tokens)),
                "requests": weights.request * candidate.requests,
            }

        return cheapest(candidates, terms, self._random)

    def _tail(self, request: TracedRequest) -> int:
        return request.input_tokens - len(request.blocks) * self._block_tokens

    def _decode(self, target: Target, tokens: int) -> int:
        """Return the distinct tokens of active prompts, with those of the prompt that is placed."""
        active = self._active.get(target)
        if active is None:
            return tokens
        shared = 0
        for block in () if self.asked is None else self.asked.blocks:
            if block not in active.uses:
                break
            shared += 1
        return active.tails + tokens + (len(active.uses) - shared) * self._block_tokens


def _credit(candidate: Candidate, overlap: float) -> float:
    """Return the tokens that a prefill is cheaper by. Peers count nothing."""
    device = candidate.overlap - candidate.cpu - candidate.disk
    credit = overlap * device + _HOST * candidate.cpu + _DISK * candidate.disk
    source = candidate.source
    return credit + (_SHARED * source.tokens if source is not None and source.peer is None else 0.0)


@dataclass(slots=True)
class _Waiting:
    request: TracedRequest
    prompt: RoutedRequest
    tried: Collection[Worker]
    ticket: Ticket
    assignment: asyncio.Future[Assignment]


class PrefillQueue(Admission):
    """Dynamo's queue: requests wait while all targets have more than 16 engine steps to compute.

    The highest priority is first (`strict_priority`), then the first to arrive (`fcfs`).
    """

    def watch(self, rule: Dynamo) -> None:
        """Begin with the rule that places the requests."""
        self._rule = rule
        self._waiting: list[tuple[int, int, _Waiting]] = []  # heap of (priority, number, request)
        self._numbers = count()
        self._requests: dict[int, TracedRequest] = {}  # by the identity of the prompt, until it waits

    def place(
        self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket, now: float | None = None
    ) -> Assignment | None:
        """Return a request's assignment; None if it waits."""
        if self._waiting or self._all_busy(prompt):
            assert self._rule.asked is not None
            self._requests[id(prompt)] = self._rule.asked
            return None
        return super().place(prompt, tried, ticket, now)

    async def wait(self, prompt: RoutedRequest, tried: Collection[Worker], ticket: Ticket) -> Assignment:
        """Return the assignment of a request once a target has less to compute."""
        assignment: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        request = self._requests.pop(id(prompt))
        waiting = _Waiting(request, prompt, tried, ticket, assignment)
        heappush(self._waiting, (ticket.priority, next(self._numbers), waiting))
        self.wake()
        return await assignment

    def wake(self) -> None:
        """Send the first requests of the queue while any target has less to compute."""
        while self._waiting and not self._all_busy(self._waiting[0][2].prompt):
            first = heappop(self._waiting)[2]
            self._rule.arrives(first.request)
            placed = super().place(first.prompt, first.tried, first.ticket)
            assert placed is not None  # nothing else holds requests
            first.assignment.set_result(placed)

    def _all_busy(self, prompt: RoutedRequest) -> bool:
        return all(rank.load.pending > _QUEUE_STEPS * CHUNK for rank in self._selector.ranks(prompt))
