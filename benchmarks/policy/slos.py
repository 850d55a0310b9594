"""The share of SLOs met: mixes of classes on the same traces, by this project with and without SLOs, and by its peers.

The load of a cell is a share of saturation: the load at which one in ten answers of the default without SLOs misses the
goals of the other tables (`benchmarks.policy.measures`). A session has one class.

The peers are llm-d's predicted-latency scheduling (`benchmarks.policy.headroom`) with this project's predictions, and
Dynamo's cost (`benchmarks.policy.rivals`). In one mix, some classes refuse late requests. llm-d then refuses requests
for which no candidate has headroom, as it does with sheddable requests. The default and Dynamo's cost read no SLOs, and
serve every request. *Could be kept* is the share that an idle fleet which evicts nothing would meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.policy.grid import Cell
from benchmarks.policy.headroom import headroom_side
from benchmarks.policy.measures import TPOT_GOAL, TTFT_GOAL, WARM_UP, after_warm_up, idle_ttfts, in_time
from benchmarks.policy.report import markdown
from benchmarks.policy.rivals import rival
from benchmarks.policy.saturation import find_saturation
from benchmarks.policy.workloads import AGENT, CONVERSATION, Workload
from kvrouter.tools.traces.results import percentile
from router.prediction.predictions import WatchedAnswer
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side
from simulator.fleet.trace import RequestSLO, TracedRequest

INTERACTIVE = RequestSLO("interactive", 2.0, 0.05)
AGENTS = RequestSLO("agent", 4.0, 0.1)
BATCH = RequestSLO("batch", 30.0, 0.2)
LOADS = (0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 1.35)

OURS_WITH_SLOS, TODAY = "kv_aware, SLOs", OURS.name
_LEAST, _MOST, _DYNAMO = "llm_d, least headroom", "llm_d, most headroom", "dynamo"
SIDES = (OURS_WITH_SLOS, TODAY, _LEAST, _MOST, _DYNAMO)


@dataclass(frozen=True, slots=True)
class Mix:
    """Classes by their share of the sessions; None: sessions without an SLO."""

    name: str
    shares: tuple[tuple[float, RequestSLO | None], ...]


ALL_WITH_SLOS = Mix("all with SLOs", ((0.5, INTERACTIVE), (0.25, AGENTS), (0.25, BATCH)))
REFUSING = Mix(
    "all with SLOs, late interactive and agents refused",
    ((0.5, replace(INTERACTIVE, refuses_late=True)), (0.25, replace(AGENTS, refuses_late=True)), (0.25, BATCH)),
)
HALF = Mix("half with SLOs", ((0.25, INTERACTIVE), (0.125, AGENTS), (0.125, BATCH), (0.5, None)))


@dataclass(frozen=True, slots=True)
class Kept:
    """The figures of a run.

    - `share`: the share of requests with an SLO that met it.
    - `others`: the TTFT p90 of requests without an SLO in seconds; 0 without any.
    - `by_class`: `share` of each class.
    - `error`: the median error of predicted TTFTs, as a share of the TTFT; 0 without predictions.
    - `refused`: the share of all requests that were refused.
    """

    share: float
    others: float
    by_class: dict[str, float]
    error: float = 0.0
    refused: float = 0.0


@dataclass(frozen=True, slots=True)
class Ground:
    """A workload on a fleet.

    - `below`, `above`: two loads, between which saturation is.
    - `loads`: the loads that are compared in each of `mixes`, as shares of saturation.
    """

    workload: Workload | Path
    workers: int
    kv_tokens: int
    below: float
    above: float
    seconds: float = 200.0
    loads: tuple[float, ...] = LOADS
    mixes: tuple[Mix, ...] = (ALL_WITH_SLOS, REFUSING, HALF)

    def requests(self, load: float, seed: int) -> list[TracedRequest]:
        """Return the requests at a load of `Cell`."""
        return self.cell(load).requests(seed)

    def cell(self, load: float) -> Cell:
        return Cell(self.workload, LLAMA_70B, self.workers, self.kv_tokens, load, self.seconds)

    @property
    def name(self) -> str:
        what = self.workload.name if isinstance(self.workload, Workload) else "trace"
        return f"{what}, {self.workers} workers, {self.kv_tokens / 1e6:g} M tokens"

    def saturation(self) -> float:
        """Return the load at which one in ten answers of the default without SLOs misses the goals."""

        def meets_goals(load: float) -> bool:
            outcomes = after_warm_up(play(TODAY, self, self.requests(load, 0), 0).outcomes)
            return sum(not in_time(each, TTFT_GOAL, TPOT_GOAL) for each in outcomes) <= 0.1 * len(outcomes)

        return find_saturation(meets_goals, self.below, self.above)


@dataclass(frozen=True, slots=True)
class Played:
    """A run: its outcomes, and the median error of its predicted TTFTs as a share."""

    outcomes: list[Outcome]
    error: float


def grounds(trace: Path | None, quick: bool) -> Iterator[Ground]:
    """Return the workloads and fleets of a run. Larger fleets have fewer loads and mixes, because they take hours."""
    if trace is not None:
        yield Ground(trace, 8, 1_200_000, 0.6, 2.2)
        if not quick:
            yield Ground(trace, 32, 1_200_000, 0.6, 2.2, loads=(0.5, 0.9, 1.0, 1.1, 1.2), mixes=(ALL_WITH_SLOS, HALF))
            yield Ground(trace, 128, 1_200_000, 1.0, 2.5, loads=(0.9, 1.1), mixes=(ALL_WITH_SLOS,))
        return
    yield Ground(CONVERSATION, 8, 300_000, 0.5, 1.6)
    if not quick:
        yield Ground(AGENT, 8, 1_200_000, 0.5, 1.4)
        yield Ground(CONVERSATION, 4, 300_000, 0.5, 1.6)
        for workload, kv_tokens in ((CONVERSATION, 300_000), (AGENT, 1_200_000)):
            yield Ground(workload, 32, kv_tokens, 0.8, 1.6, loads=(0.9, 1.1), mixes=(ALL_WITH_SLOS,))


def play(side: str, ground: Ground, requests: Sequence[TracedRequest], seed: int) -> Played:
    """Replay requests before one side."""
    simulation = Simulation(ground.cell(0.0).fleet, _side_named(side, requests), Random(seed))
    watched: list[WatchedAnswer] = []
    simulation.routers[0].state.learned.predictions.on_answered.append(watched.append)
    outcomes = simulation.run(requests)
    if side in (TODAY, _DYNAMO):
        return Played(outcomes, 0.0)
    known = [answer for answer in watched if answer.ttft and answer.prediction.measured]
    errors = [abs(answer.ttft - answer.predicted_ttft.expected) / answer.ttft for answer in known if answer.ttft]
    return Played(outcomes, median(errors) if errors else 0.0)


def _side_named(name: str, requests: Sequence[TracedRequest]) -> Side:
    if name in (_LEAST, _MOST):
        return headroom_side(name, name == _MOST, {request.session: request.slo for request in requests})
    if name == _DYNAMO:
        return rival("dynamo", name)
    return replace(OURS, name=name, slos=name == OURS_WITH_SLOS)


def classed(requests: Sequence[TracedRequest], mix: Mix, seed: int) -> list[TracedRequest]:
    """Return the requests with the SLOs of their sessions' classes."""
    random = Random(seed)
    of_session: dict[str, RequestSLO | None] = {}
    weights, classes = zip(*mix.shares, strict=True)
    for request in requests:
        if request.session not in of_session:
            of_session[request.session] = random.choices(classes, weights)[0]
    return [replace(request, slo=of_session[request.session]) for request in requests]


def keepable(requests: Sequence[TracedRequest]) -> float:
    """Return the share of first tokens with an SLO that an idle fleet which evicts nothing would give in time."""
    first = WARM_UP * requests[-1].arrival
    met = [
        ttft <= request.slo.ttft
        for request, ttft in zip(requests, idle_ttfts(requests), strict=True)
        if request.slo is not None and request.slo.ttft is not None and request.arrival >= first
    ]
    return sum(met) / max(len(met), 1)


def kept(played: Played) -> Kept:
    """Return the figures of a run."""
    by_class: dict[str, list[bool]] = {}
    others: list[float] = []
    outcomes = after_warm_up(played.outcomes)
    for outcome in outcomes:
        slo = outcome.request.slo
        if slo is None:
            others.append(outcome.begun - outcome.request.arrival)
        else:
            by_class.setdefault(slo.service_level, []).append(in_time(outcome, slo.ttft, slo.tpot))
    everything = [each for answers in by_class.values() for each in answers]
    return Kept(
        sum(everything) / max(len(everything), 1),
        percentile(others, 0.9) if others else 0.0,
        {name: sum(answers) / len(answers) for name, answers in sorted(by_class.items())},
        played.error,
        sum(outcome.refused for outcome in outcomes) / max(len(outcomes), 1),
    )


def compare(trace: Path | None, quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """Run all cells on all cores, and show each when it is done. Return the table of the verdict."""
    columns = ("ours / best other", "could be kept", "refused", "TTFT p90 of the others / today's", "off by")
    rows = [["SLOs met", *SIDES, *columns]]
    with ProcessPoolExecutor() as cores:
        saturations = {ground: cores.submit(ground.saturation) for ground in grounds(trace, quick)}
        for ground, saturation in saturations.items():
            for mix in ground.mixes:
                for load in ground.loads[2:] if quick else ground.loads:
                    runs, most = _runs(ground, mix, load * saturation.result(), seeds, cores)
                    name = f"{ground.name}, {mix.name}, {load:g} of saturation"
                    rows.append([name, *_verdict(runs, most)])
                    show(f"{rows[-1]}\n" + "\n".join(f"  {side}: {_classes(runs[side])}" for side in SIDES))
    return markdown(rows)


def _runs(ground: Ground, mix: Mix, load: float, seeds: int, cores: Executor) -> tuple[dict[str, list[Kept]], float]:
    """Return the figures of each side for each seed, and the share that could be met."""
    traces = [classed(ground.requests(load, seed), mix, seed) for seed in range(seeds)]
    runs = {
        side: [cores.submit(_kept_by, side, ground, requests, seed) for seed, requests in enumerate(traces)]
        for side in SIDES
    }
    most = median(keepable(requests) for requests in traces)
    return {side: [run.result() for run in of_side] for side, of_side in runs.items()}, most


def _kept_by(side: str, ground: Ground, requests: Sequence[TracedRequest], seed: int) -> Kept:
    return kept(play(side, ground, requests, seed))


def _verdict(runs: dict[str, list[Kept]], most: float) -> list[str]:
    shares = {side: median(each.share for each in runs[side]) for side in SIDES}
    ours = runs[OURS_WITH_SLOS]
    ratio = median(mine.share / max(runs[side][seed].share for side in SIDES[1:]) for seed, mine in enumerate(ours))
    others = [mine.others / today.others for mine, today in zip(ours, runs[TODAY], strict=True) if today.others]
    return [
        *(f"{shares[side]:.3f}" for side in SIDES),
        f"{ratio:.2f}",
        f"{most:.3f}",
        f"{median(each.refused for each in ours):.3f}",
        f"{median(others):.2f}" if others else "",
        f"{median(each.error for each in ours):.0%}",
    ]


def _classes(runs: Sequence[Kept]) -> str:
    classes = (f"{name} {median(run.by_class[name] for run in runs):.3f}" for name in runs[0].by_class)
    return ", ".join([*classes, f"refused {median(run.refused for run in runs):.3f}"])
