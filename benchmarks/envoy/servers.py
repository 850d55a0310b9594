"""The command `python -m benchmarks.envoy.servers`: the cost of a request in gRPC servers with equal answers.

The servers decide nothing, so that only the cost of the call is measured.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
import yaml

from benchmarks.envoy import grpc_servers
from benchmarks.envoy.measures import CONNECTIONS, SIZE
from benchmarks.envoy.sides import CORE, SHORT, running_envoy, spread, version, workers
from benchmarks.index.report import Table, write_section
from benchmarks.machine import CORES, LOAD_CORE, description, is_compiled, pin, python
from benchmarks.ports import free_port
from benchmarks.proxy.load import loaded, tool
from benchmarks.proxy.processes import cpu_of, started

_CONFIG = Path("deploy/envoy/cheapest.yaml")
_HOW = """\
`make bench-envoy-servers` puts gRPC servers in the place of the picker, behind Envoy ({version}) with cheapest.yaml.
They decide nothing: each sends all requests to one worker, with equal bytes. *grpcio, threads* is its synchronous
server with {threads} threads and a generic handler, *grpcio, asyncio* its server for asyncio. *grpclib* is based on the
library h2. *ours* is interpreted, *ours, compiled* is the build of `make compiled`. Servers with an event loop use
uvloop.

Envoy and server share one core; worker and load ({tool}, {connections} connections or one, requests of {size} bytes)
have another. The servers take turns; figures are medians of {rounds}.

Machine: {machine}; load average {before:.1f} before, {after:.1f} after."""


@dataclass(slots=True)
class _Measures:
    """The measurements of one server, a value for each round: requests a second, seconds of one, and processor
    seconds.
    """

    rate: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    envoy: list[float] = field(default_factory=list)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 4.0,
    markdown: Annotated[Path | None, typer.Option(help="Write section gRPC servers of this file.")] = None,
) -> None:
    """Compare gRPC servers as Envoy's external processors."""
    pin(LOAD_CORE)
    before = os.getloadavg()[0]
    names = ["", *grpc_servers.NAMES, *(["ours, compiled"] if is_compiled() else [])]
    measures = {name: _Measures() for name in names}
    with tempfile.TemporaryDirectory(prefix="bench-envoy-") as folder, workers(SHORT, Path(folder)) as urls:
        for number in range(rounds):
            for place in range(len(names)):
                name = names[(place + number) % len(names)]
                print(f"round {number + 1} of {rounds}: {name or 'Envoy alone'}", file=sys.stderr, flush=True)
                with _running(name, urls, Path(folder)) as (url, envoy, server):
                    _measure(measures[name], url, envoy, server, seconds, Path(folder))
    how = _HOW.format(
        version=version(),
        threads=grpc_servers.THREADS,
        tool=tool(),
        connections=CONNECTIONS,
        size=SIZE,
        rounds=f"{rounds} rounds" if rounds > 1 else "one round",
        machine=f"{description()}, {len(CORES)} of them used",
        before=before,
        after=os.getloadavg()[0],
    )
    text = f"{how}\n\n{_table(measures).render()}"
    print(text)
    if markdown is not None:
        write_section(markdown, "gRPC servers", text)


@contextmanager
def _running(name: str, urls: Sequence[str], folder: Path) -> Iterator[tuple[str, int, int | None]]:
    """Run a server behind Envoy, and yield Envoy's URL and process, and the server's.

    Without a name, Envoy has no server.
    """
    found = yaml.safe_load(_CONFIG.read_text())
    with ExitStack() as stack:
        port, server = free_port(), None
        if name:
            plain, compiled, _ = name.partition(", compiled")
            module = ["-m", "benchmarks.envoy.grpc_servers", plain, str(port), urls[0].removeprefix("http://")]
            command = [*python(interpreted=not compiled), *module]
            server = stack.enter_context(started(command, CORE, folder / f"{port}.log", lambda: _listens(port)))
        else:
            spread(found, urls[:1])
        url, envoy = stack.enter_context(running_envoy(found, port, folder))
        yield url, envoy, server


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _measure(measures: _Measures, url: str, envoy: int, server: int | None, seconds: float, folder: Path) -> None:
    loaded(url, SIZE, CONNECTIONS, 1.0, folder)  # warm-up
    time.sleep(0.5)
    measures.alone.append(loaded(url, SIZE, 1, seconds / 2, folder).p50)
    before = cpu_of(envoy), cpu_of(server) if server is not None else 0.0
    load = loaded(url, SIZE, CONNECTIONS, seconds, folder)
    measures.rate.append(load.rate)
    measures.envoy.append((cpu_of(envoy) - before[0]) / load.requests)
    if server is not None:
        measures.server.append((cpu_of(server) - before[1]) / load.requests)


def _table(measures: dict[str, _Measures]) -> Table:
    table = Table("gRPC server")
    for name, found in measures.items():
        row = name or "Envoy alone"
        table.add(row, "requests/s", median(found.rate))
        table.add(row, "one at a time, ms", median(found.alone) * 1e3)
        if found.server:
            table.add(row, "CPU of the server a request, µs", median(found.server) * 1e6)
        table.add(row, "of Envoy, µs", median(found.envoy) * 1e6)
    return table


if __name__ == "__main__":
    typer.run(main)
