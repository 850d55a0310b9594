"""Promises kept: mixes of classes on the same traces, by this project with and without promises, and by its peers.

The load of a cell is a share of saturation: the load at which one in ten answers of today's default, which knows of no
promise, misses the goals of the other tables (`simulator.fleet.measures`). A session has one class. The peers
are llm-d's predicted-latency scheduling (`simulator.fleet.predicted_latency`), which is given this project's
predictions, and Dynamo's cost (`router.policies.peers`). In one mix some classes refuse what would be late; llm-d
refuses it of them where no candidate has headroom, as it does with sheddable requests. The other two know of no
promise, and serve everything. *Could be kept*: what an idle fleet that forgets nothing would keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.policy.grid import Cell
from benchmarks.policy.report import markdown
from benchmarks.policy.workloads import AGENT, CONVERSATION, Workload
from router.policies import policy_named
from router.policies.rates import prefill_seconds
from router.settings import PolicyName, PolicySettings
from simulator.fleet.fleet import Fleet, Outcome
from simulator.fleet.measures import TPOT_GOAL, TTFT_GOAL, WARM_UP, percentile
from simulator.fleet.profiles import LLAMA_70B
from simulator.fleet.promised_fleet import By, PromisedFleet
from simulator.fleet.sides import OURS
from simulator.fleet.trace import BLOCK_TOKENS, Promised, TracedRequest

INTERACTIVE = Promised("interactive", 2.0, 0.05)
AGENTS = Promised("agent", 4.0, 0.1)
BATCH = Promised("batch", 30.0, 0.2)
LOADS = (0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 1.35)
_STEPS = 5  # of the search for saturation

OURS_PROMISED, TODAY = "kv_aware, promises", OURS.name
_LEAST, _MOST, _DYNAMO = "llm_d, least headroom", "llm_d, most headroom", "dynamo"
SIDES = (OURS_PROMISED, TODAY, _LEAST, _MOST, _DYNAMO)


@dataclass(frozen=True, slots=True)
class Mix:
    """Classes by their share of the sessions; None: nothing is promised."""

    name: str
    shares: tuple[tuple[float, Promised | None], ...]


PROMISED = Mix("all promised", ((0.5, INTERACTIVE), (0.25, AGENTS), (0.25, BATCH)))
REFUSING = Mix(
    "all promised, late interactive and agents refused",
    ((0.5, replace(INTERACTIVE, refuses_late=True)), (0.25, replace(AGENTS, refuses_late=True)), (0.25, BATCH)),
)
HALF = Mix("half promised", ((0.25, INTERACTIVE), (0.125, AGENTS), (0.125, BATCH), (0.5, None)))


@dataclass(frozen=True, slots=True)
class Kept:
    """`share`: of promised answers that were in time, `refused`: of all that were refused; `others`: TTFT p90 of those
    without a promise, 0 without any; `error`: the middle of how far off predicted TTFTs were, as a share, where any
    were predicted."""

    share: float
    others: float
    by_class: dict[str, float]
    error: float = 0.0
    refused: float = 0.0


@dataclass(frozen=True, slots=True)
class Ground:
    """What a saturation belongs to: a workload on a fleet. `below`, `above`: loads between which that is; `loads`: what
    is compared, as shares of it, in each of `mixes`."""

    workload: Workload | Path
    workers: int
    kv_tokens: int
    below: float
    above: float
    seconds: float = 200.0
    loads: tuple[float, ...] = LOADS
    mixes: tuple[Mix, ...] = (PROMISED, REFUSING, HALF)

    def requests(self, load: float, seed: int) -> list[TracedRequest]:
        """What comes at a load, as `Cell` has it."""
        return self.cell(load).requests(seed)

    def cell(self, load: float) -> Cell:
        return Cell(self.workload, LLAMA_70B, self.workers, self.kv_tokens, load, self.seconds)

    @property
    def name(self) -> str:
        what = self.workload.name if isinstance(self.workload, Workload) else "trace"
        return f"{what}, {self.workers} workers, {self.kv_tokens / 1e6:g} M tokens"

    def saturation(self) -> float:
        """The load at which one in ten answers of today's default misses the goals."""
        below, above = self.below, self.above
        for _ in range(_STEPS):
            middle = (below + above) / 2
            outcomes = steady(play(TODAY, self, self.requests(middle, 0), 0).outcomes)
            missed = sum(not in_time(each, TTFT_GOAL, TPOT_GOAL) for each in outcomes) > 0.1 * len(outcomes)
            below, above = (below, middle) if missed else (middle, above)
        return below


@dataclass(frozen=True, slots=True)
class Played:
    """A run: what became of its requests, and how far off its predictions were."""

    outcomes: list[Outcome]
    error: float


def grounds(trace: Path | None, quick: bool) -> Iterator[Ground]:
    """The workloads and fleets of a run. The larger fleets take long: some loads and mixes are enough of them."""
    if trace is not None:
        yield Ground(trace, 8, 1_200_000, 0.6, 2.2)
        if not quick:
            yield Ground(trace, 32, 1_200_000, 0.6, 2.2, loads=(0.5, 0.9, 1.0, 1.1, 1.2), mixes=(PROMISED, HALF))
            yield Ground(trace, 128, 1_200_000, 1.0, 2.5, loads=(0.9, 1.1), mixes=(PROMISED,))
        return
    yield Ground(CONVERSATION, 8, 300_000, 0.5, 1.6)
    if not quick:
        yield Ground(AGENT, 8, 1_200_000, 0.5, 1.4)
        yield Ground(CONVERSATION, 4, 300_000, 0.5, 1.6)
        for workload, kv_tokens in ((CONVERSATION, 300_000), (AGENT, 1_200_000)):
            yield Ground(workload, 32, kv_tokens, 0.8, 1.6, loads=(0.9, 1.1), mixes=(PROMISED,))


def play(side: str, ground: Ground, requests: Sequence[TracedRequest], seed: int) -> Played:
    """One side on one ground."""
    random = Random(seed)
    policy = PolicyName.DYNAMO if side == _DYNAMO else PolicyName.KV_AWARE
    choose = policy_named(PolicySettings(name=policy), random).choose
    fleet = (LLAMA_70B, ground.workers, ground.kv_tokens, choose)
    if side in (TODAY, _DYNAMO):
        return Played(Fleet(*fleet, side == TODAY, random).run(requests), 0.0)
    by = {OURS_PROMISED: By.BROKEN_PROMISES, _LEAST: By.LEAST_HEADROOM, _MOST: By.MOST_HEADROOM}[side]
    promised = PromisedFleet(*fleet, random, by, side == OURS_PROMISED)
    outcomes = promised.run(requests)
    known = [answer for answer in promised.watched if answer.ttft and answer.prediction.measured]
    errors = [abs(answer.ttft - answer.predicted_ttft.expected) / answer.ttft for answer in known if answer.ttft]
    return Played(outcomes, median(errors) if errors else 0.0)


def steady(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that arrived after the warm-up."""
    last = outcomes[-1].request.arrival
    return [outcome for outcome in outcomes if outcome.request.arrival >= WARM_UP * last]


def in_time(outcome: Outcome, ttft: float | None, tpot: float | None) -> bool:
    """Whether an answer came within these times, in seconds."""
    first = outcome.begun - outcome.request.arrival
    each = (outcome.ended - outcome.begun) / max(outcome.request.output_tokens - 1, 1)
    return (ttft is None or first <= ttft) and (tpot is None or each <= tpot)


def classed(requests: Sequence[TracedRequest], mix: Mix, seed: int) -> list[TracedRequest]:
    """The requests with the classes of their sessions."""
    random = Random(seed)
    of_session: dict[str, Promised | None] = {}
    weights, classes = zip(*mix.shares, strict=True)
    for request in requests:
        if request.session not in of_session:
            of_session[request.session] = random.choices(classes, weights)[0]
    return [replace(request, promised=of_session[request.session]) for request in requests]


def keepable(requests: Sequence[TracedRequest]) -> float:
    """The share of promised first tokens that would be in time on an idle fleet which forgets nothing."""
    seen: set[int] = set()
    in_time: list[bool] = []
    for request in requests:
        known = takewhile(seen.__contains__, request.blocks[: (request.input_tokens - 1) // BLOCK_TOKENS])
        cached = BLOCK_TOKENS * sum(1 for _ in known)
        seen.update(request.blocks, request.finished)
        promised = request.promised
        if promised is not None and promised.ttft is not None and request.arrival >= WARM_UP * requests[-1].arrival:
            in_time.append(prefill_seconds(LLAMA_70B.rates, request.input_tokens, cached, 0, 0) <= promised.ttft)
    return sum(in_time) / max(len(in_time), 1)


def kept(played: Played) -> Kept:
    """What became of the promises of a run."""
    by_class: dict[str, list[bool]] = {}
    others: list[float] = []
    outcomes = steady(played.outcomes)
    for outcome in outcomes:
        promised = outcome.request.promised
        if promised is None:
            others.append(outcome.begun - outcome.request.arrival)
        else:
            good = in_time(outcome, promised.ttft, promised.tpot)
            by_class.setdefault(promised.service_level, []).append(good)
    everything = [each for answers in by_class.values() for each in answers]
    return Kept(
        sum(everything) / max(len(everything), 1),
        percentile(others, 0.9) if others else 0.0,
        {name: sum(answers) / len(answers) for name, answers in sorted(by_class.items())},
        played.error,
        sum(outcome.refused for outcome in outcomes) / max(len(outcomes), 1),
    )


def compare(trace: Path | None, quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """All cells, on all cores; each is shown as it is done. Returns the table of the verdict."""
    columns = ("ours / best other", "could be kept", "refused", "TTFT p90 of the others / today's", "off by")
    rows = [["promises kept", *SIDES, *columns]]
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
    """What each side keeps at each seed, and what could be kept."""
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
    ours = runs[OURS_PROMISED]
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
