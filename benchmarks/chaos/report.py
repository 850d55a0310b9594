"""The figures of a run as a table."""

from __future__ import annotations

from benchmarks.chaos.run import Result

_COLUMNS = ("phase", "requests", "lost", "broken off", "moved", "noticed after s", "p99 TTFT ms", "ratio")


def table(result: Result) -> str:
    """One row a phase. `lost` had no answer; p99 and its ratio are those of requests to the other workers."""
    usual = result.phases[0].p99()
    rows = [
        (
            phase.name,
            str(len(phase.streams)),
            str(len(phase.lost)),
            str(len(phase.broken)),
            str(phase.moved),
            "" if phase.noticed is None else f"{phase.noticed:.1f}",
            f"{phase.p99() * 1000:.0f}",
            f"{phase.p99() / usual:.2f}",
        )
        for phase in result.phases
    ]
    widths = [max(map(len, cells)) for cells in zip(_COLUMNS, *rows, strict=True)]
    lines = [_COLUMNS, tuple("-" * width for width in widths), *rows]
    text = "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    return f"{text}\n\nStill reserved at the end: {result.left_over}"
