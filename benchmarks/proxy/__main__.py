"""The command `python -m benchmarks.proxy`, which `make bench-proxy` runs."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.index.publisher import publisher_of
from benchmarks.index.report import write_section
from benchmarks.index.workload import BLOCK_SIZE, Workload
from benchmarks.machine import CORES, description, is_compiled
from benchmarks.proxy.load import tool
from benchmarks.proxy.raw_worker import CHUNKS, PAUSE
from benchmarks.proxy.run import FULL, QUICK, Run
from benchmarks.proxy.sides import CACHE_AWARE, ROUND_ROBIN, Kvrouter, Side, peers
from benchmarks.proxy.workers import WORKERS, nginx

_HOW = """\
`make bench-proxy` compares our router and the Rust ones ({versions}) in front of {workers} light workers ({worker}).
`make bench-proxy ARGS=--quick` runs in a few minutes, `ARGS='--mode "round robin"'` runs one mode, `ARGS='--row "new
last"'` runs the rows whose name has this text, and `ARGS='--against DIR'` measures the build of another checkout.

The router under test has one core, workers and load ({tool}) another. All routers run at once, for streams those of a
mode, and take turns, load by load, in changing order. The figures are medians of {rounds}. Latencies are the time that
the router adds. Chats of 64 KB are conversations, four turns of each. The 64 chats of a size are repeated, except in
the rows with a new last message. A new last message begins with a unique number; it is the whole chat of 1 KB, and 4 KB
of a chat of 64 KB. A stream has {chunks} events, {pause:.0f} ms apart; {streams} streams begin at once, {bursts} times
a round, each after as many uncounted ones. Before a burst without open connections no request was sent for six seconds.
Sequential requests use one connection. In the conversation of 30k tokens only the last message changes, so that all
routers have seen the rest.

*raw relay* is not a router: it relays bytes on uvloop (`benchmarks/proxy/relay.py`) and only finds the end of requests
and answers. It is the limit of a router in Python on this machine, in this run.

{ours}{against}

Processor times are those of all threads, as the scheduler counts them in nanoseconds.

Round robin reads no prompt, in any router. Cache aware is `cache_aware` of the peers, which know the prompts that they
routed. Ours has the model's tokenizer, an index of {blocks:,} blocks of {block} tokens that was filled by events, the
default policy and the audit.

Machine: {machine}; load average {before:.1f} before, {after:.1f} after. The run lasted {minutes:.0f} min."""


_COMPILED = """\
*kvrouter* is the build of `make compiled`, as in the image; *interpreted* is the same code without compilation."""
_AGAINST = " *other checkout* is the build of {}."
_INTERPRETED = "*kvrouter* is interpreted: there is no C compiler here for `make compiled`."


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Use one round of a second each and a tenth of the blocks.")
    ] = False,
    mode: Annotated[list[str] | None, typer.Option(help=f"{ROUND_ROBIN!r} or {CACHE_AWARE!r}; repeatable.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each measurement.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Seconds of each load.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Part of the name of a row to measure; repeatable.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another checkout, measured in place of the interpreted build.")
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Measure our router only.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write section Proxy of this file.")] = None,
) -> None:
    """Compare the routers as proxies."""
    scale = QUICK if quick else FULL
    scale = replace(scale, rounds=rounds or scale.rounds, seconds=seconds or scale.seconds)
    modes = mode or [ROUND_ROBIN, CACHE_AWARE]
    started, before = time.monotonic(), os.getloadavg()[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-proxy-")))
        folder.chmod(0o755)
        sides: list[Side] = []
        prompts = scale.blocks // (WORKERS * 512)
        workload = Workload(workers=WORKERS, prompts=prompts, prompt_blocks=512, event_blocks=32)
        builds = [(False, Path())]
        if against is not None:
            builds.append((False, against))
        elif is_compiled():
            builds.append((True, Path()))
        for each, (interpreted, checkout) in product(modes, builds):
            publisher = stack.enter_context(publisher_of(workload)) if each == CACHE_AWARE else None
            sides.append(Kvrouter(each, publisher, interpreted=interpreted, checkout=checkout))
        others = [] if no_peers else [peer for each in modes for peer in peers(each)]
        sides += others
        run = Run(sides, scale, folder, row or ())
        run.do()
    how = _HOW.format(
        versions=", ".join(sorted({f"`{peer.name}` {peer.version()}" for peer in others})) or "left out",
        workers=WORKERS,
        worker="nginx, and for streams one of our own" if nginx() else "of our own",
        tool=tool(),
        rounds=f"{scale.rounds} rounds" if scale.rounds > 1 else "one round",
        chunks=CHUNKS,
        ours=_COMPILED if is_compiled() else _INTERPRETED,
        against="" if against is None else _AGAINST.format(against),
        streams=scale.streams,
        bursts=scale.bursts,
        pause=PAUSE * 1000,
        blocks=scale.blocks,
        block=BLOCK_SIZE,
        machine=f"{description()}, {len(CORES)} of them used",
        before=before,
        after=os.getloadavg()[0],
        minutes=(time.monotonic() - started) / 60,
    )
    if run.failures:
        how += f"\n\nFailed, so that figures are missing: {', '.join(dict.fromkeys(run.failures))}."
    text = "\n\n".join([how, *(table.render() for table in run.tables)])
    print(text)
    if markdown is not None:
        write_section(markdown, "Proxy", text)


if __name__ == "__main__":
    typer.run(main)
