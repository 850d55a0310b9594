"""Several routers before one simulated fleet: `python -m benchmarks.replicas.simulation`.

Each request arrives at a random router of `simulator.fleet`. Every router sees its own requests at once, and those of
the others when their messages arrive. Once a second it reads the engines' own counts of requests. All routers have the
same index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from typing import Annotated

import msgspec
import typer

from benchmarks.policy.grid import Cell
from benchmarks.policy.measures import Measures, measured
from benchmarks.policy.report import markdown
from benchmarks.policy.sides import OURS_AT_ONCE
from benchmarks.policy.workloads import AGENT, CONVERSATION
from router.load.load_messages import decode, encode
from router.settings import PolicySettings
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import SimulatedRouter
from simulator.fleet.trace import TracedRequest


@dataclass(frozen=True, slots=True)
class Sharing:
    """A way in which routers share their load.

    - `routers`: the number of routers.
    - `delay`: the seconds until the others know of a change; None: they never do.
    - `prompts`: whether they share the prompts in flight.
    - `near`: a random candidate is chosen among those whose cost exceeds the lowest by at most this share.
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


@dataclass(slots=True)
class RouterNetwork:
    """The receivers of all routers. `delay`: the seconds that a message takes; `prompts`: whether it has prompts."""

    delay: float
    prompts: bool
    receivers: list[Callable[[bytes], None]] = field(default_factory=list)


class RouterChannel:
    """A router's connection to a simulated network. Half of the delay is the interval in which changes are gathered."""

    name = "simulated network"
    problem: str | None = None

    def __init__(self, network: RouterNetwork) -> None:
        self.interval = network.delay / 2
        self._network = network

    def send(self, message: bytes) -> None:
        """Send a message to all routers. A router ignores its own messages."""
        if not self._network.prompts:
            message = encode(msgspec.structs.replace(decode(message), sent=[], ended=[], failed=[]))
        loop = asyncio.get_running_loop()
        for receive in self._network.receivers:
            loop.call_later(self._network.delay / 2, receive, message)

    async def run(self, receive: Callable[[bytes], None], connected: Callable[[], None]) -> None:
        """Receive messages until cancelled."""
        self._network.receivers.append(receive)
        connected()
        await asyncio.Event().wait()

    async def flush(self) -> None:
        """Return at once: no message waits here."""


class SeveralRouters(Simulation):
    """A run with several routers. Each request arrives at a random one."""

    def __init__(self, fleet: FleetSpec, sharing: Sharing, random: Random) -> None:
        self._sharing = sharing
        weights = PolicySettings(near=sharing.near)
        super().__init__(fleet, replace(OURS_AT_ONCE, weights=weights), random)

    def make_routers(self) -> list[SimulatedRouter]:
        """Return the routers, connected as `Sharing` says."""
        sharing = self._sharing
        if sharing.delay is None:
            return [self.make_router() for _ in range(sharing.routers)]
        network = RouterNetwork(sharing.delay, sharing.prompts)
        return [self.make_router(RouterChannel(network)) for _ in range(sharing.routers)]

    def router_of(self, outcome: Outcome) -> SimulatedRouter:  # noqa: ARG002
        """Return a random router."""
        return self.random.choice(self.routers)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each side in each cell.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="The small fleet only.")] = False,
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
    """Replay the requests of a cell with one way of sharing."""
    return measured(SeveralRouters(cell.fleet, side, Random(seed)).run(requests))


if __name__ == "__main__":
    typer.run(main)
