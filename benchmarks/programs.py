"""Sessions of agents whose contexts need more KV memory than the fleet has, by several rules of admission.

Sessions begin as a Poisson process for 900 s, and all are served to their end, in virtual time. Figures are of the
seconds 200 to 900: the sessions that begin there, and the calls that arrive there. A refused call arrives again after
its `Retry-After`, and counts from its first arrival. `make bench-programs` needs a trace
of agentic coding as AIPerf writes it: ARGS=--trace FILE. Without it, the generated sessions of agents are run.

`--cell` runs other cells:

- `batch`: all sessions begin within 30 s.
- `beside`: 4 calls a second have no session.
- `long tools`: 5 % of the pauses last 90 to 270 s.
- `subagents`: 44 % of the sessions wait once for a subagent of up to 8 calls, whose session is its own.
- `two routers`, `four routers`: each call arrives at a random one. They share their load.
- `pairs`: half of the workers prefill, and the others decode.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from benchmarks.policy.las import LEAST_SERVICE, LeastService
from benchmarks.policy.sessions import AGENTS, Turn, chained, generated, recorded
from benchmarks.policy.thunderagent import ThunderAgent
from benchmarks.replicas.simulation import RouterChannel, RouterNetwork
from kvrouter.tools.traces.results import percentile
from router.apis.agent_hints import AgentHints
from router.apis.requests import RoutedRequest
from router.sharing import SharingChannel
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side, SimulatedRouter
from simulator.fleet.trace import TracedRequest

SECONDS = 900.0
FIRST = 200.0
WORKERS = 8
CODING_TOKENS = 1_280_000
AGENTS_TOKENS = 320_000
_AGENTS_BLOCK = 256

# Of calls without a session: those of a second, and their tokens.
_BESIDE_RATE = 4.0
_BESIDE_TOKENS = 2000, 150
_LONG_TOOLS = 0.05
_LONG_PAUSE = 90.0, 270.0
_BATCH_SECONDS = 30.0
# The share of sessions with a subagent, its most calls, and the first tokens of its prompts, which all sessions share.
SUBAGENT_SHARE = 0.44
_SUBAGENT_CALLS = 8
_SHARED_TOKENS = 32_000
_SHARING_DELAY = 0.005


class Cell(StrEnum):
    """The kind of a cell."""

    USUAL = "usual"
    BATCH = "batch"
    BESIDE = "beside"
    LONG_TOOLS = "long tools"
    SUBAGENTS = "subagents"
    TWO_ROUTERS = "two routers"
    FOUR_ROUTERS = "four routers"
    PAIRS = "pairs"


_ROUTERS = {Cell.TWO_ROUTERS: 2, Cell.FOUR_ROUTERS: 4}

UNLIMITED = replace(OURS, name="kv_aware, no limits")
LIMITED = replace(OURS, requests="auto")
GATE = replace(LIMITED, name="kv_aware, programs", programs=True)
THUNDERAGENT = replace(OURS, name="ThunderAgent")
THUNDERAGENT_SHARED = replace(OURS, name="ThunderAgent, shared prefixes once")
OWN_SIDES = (UNLIMITED, LIMITED, GATE)
SIDES = (*OWN_SIDES, THUNDERAGENT, THUNDERAGENT_SHARED, LEAST_SERVICE)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, times in seconds.

    - `returns`: the TTFT p90 of later turns. `held`: the longest wait from a call's last arrival.
    - `refused`: refusals. A refused call arrives again.
    - `beside`: the TTFT p90 of calls without a session; 0 without such calls.
    """

    mean: float
    p90: float
    done: float
    tokens: float
    hits: float
    returns: float
    held: float
    refused: int
    beside: float


class Sessions(Simulation):
    """A run in which refused calls arrive again, and which knows the rules of other routers."""

    def __init__(self, spec: FleetSpec, side: Side, random: Random, cell: Cell) -> None:
        self._count = _ROUTERS.get(cell, 1)
        super().__init__(spec, side, random)

    def make_routers(self) -> list[SimulatedRouter]:
        if self._count == 1:
            return super().make_routers()
        network = RouterNetwork(_SHARING_DELAY, prompts=True)
        return [self.make_router(RouterChannel(network)) for _ in range(self._count)]

    def router_of(self, outcome: Outcome) -> SimulatedRouter:
        return super().router_of(outcome) if self._count == 1 else self.random.choice(self.routers)

    def make_router(self, *channels: SharingChannel) -> SimulatedRouter:
        router = super().make_router(*channels)
        if self.side.name in (THUNDERAGENT.name, THUNDERAGENT_SHARED.name):
            spec, shared = self.spec, self.side.name == THUNDERAGENT_SHARED.name
            rule = ThunderAgent(router, self.loop, spec.kv_tokens, spec.block_tokens, shared)
            router = replace(router, admission=rule)
        return router

    def arriving(self, outcome: Outcome, prompt: RoutedRequest, router: SimulatedRouter) -> None:
        if isinstance(router.admission, ThunderAgent) and outcome.request.session:
            router.admission.arrives(outcome.request)
        elif isinstance(router.admission, LeastService):
            router.admission.arrives(outcome.request, prompt)

    def comes_again(self, outcome: Outcome) -> bool:  # noqa: ARG002
        return True


def figures(outcomes: list[Outcome], first: float = FIRST) -> Figures:
    """Return the figures of a run's outcomes from the second `first` on. Sessions of subagents are not counted."""
    refused = sum(each.refused for each in outcomes)
    calls = defaultdict[str, list[Outcome]](list)
    firsts: dict[tuple[str, int], float] = {}
    for outcome in outcomes:
        if not outcome.request.session:
            continue
        key = outcome.request.session, outcome.request.input_tokens
        firsts.setdefault(key, outcome.request.arrival)
        if not outcome.refused:
            calls[outcome.request.session].append(outcome)

    def arrived(each: Outcome) -> float:
        return firsts[each.request.session, each.request.input_tokens]

    sessions = [of for of in calls.values() if of[0].request.program is None and first <= arrived(of[0]) < SECONDS]
    seconds = sorted(of[-1].ended - arrived(of[0]) for of in sessions)
    sent = [each for of in calls.values() for each in of]
    steady = [each for each in sent if first <= arrived(each) < SECONDS]
    answered = [each for each in sent if first <= each.ended < SECONDS]
    later = [each.begun - arrived(each) for of in calls.values() for each in of[1:] if first <= arrived(each) < SECONDS]
    alone = [each for each in outcomes if not each.request.session and not each.refused]
    beside = [each.begun - each.request.arrival for each in alone if first <= each.request.arrival < SECONDS]
    done = max(each.ended for each in sent)
    return Figures(
        sum(seconds) / max(len(seconds), 1),
        percentile(seconds, 0.9),
        done,
        sum(each.request.output_tokens for each in answered) / (min(SECONDS, done) - first),
        sum(each.cached for each in steady) / max(sum(each.request.input_tokens for each in steady), 1),
        percentile(later, 0.9),
        max(each.sent - each.request.arrival for each in sent),
        refused,
        percentile(beside, 0.9) if beside else 0.0,
    )


def run(side: Side, load: float, seed: int, trace: Path | None, ends: bool, cell: Cell = Cell.USUAL) -> Figures:
    """Run one cell. `ends`: the last call of a session says so."""
    random = Random(seed)
    if trace is not None:
        requests = recorded(trace, load, WORKERS, SECONDS, random, under_way=600.0)
        spec = FleetSpec(LLAMA_70B, WORKERS, CODING_TOKENS)
    else:
        requests = generated(AGENTS, AGENTS.rate * load * WORKERS, SECONDS, _AGENTS_BLOCK, random)
        spec = FleetSpec(LLAMA_70B, WORKERS, AGENTS_TOKENS, _AGENTS_BLOCK)
    if cell is Cell.BATCH:
        requests = [replace(each, arrival=each.arrival * _BATCH_SECONDS / SECONDS) for each in requests]
    if cell is Cell.PAIRS:
        spec = replace(spec, prefill=WORKERS // 2, decode=WORKERS // 2)
    if cell is Cell.SUBAGENTS:
        ids = count(1 << 41)
        requests = [with_subagent(each, ids, spec.block_tokens, random) for each in requests]
    if cell is Cell.LONG_TOOLS or ends:
        requests = [_changed(each, random if cell is Cell.LONG_TOOLS else None, ends) for each in requests]
        side = replace(side, hints=True)
    if cell is Cell.BESIDE:
        requests = sorted([*requests, *_beside(spec.block_tokens, random)], key=lambda each: each.arrival)
    return figures(Sessions(spec, side, random, cell).run(requests), 0.0 if cell is Cell.BATCH else FIRST)


def _changed(request: TracedRequest, random: Random | None, ends: bool) -> TracedRequest:
    """Return a session with some long pauses, if there is a `random`, whose last request says so if it `ends`."""
    following = None
    for each in reversed(_chain(request)):
        last = following is None or following.session != each.session
        hints = AgentHints(final=True) if ends and last and (following is None or each.program) else None
        long = random is not None and random.random() < _LONG_TOOLS
        pause = random.uniform(*_LONG_PAUSE) if long and random is not None else each.pause
        following = replace(each, hints=hints, following=following, pause=pause)
    assert following is not None
    return following


def _chain(request: TracedRequest) -> list[TracedRequest]:
    """Return a request and those that follow it."""
    chain = [request]
    while chain[-1].following is not None:
        chain.append(chain[-1].following)
    return chain


def with_subagent(request: TracedRequest, ids: Iterator[int], block_tokens: int, random: Random) -> TracedRequest:
    """Return a session that waits for a subagent after one of its answers, or the session alone.

    The subagent's calls add the tokens that the session's first ones add.
    """
    chain = _chain(request)
    if len(chain) < 2 or random.random() >= SUBAGENT_SHARE:
        return request
    turns = [
        Turn(after.input_tokens - each.input_tokens - each.output_tokens, after.output_tokens, each.pause)
        for each, after in pairwise(chain[: _SUBAGENT_CALLS + 1])
    ]
    turns[0] = replace(turns[0], added=turns[0].added + _SHARED_TOKENS)
    prefix = request.blocks[: _SHARED_TOKENS // block_tokens]
    subagent = _chain(chained(0.0, f"{request.session}, subagent", prefix, turns, ids, block_tokens))
    place = random.randrange(len(chain) - 1)
    following: TracedRequest | None = None
    for each in reversed([*chain[: place + 1], *subagent, *chain[place + 1 :]]):
        own = each if each.session == request.session else replace(each, program=request.session)
        following = replace(own, following=following)
    assert following is not None
    return following


def _beside(block_tokens: int, random: Random) -> list[TracedRequest]:
    """Return calls without a session."""
    ids, now, calls = count(1 << 40), 0.0, list[TracedRequest]()
    while (now := now + random.expovariate(_BESIDE_RATE)) < SECONDS:
        calls.append(chained(now, "", (), [Turn(*_BESIDE_TOKENS)], ids, block_tokens))
    return calls


def main(
    trace: Annotated[Path | None, typer.Option(help="Recorded sessions of agentic coding (.jsonl.gz).")] = None,
    load: Annotated[list[float] | None, typer.Option(help="Loads; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell.")] = 3,
    ends: Annotated[bool, typer.Option(help="The last call of a session says that it is the last.")] = False,
    cell: Annotated[Cell, typer.Option(help="The kind of cells.")] = Cell.USUAL,
    others: Annotated[bool, typer.Option(help="Also run the rules of other routers.")] = True,
) -> None:
    """Compare the router with the gate for programs and without it, in virtual time."""
    kind = "agents" if trace is None else "coding"
    kind += "" if cell is Cell.USUAL else f", {cell}"
    columns = "sessions, load, router, seed, mean, p90, all done, tokens/s, hits, TTFT p90, held, refused, beside"
    print(f"| {columns.replace(', ', ' | ')} |\n|{'---|' * (columns.count(',') + 1)}")
    for each in load or [0.5, 0.7, 0.85, 1.0, 1.2]:
        for seed in range(seeds):
            for side in SIDES if others else OWN_SIDES:
                began = time.monotonic()
                found = run(side, each, seed, trace, ends, cell)
                took = time.monotonic() - began
                print(
                    f"| {kind} | {each} | {side.name} | {seed} | {found.mean:,.0f} s | {found.p90:,.0f} s "
                    f"| {found.done:,.0f} s | {found.tokens:,.0f} | {found.hits:.3f} | {found.returns:.1f} s "
                    f"| {found.held:,.0f} s | {found.refused} | {found.beside:.2f} s |  <!-- {took:.0f} s -->",
                    flush=True,
                )


if __name__ == "__main__":
    typer.run(main)
