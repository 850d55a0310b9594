"""`kvrouter replay-trace` from start to end, in a simulated fleet or against routers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from secrets import token_hex

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrouter.tools.traces.live import LiveTarget, replay_live
from kvrouter.tools.traces.plots import seconds, share
from kvrouter.tools.traces.report import Report, headline, render
from kvrouter.tools.traces.results import Answer, Run, Workload, shape
from simulator.fleet.engine import LLAMA_8B, LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, PLAIN, Side, side_named, side_with
from simulator.fleet.trace import Trace, TracedRequest, TraceError, read_trace, requests_of

ENGINES = {"70b": LLAMA_70B, "8b": LLAMA_8B}
DEFAULT_POLICIES = [side.name for side in (OURS, *PLAIN)]


def sides_named(policies: Sequence[str], scorers: Sequence[str]) -> list[Side]:
    """Return the routers with these policies, and those with a scorer each. Raises ValueError."""
    sides: list[Side] = []
    for option, make, names in (("--policy", side_named, policies), ("--extra", side_with, scorers)):
        for name in dict.fromkeys(names):
            try:
                sides.append(make(name))
            except ValueError as error:
                raise ValueError(f"{option} {name}: {error}") from error
    return sides


def labels_from(options: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Parse the labels of engines, each given as NAME=VALUE,… Raises ValueError."""
    parsed: list[dict[str, str]] = []
    for option in options:
        pairs = [pair.partition("=") for pair in option.split(",")]
        if not all(name and separator for name, separator, _ in pairs):
            raise ValueError(f"--labels {option}: expected NAME=VALUE, for example region=eu,tier=canary")
        parsed.append({name: value for name, _, value in pairs})
    return tuple(parsed)


def simulate(
    requests: Sequence[TracedRequest], side: Side, fleet: FleetSpec, seed: int, on_arrival: Callable[[], None]
) -> Run:
    """Replay a trace to its end in a simulated fleet. `on_arrival` is called for each request."""
    outcomes = Simulation(fleet, side, Random(seed)).run(requests, on_arrival)
    workers = [f"worker {number}" for number in range(1, fleet.workers + 1)]
    return Run(side.name, [_answer(outcome, workers) for outcome in outcomes], workers)


def _answer(outcome: Outcome, workers: Sequence[str]) -> Answer:
    request = outcome.request
    if outcome.refused:
        return Answer(request.arrival, request.input_tokens, error="refused by the router")
    return Answer(
        arrival=request.arrival,
        prompt_tokens=request.input_tokens,
        ttft=outcome.begun - request.arrival,
        seconds=outcome.ended - request.arrival,
        held=outcome.sent - request.arrival,
        output_tokens=request.output_tokens,
        cached_tokens=outcome.cached,
        worker=workers[outcome.worker],
    )


def open_trace(path: Path, limit: int | None) -> Trace:
    """Read a trace, and shift it to begin at 0. Raises TraceError, also without requests, and OSError."""
    trace = read_trace(path, limit)
    if not trace.lines:
        raise TraceError(f"{path} has no requests")
    begins = trace.lines[0].timestamp
    for line in trace.lines:
        line.timestamp -= begins
    return trace


def replay_simulated(path: Path, trace: Trace, sides: Sequence[Side], fleet: FleetSpec, speed: float) -> Report:
    """Replay a trace under several policies in a simulated fleet, and return the report."""
    requests = requests_of(trace.lines, speed, trace.block_tokens)
    with _progress(len(requests)) as begin:
        runs = [simulate(requests, side, fleet, 1, begin(side.name)) for side in sides]
    settings = {
        "Simulated fleet": f"{fleet.workers} engines, each {fleet.profile.name}",
        "Cache of each": f"{fleet.kv_tokens:,} tokens",
        "Policies": ", ".join(side.name + (" (holds requests)" if side.late_binding else "") for side in sides),
    }
    return _report(path, trace, requests, runs, settings, speed, fleet.workers * fleet.kv_tokens)


def replay_to(path: Path, trace: Trace, targets: Sequence[LiveTarget], speed: float) -> Report:
    """Replay a trace to one router after another. Raises ReplayError."""
    requests = requests_of(trace.lines, speed, trace.block_tokens)
    runs: list[Run] = []
    with _progress(len(requests)) as begin:
        for target in targets:
            runs.append(asyncio.run(replay_live(trace, target, begin(target.label))))
    settings = {
        **{target.label: target.url for target in targets},
        "Answers": f"as long as in the trace, at most {targets[0].max_tokens} tokens",
        "Seed of the prompts": targets[0].seed.rpartition("/")[0],
    }
    return _report(path, trace, requests, runs, settings, speed, None)


def live_targets(
    urls: Sequence[str], model: str | None, api_key: str, speed: float, max_tokens: int, seed: str | None
) -> list[LiveTarget]:
    """Parse routers given as URL or LABEL=URL, each with new prompts of its own. Raises ValueError."""
    seed = seed or token_hex(8)
    targets: dict[str, LiveTarget] = {}
    for text in urls:
        label, separator, url = text.partition("=")
        if not separator or "://" in label:
            label, url = text.partition("://")[2].rstrip("/"), text
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {text}: expected URL or LABEL=URL, for example new=http://127.0.0.1:8080")
        if label in targets:
            raise ValueError(f"--url: duplicate label {label!r}: set different labels as LABEL=URL")
        targets[label] = LiveTarget(label, url.rstrip("/"), model, api_key, speed, max_tokens, f"{seed}/{label}")
    return list(targets.values())


def write_report(report: Report, html: Path, as_json: Path | None) -> None:
    """Write the page and, if requested, the results as JSON. Print the figures. Raises OSError."""
    html.write_text(render(report), encoding="utf-8")
    if as_json is not None:
        results = {
            "trace": report.trace,
            "settings": dict(report.settings),
            "workload": asdict(report.workload),
            "runs": [run.as_json() for run in report.runs],
        }
        as_json.write_text(json.dumps(results) + "\n")
    console = Console()
    console.print(_table(report.runs, report.workload))
    console.print(" ".join(headline(report.runs, report.workload.best_hit_rate)))
    console.print(f"report: {html}", soft_wrap=True)


def _report(
    path: Path,
    trace: Trace,
    requests: Sequence[TracedRequest],
    runs: Sequence[Run],
    settings: dict[str, str],
    speed: float,
    cache_tokens: int | None,
) -> Report:
    common = {
        "Trace": path.name,
        "Speed": f"{speed:g} times as recorded",
        "Blocks of the trace": f"{trace.block_tokens} tokens",
    }
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    workload = shape(trace.lines, requests, trace.block_tokens)
    return Report(path.name, cache_tokens is None, runs, requests, workload, common | settings, cache_tokens, made)


def _table(runs: Sequence[Run], workload: Workload) -> Table:
    table = Table(caption=f"best possible hit rate {share(workload.best_hit_rate)}")
    for name in ("", "hit rate", "TTFT p50", "p90", "p99", "busiest", "failed"):
        table.add_column(name, justify="left" if not name else "right")
    for run in runs:
        figures = run.figures
        rate = "not reported" if figures.hit_rate is None else share(figures.hit_rate)
        times = [seconds(each) for each in (figures.ttft_p50, figures.ttft_p90, figures.ttft_p99)]
        table.add_row(run.label, rate, *times, f"{figures.busiest:.2f}", str(figures.failed))
    return table


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Show a progress bar for each begun run. The returned function is called for each request."""
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def begin(name: str) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        yield begin
