"""Several routers before one simulated fleet: `python -m benchmarks.replicas.simulation`.

The fleet is that of `simulator.fleet`. Each request arrives at a random router. Every router sees its own requests at
once, those of others with a delay, and once a second the engines' own counts. All receive the same events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop
from math import inf
from random import Random
from statistics import median
from typing import Annotated

import typer

from benchmarks.policy.grid import Cell
from benchmarks.policy.report import markdown
from benchmarks.policy.workloads import AGENT, CONVERSATION
from router.load.load_messages import Kind, Message, RankLoad
from router.load.target_load import Reservation, TargetLoad
from router.policies import Candidate, Policy, Request
from router.sharing import PeerLoad
from simulator.fleet.fleet import LINGER, Fleet, Outcome, _InFlight, _View
from simulator.fleet.measures import Measures, measured
from simulator.fleet.profiles import LLAMA_70B
from simulator.fleet.sides import OURS
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest

_SCRAPE = 1.0
_MEAN_OUTPUT = 256.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """A way of sharing.

    - `delay`: seconds until others know a request; `None`: never.
    - `near`: candidates up to this share above the lowest cost may be chosen.
    """

    name: str
    routers: int
    delay: float | None = None
    prompts: bool = False
    near: float = 0.0


SIDES = [
    Sharing("one router", 1),
    Sharing("4 routers, each alone", 4),
    Sharing("4, load after 5 ms", 4, 0.005),
    Sharing("4, load and prompts after 5 ms", 4, 0.005, prompts=True),
    Sharing("4, the same after 20 ms", 4, 0.02, prompts=True),
    Sharing("4, any within 5 % of the best", 4, 0.02, prompts=True, near=0.05),
    Sharing("4, the same after 200 ms", 4, 0.2, prompts=True),
    Sharing("16 routers, each alone", 16),
    Sharing("16, load and prompts after 5 ms", 16, 0.005, prompts=True),
]
CELLS = [
    Cell(CONVERSATION, LLAMA_70B, 8, 300_000, 1.05, seconds=200.0),
    Cell(AGENT, LLAMA_70B, 8, 300_000, 0.4, seconds=200.0),
    Cell(CONVERSATION, LLAMA_70B, 64, 300_000, 1.0, seconds=120.0),
]


class _Router:
    """The knowledge of one router."""

    def __init__(self, fleet: SeveralRouters, number: int, workers: int) -> None:
        self.name = str(number)
        self.view = _View(workers)
        self.loads = [TargetLoad(clock=fleet.clock) for _ in range(workers)]
        for worker, load in enumerate(self.loads):
            load.on_change.append(lambda *_, worker=worker: fleet.changed(self, worker))
        self.peer_load = PeerLoad(inf, LINGER, fleet.clock)
        self.unseen = [0] * workers
        self.unseen_waiting = [0] * workers
        self.changed: set[int] = set()
        self.sent: list[tuple[int, tuple[int, ...]]] = []
        self.telling = False
        self.messages = 0


@dataclass(slots=True)
class _Telling:
    router: _Router


@dataclass(slots=True)
class _Sent:
    router: _Router
    message: Message
    sent: list[tuple[int, tuple[int, ...]]]


class SeveralRouters(Fleet):
    """One run of a trace through several routers."""

    def __init__(self, cell: Cell, sharing: Sharing, policy: Policy, random: Random) -> None:
        super().__init__(cell.profile, cell.workers, cell.kv_tokens, policy, False, random)
        self._sharing = sharing
        self._routers = [_Router(self, number, cell.workers) for number in range(sharing.routers)]
        for router in self._routers:
            router.view._held = self._view._held  # all routers receive the same events
        self._promised: dict[int, list[_View]] = {}
        self._next_scrape = 0.0
        self._at = self._routers[0]

    def clock(self) -> float:
        return self._now

    def changed(self, router: _Router, worker: int) -> None:
        """Schedule a report after a router's load changed."""
        router.changed.add(worker)
        if self._sharing.delay is not None and not router.telling:
            router.telling = True
            self._later(self._sharing.delay / 2, -1, _Telling(router))

    def _learn(self) -> set[int]:
        what = self._timed[0][3]
        if isinstance(what, _Telling | _Sent | tuple):
            _, _, worker, _ = heappop(self._timed)
        if isinstance(what, _Telling):
            self._tell(what.router)
        elif isinstance(what, _Sent):
            for router in self._routers:
                if router is not what.router:
                    router.peer_load.apply(what.message)
                    for target, blocks in what.sent:
                        self._slo(router, target, blocks)
        elif isinstance(what, tuple):
            for view in self._promised.pop(id(what), []):
                view.settle(worker, what)
        else:
            return super()._learn()
        return set()

    def _tell(self, router: _Router) -> None:
        router.telling = False
        router.messages += 1
        loads = []
        for worker in router.changed:
            load = router.loads[worker]
            loads.append(RankLoad(str(worker), 0, load.requests, load.pending, load.context, load.waiting, 0, 0.0))
        sent = _Sent(router, Message(router.name, router.messages, Kind.NEWS, loads), router.sent)
        router.changed, router.sent = set(), []
        self._later((self._sharing.delay or 0.0) / 2, -1, sent)

    def _slo(self, router: _Router, worker: int, blocks: tuple[int, ...]) -> None:
        if id(blocks) in self._promised:
            router.view.slo(worker, blocks)
            self._promised[id(blocks)].append(router.view)

    def _place(self, outcome: Outcome) -> set[int]:
        self._at = self._random.choice(self._routers)
        return super()._place(outcome)

    def _scrape(self) -> None:
        self._next_scrape = self._now + _SCRAPE
        for worker, engine in enumerate(self._engines):
            waiting = len(engine._waiting)
            requests = waiting + len(engine._prefilling) + len(engine._decoding)
            for router in self._routers:
                known = router.loads[worker].requests + router.peer_load.of(str(worker), 0).requests
                router.unseen[worker] = max(requests - known, 0)
                router.unseen_waiting[worker] = min(router.unseen[worker], waiting)

    def _choose(self, request: TracedRequest) -> Candidate:
        if self._now >= self._next_scrape:
            self._scrape()
        if self._now >= self._next_look:
            self._next_look = self._now + 1.0
            self._pressure.removed(dict(zip(self._targets, self._removed, strict=True)))
        price = self._pressure.price()
        router = self._at
        overlaps = router.view.overlaps(request.blocks[: (request.input_tokens - 1) // BLOCK_TOKENS])
        candidates = []
        for worker, (target, load) in enumerate(zip(self._targets, router.loads, strict=True)):
            far = router.peer_load.of(str(worker), 0)
            candidates.append(
                Candidate(
                    target,
                    overlaps.get(worker, 0) * BLOCK_TOKENS,
                    load.requests + far.requests + router.unseen[worker],
                    load.pending + far.pending,
                    load.context + far.context,
                    load.waiting + far.waiting + router.unseen_waiting[worker],
                    eviction=price if price and self._pressure.evicting(target) else 0.0,
                    kv_usage=self._engines[worker].kv_usage,
                )
            )
        decision = self._policy(candidates, Request(request.input_tokens, _MEAN_OUTPUT, request.session))
        if not self._sharing.near:
            return decision.chosen
        costs = decision.costs
        most = min(cost.total for cost in costs) * (1 + self._sharing.near)
        return self._random.choice([cost.candidate for cost in costs if cost.total <= most])

    def _bind(self, outcome: Outcome, choice: Candidate) -> int:
        request, router = outcome.request, self._at
        worker = self._targets.index(choice.target)
        uncached = max(request.input_tokens - choice.overlap, 1)
        reservation = Reservation(router.loads[worker], uncached, request.input_tokens)
        self._in_flight[id(request)] = _InFlight(outcome, worker, reservation)
        best = max(router.view.overlaps(request.blocks).values(), default=0)
        self._pressure.routed(request.blocks, best * BLOCK_TOKENS)
        self._promised[id(request.blocks)] = []
        self._slo(router, worker, request.blocks)
        if self._sharing.prompts:
            router.sent.append((worker, request.blocks))
        self._engines[worker].submit(request, self._now)
        return worker


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each side in each cell.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Run the small fleet only.")] = False,
) -> None:
    """Compare ways of sharing on simulated fleets."""
    for cell in CELLS[: 2 if quick else None]:
        rows = [[cell.name, "hit rate", "TTFT p50", "p90", "p99", "TPOT p90", "p90 to one router's"]]
        alone: float | None = None
        for side in SIDES:
            runs = [play(cell, cell.requests(seed), side, seed) for seed in range(seeds)]
            p90 = median(run.ttft_p90 for run in runs)
            alone = alone or p90
            times = [median(run.ttft_p50 for run in runs), p90, median(run.ttft_p99 for run in runs)]
            rows.append(
                [
                    side.name,
                    f"{median(run.hit_rate for run in runs):.3f}",
                    *(f"{1000 * seconds:.0f} ms" for seconds in times),
                    f"{1000 * median(run.tpot_p90 for run in runs):.0f} ms",
                    f"{p90 / alone:.2f}",
                ]
            )
        print(markdown(rows), end="\n\n", flush=True)


def play(cell: Cell, requests: Sequence[TracedRequest], side: Sharing, seed: int) -> Measures:
    """Run one way of sharing in one cell."""
    random = Random(seed)
    return measured(SeveralRouters(cell, side, OURS.policy_for(random), random).run(requests))


if __name__ == "__main__":
    typer.run(main)
