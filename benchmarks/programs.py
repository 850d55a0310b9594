"""Sessions of agents whose contexts need more KV memory than the fleet has, with the gate for programs and without.

Sessions begin as a Poisson process for 900 s, and all are served to their end, in virtual time. Figures are of the
seconds 200 to 900: the sessions that begin there, and the calls that arrive there. `make bench-programs` needs a trace
of agentic coding as AIPerf writes it: ARGS=--trace FILE. Without it, the generated sessions of agents are run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from benchmarks.policy.sessions import AGENTS, generated, recorded
from kvrouter.tools.traces.results import percentile
from router.apis.agent_hints import AgentHints
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side
from simulator.fleet.trace import TracedRequest

SECONDS = 900.0
FIRST = 200.0
WORKERS = 8
CODING_TOKENS = 1_280_000
AGENTS_TOKENS = 320_000
_AGENTS_BLOCK = 256

SIDES = (OURS, replace(OURS, name="kv_aware, programs", programs=True))


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, times in seconds. `returns`: the TTFT p90 of later turns. `held`: the longest wait."""

    mean: float
    p90: float
    done: float
    tokens: float
    hits: float
    returns: float
    held: float
    refused: int


def figures(outcomes: list[Outcome]) -> Figures:
    """Return the figures of a run's outcomes."""
    sessions = defaultdict[str, list[Outcome]](list)
    for outcome in outcomes:
        sessions[outcome.request.session].append(outcome)
    firsts = [calls for calls in sessions.values() if FIRST <= calls[0].request.arrival < SECONDS]
    seconds = sorted(calls[-1].ended - calls[0].request.arrival for calls in firsts if not calls[-1].refused)
    steady = [each for each in outcomes if FIRST <= each.request.arrival < SECONDS and not each.refused]
    answered = [each for each in outcomes if FIRST <= each.ended < SECONDS]
    later = [each.begun - each.request.arrival for calls in sessions.values() for each in calls[1:] if each in steady]
    return Figures(
        sum(seconds) / max(len(seconds), 1),
        percentile(seconds, 0.9),
        max(each.ended for each in outcomes if not each.refused),
        sum(each.request.output_tokens for each in answered) / (SECONDS - FIRST),
        sum(each.cached for each in steady) / max(sum(each.request.input_tokens for each in steady), 1),
        percentile(later, 0.9),
        max(each.sent - each.request.arrival for each in outcomes if not each.refused),
        sum(each.refused for each in outcomes),
    )


def run(side: Side, load: float, seed: int, trace: Path | None, ends: bool) -> Figures:
    """Run one cell. `ends`: the last call of a session says so."""
    random = Random(seed)
    if trace is not None:
        requests = recorded(trace, load, WORKERS, SECONDS, random, under_way=600.0)
        spec = FleetSpec(LLAMA_70B, WORKERS, CODING_TOKENS)
    else:
        requests = generated(AGENTS, AGENTS.rate * load * WORKERS, SECONDS, _AGENTS_BLOCK, random)
        spec = FleetSpec(LLAMA_70B, WORKERS, AGENTS_TOKENS, _AGENTS_BLOCK)
    if ends:
        requests, side = [_with_end(each) for each in requests], replace(side, hints=True)
    return figures(Simulation(spec, side, random).run(requests))


def _with_end(request: TracedRequest) -> TracedRequest:
    """Return a session whose last request says that none follows."""
    chain = [request]
    while chain[-1].following is not None:
        chain.append(chain[-1].following)
    following = None
    for each in reversed(chain):
        hints = AgentHints(final=True) if following is None else None
        following = replace(each, hints=hints, following=following)
    assert following is not None
    return following


def main(
    trace: Annotated[Path | None, typer.Option(help="Recorded sessions of agentic coding (.jsonl.gz).")] = None,
    load: Annotated[list[float] | None, typer.Option(help="Loads; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each cell.")] = 3,
    ends: Annotated[bool, typer.Option(help="The last call of a session says that it is the last.")] = False,
) -> None:
    """Compare the router with the gate for programs and without it, in virtual time."""
    kind = "agents" if trace is None else "coding"
    print("| sessions | load | router | seed | mean | p90 | all done | tokens/s | hits | TTFT p90 | held | refused |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for each in load or [0.5, 0.7, 0.85, 1.0, 1.2]:
        for seed in range(seeds):
            for side in SIDES:
                began = time.monotonic()
                found = run(side, each, seed, trace, ends)
                took = time.monotonic() - began
                print(
                    f"| {kind} | {each} | {side.name} | {seed} | {found.mean:,.0f} s | {found.p90:,.0f} s "
                    f"| {found.done:,.0f} s | {found.tokens:,.0f} | {found.hits:.3f} | {found.returns:.1f} s "
                    f"| {found.held:,.0f} s | {found.refused} |  <!-- {took:.0f} s -->",
                    flush=True,
                )


if __name__ == "__main__":
    typer.run(main)
