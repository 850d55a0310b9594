"""The command `python -m benchmarks.proxy.beside_events`: the cost of a large fleet's events for concurrent
requests.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.index.report import write_section
from benchmarks.machine import AWAKE, CORES, awake, description, is_compiled, python
from benchmarks.ports import free_port
from benchmarks.proxy.event_load import EVENT_BLOCKS, EventLoad, event_load
from benchmarks.proxy.load import Load, loaded, tool
from benchmarks.proxy.processes import answers, cpu_of, started
from benchmarks.proxy.prompts import MODEL
from benchmarks.proxy.run import SIZES
from benchmarks.proxy.sides import ROUTER_CORE
from benchmarks.proxy.workers import WORKERS, whole_workers
from simulator.worker.settings import BUNDLED_MODEL

_STREAMS = 64
_RATE = 200_000.0  # stored and removed blocks a second, half of each
_FILL_SECONDS = 12.0
_CONNECTIONS = 64
_ROWS = [(name, new) for name in SIZES for new in (False, True)]
_HOW = """\
`make bench-events` runs `kvrouter serve` ({build}), cache aware as above, in front of {workers} light workers of
{ranks} ranks each. Their {streams} streams are idle, or have {rate:,.0f} blocks a second in events of {event} blocks,
evenly, one stream after another. Half of the blocks are stored, half are removed. The load has {connections}
connections ({tool}). The router with its reader of streams has one core; workers, load and publisher have the other.
Runs with and without events take turns; figures are medians of {rounds}. Reading {rate:,.0f} blocks a second without
requests uses {alone:.0f}% of the router's core.{awake}

Machine: {machine}; load average {before:.1f} before, {after:.1f} after."""


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 4.0,
    markdown: Annotated[Path | None, typer.Option(help="Write section Requests beside events of this file.")] = None,
) -> None:
    """Compare requests with and without concurrent events."""
    before = os.getloadavg()[0]
    found: dict[tuple[str, bool, bool], list[Load]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="bench-events-") as name,
        whole_workers(Path(name)) as workers,
        event_load(_STREAMS) as events,
        awake() as kept_awake,
    ):
        folder, port = Path(name), free_port()
        config, url = folder / "config.json", f"http://127.0.0.1:{port}"
        config.write_bytes(msgspec.json.encode(_settings(port, workers, events)))
        command = [*python(), "-m", "kvrouter", "serve", "--config", str(config)]
        with started(command, ROUTER_CORE, folder / "log", lambda: answers(f"{url}/v1/models")) as pid:
            events.set_rate(_RATE)
            time.sleep(_FILL_SECONDS)  # until every event was sent once
            spent, begun = cpu_of(pid), time.monotonic()
            time.sleep(seconds)
            alone = (cpu_of(pid) - spent) / (time.monotonic() - begun)
            loaded(url, SIZES["1 KB"], 16, 2.0, folder)  # warms connections and caches
            for number in range(rounds):
                for size, new in _ROWS:
                    for beside in (False, True) if number % 2 else (True, False):
                        print(f"round {number + 1}: {size}, events: {beside}", file=sys.stderr, flush=True)
                        events.set_rate(_RATE if beside else 0)
                        time.sleep(0.5)
                        found[size, new, beside].append(loaded(url, SIZES[size], _CONNECTIONS, seconds, folder, new))
    how = _HOW.format(
        build="compiled" if is_compiled() else "interpreted",
        workers=WORKERS,
        ranks=_STREAMS // WORKERS,
        streams=_STREAMS,
        rate=_RATE,
        event=EVENT_BLOCKS,
        connections=_CONNECTIONS,
        tool=tool(),
        rounds=f"{rounds} rounds" if rounds > 1 else "one round",
        alone=alone * 100,
        machine=f"{description()}, {len(CORES)} of them used",
        awake=AWAKE if kept_awake else "",
        before=before,
        after=os.getloadavg()[0],
    )
    text = f"{how}\n\n{_table(found)}"
    print(text)
    if markdown is not None:
        write_section(markdown, "Requests beside events", text)


def _settings(port: int, workers: Sequence[str], events: EventLoad) -> dict[str, Any]:
    ranks = _STREAMS // WORKERS
    return {
        "server": {"port": port},
        "workers": [
            {
                "url": url,
                "block_size": 16,
                "streams": [
                    {"dp_rank": rank, "endpoint": events.endpoints[number * ranks + rank]} for rank in range(ranks)
                ],
            }
            for number, url in enumerate(workers)
        ],
        "models": {MODEL: {"tokenizer": str(BUNDLED_MODEL)}},
    }


def _table(found: dict[tuple[str, bool, bool], list[Load]]) -> str:
    lines = [
        "| chats | requests/s | beside events | ratio | p99, ms | beside events | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size, new in _ROWS:
        without, beside = found[size, new, False], found[size, new, True]
        rates = [median(load.rate for load in side) for side in (without, beside)]
        late = [median(load.p99 for load in side) * 1e3 for side in (without, beside)]
        cells = [f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[1] / rates[0]:.2f}"]
        cells += [f"{late[0]:.1f}", f"{late[1]:.1f}", f"{late[1] / late[0]:.2f}"]
        name = f"{size}, a new last message" if new else size
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
