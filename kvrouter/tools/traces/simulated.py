"""A trace under a policy in a simulated fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kvrouter.tools.traces.results import Answer, Run
from router.settings import PolicyName
from simulator.fleet.fleet import Fleet
from simulator.fleet.profiles import LLAMA_8B, LLAMA_70B, Profile
from simulator.fleet.sides import OURS, PEERS, Side
from simulator.fleet.trace import TracedRequest

ENGINES = {"70b": LLAMA_70B, "8b": LLAMA_8B}
DEFAULT_POLICIES = [side.name for side in (OURS, *PEERS)]


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """A number of engines, each with a cache of this many tokens."""

    profile: Profile
    workers: int
    kv_tokens: int


def side_named(name: str) -> Side:
    """A policy by its name in the settings, with what the router does beside it. Raises ValueError."""
    if name not in list(PolicyName):
        raise ValueError(f"no policy is called {name!r}; there are {', '.join(PolicyName)}")
    return OURS if name == OURS.name else Side(name, PolicyName(name))


def simulate(
    requests: Sequence[TracedRequest],
    block_tokens: int,
    side: Side,
    fleet: SimulatedFleet,
    seed: int,
    on_arrival: Callable[[], None],
) -> Run:
    """Replay a trace to its end. `on_arrival` is called for each request."""
    random = Random(seed)
    simulated = Fleet(
        fleet.profile,
        fleet.workers,
        fleet.kv_tokens,
        side.policy_for(random),
        side.late_binding,
        random,
        block_tokens,
    )
    workers = [f"worker {number}" for number in range(1, fleet.workers + 1)]
    answers = [
        Answer(
            arrival=outcome.request.arrival,
            prompt_tokens=outcome.request.input_tokens,
            ttft=outcome.begun - outcome.request.arrival,
            seconds=outcome.ended - outcome.request.arrival,
            held=outcome.sent - outcome.request.arrival,
            output_tokens=outcome.request.output_tokens,
            cached_tokens=outcome.cached,
            worker=workers[outcome.worker],
        )
        for outcome in simulated.run(requests, on_arrival)
    ]
    return Run(side.name, answers, workers)
