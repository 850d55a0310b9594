"""The report of a replay: one HTML page without external files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvrouter.tools.traces import plots
from kvrouter.tools.traces.results import Run, Workload, histogram
from simulator.fleet.trace import TracedRequest

_COLUMNS = 48
_SHOWN_WORKERS = 48


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a report. `cache_tokens`: tokens of the whole fleet's cache, if known. `runs`: at least one."""

    trace: str
    live: bool
    runs: Sequence[Run]
    requests: Sequence[TracedRequest]
    workload: Workload
    settings: Mapping[str, str]
    cache_tokens: int | None
    made: str


def render(report: Report) -> str:
    """Render the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": plots.seconds,
        "duration": plots.duration,
        "amount": plots.amount,
        "share": plots.share,
    }
    loads = _loads(report.runs)
    return environment.get_template("report.html").render(
        failures=any(run.figures.failed for run in report.runs),
        report=report,
        workload=report.workload,
        headline=headline(report.runs, report.workload.best_hit_rate),
        table=_table(report.runs),
        pictures={name: Markup(svg) for name, svg in _pictures(report).items()},
        loads=[(run.label, Markup(svg), rows) for run, svg, rows in loads],
        most=max((row[3] for _, _, rows in loads for row in rows), default=0.0),
    )


def headline(runs: Sequence[Run], best_hit_rate: float) -> list[str]:
    """Return a summary of one to three sentences."""
    answered = [run for run in runs if run.ttfts]
    if not answered:
        return ["No request was answered."]
    quickest = min(answered, key=lambda run: run.figures.ttft_p90)
    slowest = max(answered, key=lambda run: run.figures.ttft_p90)
    first = runs[0]
    lead = f"With {quickest.label} nine in ten first tokens arrive within {plots.seconds(quickest.figures.ttft_p90)}"
    sentences = []
    if slowest.figures.ttft_p90 > 1.05 * quickest.figures.ttft_p90:
        times = slowest.figures.ttft_p90 / quickest.figures.ttft_p90
        lead += f", with {slowest.label} within {plots.seconds(slowest.figures.ttft_p90)}: {times:.3g} times as long"
        if len(answered) > 2:
            second = min((run for run in answered if run is not quickest), key=lambda run: run.figures.ttft_p90)
            lead += f". Next is {second.label} with {plots.seconds(second.figures.ttft_p90)}"
    elif len(answered) > 1:
        lead += ", and no other is more than 5 % slower"
    sentences.append(f"{lead}.")
    if first.label not in lead and first.ttfts:
        sentences.append(f"With {first.label} it is {plots.seconds(first.figures.ttft_p90)}.")
    if (rate := quickest.figures.hit_rate) is not None:
        sentences.append(
            f"{quickest.label} finds {plots.share(rate)} of the prompt tokens in a cache; "
            f"{plots.share(best_hit_rate)} is the best possible rate."
        )
    if failed := sum(run.figures.failed for run in runs):
        sentences.append(f"{failed} requests failed: see below.")
    return sentences


def _table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the figures of each run, and mark the best ones."""
    figures = [run.figures for run in runs]
    answered = [each for each, run in zip(figures, runs, strict=True) if run.ttfts]
    quickest = min((each.ttft_p90 for each in answered), default=0.0)
    rates = [each.hit_rate for each in figures if each.hit_rate is not None]
    return [
        {
            "label": run.label,
            "figures": each,
            "answered": bool(run.ttfts),
            "best_ttft": bool(run.ttfts) and len(runs) > 1 and each.ttft_p90 <= 1.02 * quickest,
            "best_rate": len(runs) > 1 and bool(rates) and each.hit_rate == max(rates),
            "times": each.ttft_p90 / quickest if quickest and run.ttfts else None,
        }
        for run, each in zip(runs, figures, strict=True)
    ]


def _pictures(report: Report) -> dict[str, str]:
    runs, workload = report.runs, report.workload
    times = {run.label: run.ttfts for run in runs}
    rates = {run.label: run.figures.hit_rate for run in runs}
    known = {label: rate for label, rate in rates.items() if rate is not None}
    prompts = [request.input_tokens for request in report.requests]
    outputs = [request.output_tokens for request in report.requests]
    arrivals = [request.arrival for request in report.requests]
    duration = max(workload.seconds, 1e-3)
    edges = [duration * number / _COLUMNS for number in range(_COLUMNS + 1)]
    rate = [count / (duration / _COLUMNS) for count in histogram(arrivals, edges)]
    marks = {"this fleet": report.cache_tokens} if report.cache_tokens else {}
    return {
        "hit_rates": plots.hit_rates(known, workload.best_hit_rate) if len(known) == len(rates) else "",
        "percentiles": plots.percentiles(times),
        "distribution": plots.distribution(times),
        "arrivals": plots.columns(
            "Requests a second over time",
            rate,
            [(0.0, "0"), (0.5, plots.duration(duration / 2)), (1.0, plots.duration(duration))],
            lambda value: f"{value:.2g}/s",
        ),
        "prompts": _lengths("Lengths of prompts", prompts),
        "outputs": _lengths("Lengths of answers", outputs),
        "cache_sizes": plots.cache_sizes(workload.by_cache, marks) if workload.by_cache else "",
    }


def _lengths(title: str, lengths: Sequence[int]) -> str:
    """Draw a histogram on a logarithmic axis."""
    low, high = log2(max(min(lengths), 1)), log2(max(max(lengths), 2) + 1)
    high = max(high, low + 1)
    edges = [2 ** (low + (high - low) * number / _COLUMNS) for number in range(_COLUMNS + 1)]
    ticks = [((log2(tick) - low) / (high - low), plots.amount(tick)) for tick in plots.log_ticks(2**low, 2**high, 8)]
    if len(ticks) < 2:
        ticks = [(place, plots.amount(round(2 ** (low + (high - low) * place)))) for place in (0.0, 0.5, 1.0)]
    return plots.columns(title, histogram(lengths, edges), ticks, lambda value: f"{value:.0f}")


def _loads(runs: Sequence[Run]) -> list[tuple[Run, str, list[tuple[str, int, float, float]]]]:
    """Return for each run the load of its workers: a picture, and rows (worker, requests, mean in flight, most)."""
    end = max(run.end for run in runs)
    loads = [run.load(96, end) for run in runs]
    most = max((value for load in loads for row in load.values() for value in row), default=0.0)
    found = []
    for run, load in zip(runs, loads, strict=True):
        if not load:
            continue
        shown = dict(list(load.items())[:_SHOWN_WORKERS])
        counts = dict.fromkeys(load, 0)
        for answer in run.answers:
            if answer.worker:
                counts[answer.worker] += 1
        rows = [(worker, counts[worker], sum(row) / len(row), max(row)) for worker, row in load.items()]
        found.append((run, plots.heat(run.label, shown, most, end), rows))
    return found
