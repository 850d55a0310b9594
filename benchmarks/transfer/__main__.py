"""The command `python -m benchmarks.transfer`, which `make bench-transfer` runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.index.report import write_section
from benchmarks.machine import CORES, description
from benchmarks.transfer.run import FULL, QUICK, Run

_HOW = """\
`make bench-transfer` runs the transfer engines between two processes of one machine, beside a memcpy within one process
and a raw socket on loopback (`sendall` and `recv_into` of each block). `make bench-transfer ARGS=--quick` is shorter.

Random blocks of an arena of 256 MiB are sent to random positions of another, 128 MiB of them at a time (of 4 KiB
blocks: 8192). Each batch is one write, timed until the receiver has acknowledged it. Before the timing, a batch of each
size is compared with the sent bytes. The sides take turns in changing order, and all others are stopped. Figures are
medians of {rounds} rounds, ratios are medians of each round's ratio.
{missing}
Machine: {machine}; load average {load_before:.1f} before, {load_after:.1f} after.{noise}
The run lasted {minutes:.0f} min."""
_NOISE = " Other processes used a share:\nthe ratios are more reliable than the figures."


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Run two short rounds.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write section Transfer of this file.")] = None,
) -> None:
    """Compare the transfer engines."""
    scale = QUICK if quick else FULL
    started, load_before = time.monotonic(), os.getloadavg()[0]
    run = Run(scale)
    run.do()
    load_after = os.getloadavg()[0]
    how = _HOW.format(
        rounds=scale.rounds,
        missing="".join(f"\nNot measured: {name} ({reason}).\n" for name, reason in run.missing.items()),
        machine=description(),
        load_before=load_before,
        load_after=load_after,
        noise=_NOISE if max(load_before, load_after) > len(CORES) else "",
        minutes=(time.monotonic() - started) / 60,
    )
    text = "\n\n".join([how, *(table.render() for table in run.tables)])
    print(text)
    if markdown is not None:
        write_section(markdown, "Transfer", text)


if __name__ == "__main__":
    typer.run(main)
