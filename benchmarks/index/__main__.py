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
`make bench-index` runs our indexer and the standalone indexer of NVIDIA Dynamo (`ai-dynamo-runtime` {peer}) side by
side; `make bench-index ARGS=--quick` in a minute, `ARGS='--part ingest'` a part of it.

`kvrouter` is {build}, with its native core, `in Python` the same with the core's twin, interpreted. All follow the same
ZeroMQ streams, encoded as `{form}` before the first is sent, of blocks of {block_size} tokens. 1-block events come 16 a
batch, larger ones one a batch. `cached` prompts are held by one of 8 workers, in an index of {blocks:,} blocks.

The publisher and the client have one core, the indexer under test {cores}. Our one reader thread uses no more than one
core to ingest, Dynamo's four indexer threads could use more (`ARGS=--all-cores`). The sides take turns, in an order
that changes; the figures are medians of {rounds}.{awake}

Before a figure counts, the answers about prompts of all workers are compared with what was sent: whole, cut short,
continued differently, begun differently. Publishers have no high-water mark, and an ingest ends when the last block of
every stream is found, so nothing is dropped unnoticed.
{load}
Machine: {machine}; load average {load_before:.1f} before, {load_after:.1f} after.{noise}
The run took {minutes:.0f} min."""
_NOISE = """\
 That is more than
its cores: other work took its share, so rates and latencies are worse than on an idle machine, and not equally for both
sides."""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="An eighth of the blocks, one round.")] = False,
    part: Annotated[list[Part] | None, typer.Option(help="Only this part; repeatable.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each measurement.")] = None,
    form: Annotated[WireForm, typer.Option(help="The form of the events.")] = WireForm.VLLM_MAPS,
    all_cores: Annotated[bool, typer.Option("--all-cores", help="Indexers may use every core.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="File whose section Index to write.")] = None,
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
