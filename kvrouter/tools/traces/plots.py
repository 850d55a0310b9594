"""Figures as SVG for a page. Their colours are the page's, so that they follow its light or dark mode.

Series have the classes s0, s1, …. Heat has the class `heat` and an opacity. Every figure has a title for screen
readers, and its parts have titles as tooltips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import count
from math import ceil, floor, log10, sqrt

from kvrouter.tools.traces.results import percentile

Show = Callable[[float], str]

_ids = count(1)


def seconds(value: float) -> str:
    """Format a time."""
    if value >= 1:
        return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 or not value else f"{1000 * value:.1f} ms"


def duration(value: float) -> str:
    """Format a longer time, in minutes and hours if it is long enough."""
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.0f} min" if value >= 120 else f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def amount(value: float) -> str:
    """Format a count: 12, 3.4 k, 1.2 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def share(value: float) -> str:
    """Format a share in percent."""
    return f"{100 * value:.1f} %"


def hit_rates(rates: Mapping[str, float], best: float | None) -> str:
    """Draw a bar for each run, and a line at the best possible rate."""
    width, height, left, line = 520, 34 + 30 * len(rates), 130, 30
    scale = (width - left - 60) / 1.0
    parts = [_text(0, 20 + line * row, label, "label") for row, label in enumerate(rates)]
    for row, (label, rate) in enumerate(rates.items()):
        y = 6 + line * row
        parts.append(f'<rect class="track" x="{left}" y="{y}" width="{scale:.0f}" height="18" rx="3"/>')
        parts.append(
            f'<rect class="s{row} fill" x="{left}" y="{y}" width="{max(scale * rate, 1):.1f}" height="18" rx="3">'
            f"<title>{escape(label)}: {share(rate)}</title></rect>"
        )
        parts.append(_text(left + scale + 6, y + 14, share(rate), "value"))
    if best is not None:
        x, bottom = left + scale * best, 6 + line * len(rates) - 6
        anchor = "end" if best > 0.5 else "start"
        parts.append(f'<line class="best" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"best possible {share(best)}", "tick", anchor))
    return _figure("Hit rate of each run: share of prompt tokens found in a cache", width, height, parts)


def percentiles(times: Mapping[str, Sequence[float]]) -> str:
    """Draw the 50th, 90th and 99th percentile of each run on a logarithmic axis."""
    width, height, left, line = 520, 34 + 30 * len(times), 130, 30
    marks = {label: [percentile(each, p) for p in (0.5, 0.9, 0.99)] for label, each in times.items() if each}
    low, high = _decades([value for values in marks.values() for value in values])
    x = _log(low, high, left + 6, width - 20)
    bottom = line * len(times)
    parts = _log_axis(low, high, x, 0, bottom, _tick)
    for row, label in enumerate(times):
        parts.append(_text(0, 20 + line * row, label, "label"))
        if label not in marks:
            continue
        y = 15 + line * row
        p50, p90, p99 = marks[label]
        title = f"{label}: half within {seconds(p50)}, 90 % within {seconds(p90)}, 99 % within {seconds(p99)}"
        parts.append(
            f'<g class="s{row}"><title>{escape(title)}</title>'
            f'<line class="range" x1="{x(p50):.1f}" x2="{x(p99):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="hollow" cx="{x(p50):.1f}" cy="{y}" r="5"/>'
            f'<circle class="fill" cx="{x(p90):.1f}" cy="{y}" r="6"/>'
            f'<line class="end" x1="{x(p99):.1f}" x2="{x(p99):.1f}" y1="{y - 6}" y2="{y + 6}"/></g>'
        )
    return _figure("Time to the first token of each run: p50, p90 and p99", width, height, parts)


def distribution(times: Mapping[str, Sequence[float]]) -> str:
    """Draw the share of requests with their first token within a time, for each run. Times are ascending."""
    width, height, left, bottom = 1060, 340, 44, 300
    shown = [percentile(each, p) for each in times.values() if each for p in (0.01, 0.999)]
    low, high = _decades(shown)
    x = _log(low, high, left, width - 20)
    parts = _log_axis(low, high, x, 10, bottom, _tick)
    for tenth in (0, 0.25, 0.5, 0.75, 0.9, 1):
        y = bottom - (bottom - 10) * tenth
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{100 * tenth:.0f} %", "tick", "end"))
    for row, (label, each) in reversed(list(enumerate(times.items()))):
        if not each:
            continue
        steps = sorted({round(number / 240 * (len(each) - 1)) for number in range(241)})
        points = " ".join(
            f"{min(max(x(max(each[step], 1e-6)), left), width - 20):.1f},"
            f"{bottom - (bottom - 10) * (step + 1) / len(each):.1f}"
            for step in steps
        )
        parts.append(f'<polyline class="s{row} curve" points="{points}"><title>{escape(label)}</title></polyline>')
    return _figure("Distribution of the time to the first token, for each run", width, height, parts)


def heat(label: str, load: Mapping[str, Sequence[float]], most: float, end: float) -> str:
    """Draw a row for each worker and a column for each time. The opacity is the square root of the load's share."""
    rows = list(load.items())
    width, left = 520, 4
    cell = max(4.0, min(18.0, 220 / max(len(rows), 1)))
    bins = len(rows[0][1]) if rows else 1
    step = (width - left) / bins
    parts = [
        f'<rect class="track" x="{left}" y="0" width="{width - left}" height="{cell * len(rows):.1f}"/>',
    ]
    for row, (worker, values) in enumerate(rows):
        # Equal neighbours are one rectangle.
        levels = [round(20 * sqrt(value / most)) if most else 0 for value in values]
        place = 0
        while place < bins:
            after = place + 1
            while after < bins and levels[after] == levels[place]:
                after += 1
            if levels[place]:
                title = f"{worker}, {duration(end * place / bins)}: {max(values[place:after]):.1f} requests in flight"
                parts.append(
                    f'<rect class="heat" fill-opacity="{levels[place] / 20:g}" x="{left + step * place:.1f}" '
                    f'y="{cell * row:.1f}" width="{step * (after - place):.1f}" height="{cell - 0.6:.1f}">'
                    f"<title>{escape(title)}</title></rect>"
                )
            place = after
    bottom = cell * len(rows) + 16
    parts.append(_text(left, bottom, "0", "tick"))
    parts.append(_text(width, bottom, duration(end), "tick", "end"))
    title = f"{label}: requests in flight on each of {len(rows)} workers over time"
    return _figure(title, width, round(bottom + 4), parts)


def columns(title: str, counts: Sequence[float], ticks: Sequence[tuple[float, str]], show: Show) -> str:
    """Draw a histogram. `ticks` are pairs of a position between 0 and 1 and a text."""
    width, height, left, bottom = 520, 190, 44, 160
    most = max(counts, default=0) or 1
    step = (width - left - 8) / max(len(counts), 1)
    parts = []
    for part in (0.5, 1.0):
        y = bottom - (bottom - 14) * part
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, show(most * part), "tick", "end"))
    for number, each in enumerate(counts):
        size = (bottom - 14) * each / most
        parts.append(
            f'<rect class="s0 fill" x="{left + step * number:.1f}" y="{bottom - size:.1f}" '
            f'width="{max(step - 1, 0.5):.1f}" height="{size:.1f}"><title>{show(each)}</title></rect>'
        )
    parts.append(f'<line class="axis" x1="{left}" x2="{width - 8}" y1="{bottom}" y2="{bottom}"/>')
    for place, text in ticks:
        anchor = "start" if place < 0.02 else "end" if place > 0.98 else "middle"
        parts.append(_text(left + (width - left - 8) * place, bottom + 18, text, "tick", anchor))
    return _figure(title, width, height, parts)


def cache_sizes(by_cache: Sequence[tuple[int, float]], marks: Mapping[str, int]) -> str:
    """Draw the hit rate of one cache by its size. `marks` are labelled sizes."""
    width, height, left, bottom, right = 520, 190, 44, 160, 512
    sizes = [float(size) for size, _ in by_cache]
    low, high = min([*sizes, *marks.values()]), max([*sizes, *marks.values()])
    x = _log(low, high if high > low else low * 2, left + 8, right - 8)
    top = max(rate for _, rate in by_cache) or 1

    def y(rate: float) -> float:
        return bottom - (bottom - 24) * rate / top

    parts = []
    for part in (0.5, 1.0):
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(top * part):.1f}" y2="{y(top * part):.1f}"/>')
        parts.append(_text(left - 6, y(top * part) + 4, f"{100 * top * part:.0f} %", "tick", "end"))
    points = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in by_cache)
    parts.append(f'<polyline class="s0 curve" points="{points}"/>')
    for size, rate in by_cache:
        parts.append(
            f'<circle class="s0 fill" cx="{x(size):.1f}" cy="{y(rate):.1f}" r="4">'
            f"<title>{amount(size)} tokens: {share(rate)}</title></circle>"
        )
    for label, size in marks.items():
        anchor = "end" if x(size) > 0.6 * width else "start"
        parts.append(f'<line class="best" x1="{x(size):.1f}" x2="{x(size):.1f}" y1="6" y2="{bottom}"/>')
        parts.append(_text(x(size) + (-5 if anchor == "end" else 5), 14, label, "tick", anchor))
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(_text(x(sizes[0]), bottom + 18, f"{amount(sizes[0])} tokens", "tick"))
    parts.append(_text(x(sizes[-1]), bottom + 18, amount(sizes[-1]), "tick", "end"))
    return _figure("Hit rate of one cache by its size", width, height, parts)


def _figure(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    name = f"figure-{next(_ids)}"
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name}">'
        f'<title id="{name}">{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick(value: float) -> str:
    return f"{value:g} s" if value >= 0.999 else f"{1000 * value:g} ms"


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return round bounds of a logarithmic axis: 1, 2 or 5 times a power of ten."""
    positive = [value for value in values if value > 0] or [0.001, 1.0]
    low, high = min(positive), max(positive)
    steps = [m * 10.0**e for e in range(floor(log10(low)), ceil(log10(high)) + 1) for m in (1, 2, 5)]
    below, above = [step for step in steps if step <= low], [step for step in steps if step >= high]
    bottom, top = max(below, default=low), min(above, default=high)
    return bottom, top if top > bottom else bottom * 10


def _log(low: float, high: float, left: float, right: float) -> Callable[[float], float]:
    scale = (right - left) / (log10(high) - log10(low))
    return lambda value: left + scale * (log10(max(value, low)) - log10(low))


def _log_axis(low: float, high: float, x: Callable[[float], float], top: float, bottom: float, show: Show) -> list[str]:
    parts = []
    for value in log_ticks(low, high, 9 if x(high) - x(low) > 600 else 6):
        parts.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top:.0f}" y2="{bottom:.0f}"/>')
        parts.append(_text(x(value), bottom + 16, show(value), "tick", "middle"))
    return parts


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` round values: 1, 2 and 5 times powers of ten, or powers alone."""
    exponents = range(floor(log10(low)), ceil(log10(high)) + 1)
    for multiples in ((1, 2, 5), (1, 3), (1,)):
        ticks = [multiple * 10.0**exponent for exponent in exponents for multiple in multiples]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) <= most:
            break
    return ticks
