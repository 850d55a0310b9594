"""The command `python -m benchmarks.index`, which `make bench-index` runs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.index.report import write_section
from benchmarks.index.run import FULL, QUICK, Part, Run
from benchmarks.index.sides import Dynamo, Kvrouter
from benchmarks.index.workload import BLOCK_SIZE
from benchmarks.machine import AWAKE, CORES, awake, description, is_compiled
from indexer.native import CORES as IMPLEMENTATIONS
from kvevents import WireForm

_PEER_PYTHON = Path(".bench/dynamo/bin/python")

_HOW = """\
`make bench-index` compares our indexer with the standalone indexer of NVIDIA Dynamo (`ai-dynamo-runtime` {peer}).
`make bench-index ARGS=--quick` runs in a minute, `ARGS='--part ingest'` runs one part.

`kvrouter` is {build}, with its native core; `in Python` is our indexer with the reference core, interpreted. All follow
the same ZeroMQ streams of blocks of {block_size} tokens, encoded as `{form}` before the first is sent. Batches have 16
1-block events, or one larger event. `cached` prompts are held by one of 8 workers, in an index of {blocks:,} blocks.

Publisher and client share one core, the indexer under test has {cores}. Our one reader thread ingests on one core at
most; Dynamo's four indexer threads could use more (`ARGS=--all-cores`). The sides take turns in changing order; the
figures are medians of {rounds}.{awake}

Before a figure counts, the answers about prompts of all workers are compared with the events: whole, cut short,
continued differently, begun differently. Publishers have no high-water mark, and an ingest ends when the last block of
every stream is found, so that no drop is unnoticed.
{load}
Machine: {machine}; load average {load_before:.1f} before, {load_after:.1f} after.{noise}
The run lasted {minutes:.0f} min."""
_NOISE = """\
 That is more than
its cores. Other processes used a share, so that rates and latencies are worse than on an idle machine, and not equally
for both sides."""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Use an eighth of the blocks and one round.")] = False,
    part: Annotated[list[Part] | None, typer.Option(help="Run only this part; repeatable.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each measurement.")] = None,
    form: Annotated[WireForm, typer.Option(help="Wire form of the events.")] = WireForm.VLLM_MAPS,
    all_cores: Annotated[bool, typer.Option("--all-cores", help="Let indexers use every core.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write section Index of this file.")] = None,
    peer_python: Annotated[Path, typer.Option(help="Python with ai-dynamo-runtime.")] = _PEER_PYTHON,
) -> None:
    """Compare the indexers."""
    scale = replace(QUICK if quick else FULL, form=form)
    if all_cores:
        scale = replace(scale, indexer_cores=tuple(CORES))
    if rounds is not None:
        scale = replace(scale, rounds=rounds)
    peer = Dynamo(peer_python.absolute())
    peer_version = peer.version()
    started, load_before = time.monotonic(), os.getloadavg()[0]
    run = Run([*map(Kvrouter, reversed(IMPLEMENTATIONS)), peer], scale)
    with awake() as kept_awake:
        run.do(part or list(Part))
    load_after = os.getloadavg()[0]
    load = f"While an indexer ingested, the publisher used at most {run.load:.0%} of its core.\n" if run.load else ""
    how = _HOW.format(
        peer=peer_version,
        build="compiled" if is_compiled() else "interpreted",
        form=form.value,
        block_size=BLOCK_SIZE,
        rounds=f"{scale.rounds} rounds" if scale.rounds > 1 else "one round",
        cores="all of them" if all_cores else "another",
        load=load,
        awake=AWAKE if kept_awake else "",
        blocks=scale.blocks,
        machine=description(),
        load_before=load_before,
        load_after=load_after,
        noise=_NOISE if max(load_before, load_after) > len(CORES) else "",
        minutes=(time.monotonic() - started) / 60,
    )
    text = "\n\n".join([how, *filter(None, (table.render() for table in run.tables))])
    print(text)
    if markdown is not None:
        write_section(markdown, "Index", text)


if __name__ == "__main__":
    typer.run(main)
