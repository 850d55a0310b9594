"""The command `python -m benchmarks.soak`, which `make soak` runs. It fails if objects remain or memory grows."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from benchmarks.soak.run import Result, soaking


def main(minutes: Annotated[float, typer.Option(min=0.2, help="Minutes of the run.")] = 10.0) -> None:
    """Run the router under load, and report its objects at the end."""
    result = asyncio.run(_run(minutes))
    print(_summary(result))
    problems = result.problems()
    print("\n".join(f"PROBLEM {problem}" for problem in problems) or "Nothing is left, and nothing grew.")
    raise typer.Exit(bool(problems))


async def _run(minutes: float) -> Result:
    async with soaking() as soak:
        return await soak.run(minutes)


def _summary(result: Result) -> str:
    lines = [
        f"{result.seconds / 60:.1f} min at {result.rate:.0f} requests/s, of {result.capacity:.0f} at most; "
        f"{result.faults} workers died or hung",
        "",
        *(f"{count:8,}  {name}" for name, count in sorted(result.outcomes.items())),
        "",
        f"{'the router held':22}{'before':>10}{'most':>10}{'after':>10}",
    ]
    for name, before in result.before.items():
        most = max(sample[name] for sample in result.samples)
        unit = 2**20 if name == "bytes" else 1
        shown = "resident MB" if name == "bytes" else name
        lines.append(f"{shown:22}{before // unit:>10}{most // unit:>10}{result.left[name] // unit:>10}")
    lines.append(f"memory in the second half: {result.growth:+.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
