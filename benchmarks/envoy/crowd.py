"""The command `python -m benchmarks.envoy.crowd`: many requests in flight on a few HTTP/2 connections to the picker."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.envoy.crowd_load import BODY_BYTES, CONNECTIONS, LEFT, SLOW, Measured
from benchmarks.envoy.sides import CORE, SHORT, picker_settings, workers
from benchmarks.index.report import Table, write_section
from benchmarks.machine import CORES, description, is_compiled, python
from benchmarks.ports import free_port
from benchmarks.proxy.processes import answers, cpu_of, memory_of, started

_RATE = 400.0  # requests a second
_RELEASED_SECONDS = 30.0
_HOW = """\
`make bench-envoy-crowd` connects to `kvrouter picker` ({build}) as Envoy does, over {connections} HTTP/2 connections.
It sends {rate:.0f} requests of {size} bytes a second, placed by the default policy. Each request stays open until the
row's number of requests is in flight. Figures are milliseconds from a request's last byte to its worker's address,
over {seconds:.0f} s at that number. Picker and load have a core each.

*Rough*: {slow:.0%} of the bodies arrive in four parts within a second, {left:.0%} of the requests are reset, and each
second a connection sends GOAWAY and is replaced. *Attacked*: in addition, a peer resets calls as fast as possible, and
reconnects whenever it is closed. *Left* is the number of requests that the picker holds at the end.

Machine: {machine}; load average {before:.1f} before, {after:.1f} after."""


@dataclass(frozen=True, slots=True)
class _Scene:
    """One tested load."""

    name: str
    in_flight: int
    kind: str = "calm"
    attacked: bool = False


_SCENES = (
    _Scene("50", 50),
    _Scene("500", 500),
    _Scene("2,000", 2000),
    _Scene("2,000, rough", 2000, "rough"),
    _Scene("2,000, attacked", 2000, attacked=True),
)


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 10.0,
    only: Annotated[str, typer.Option(help="Run only rows whose name contains this text.")] = "",
    markdown: Annotated[Path | None, typer.Option(help="Write section Many at once of this file.")] = None,
) -> None:
    """Measure the time from a request to its worker, by requests in flight and their behaviour."""
    before = os.getloadavg()[0]
    table = Table("in flight")
    with tempfile.TemporaryDirectory(prefix="bench-envoy-") as name:
        for scene in (each for each in _SCENES if only in each.name):
            print(scene.name, file=sys.stderr, flush=True)
            _try(scene, seconds, Path(name), table)
    how = _HOW.format(
        build="compiled" if is_compiled() else "interpreted",
        connections=CONNECTIONS,
        rate=_RATE,
        size=BODY_BYTES,
        seconds=seconds,
        slow=SLOW,
        left=LEFT,
        machine=f"{description()}, {len(CORES)} of them used",
        before=before,
        after=os.getloadavg()[0],
    )
    text = f"{how}\n\n{table.render()}"
    print(text)
    if markdown is not None:
        write_section(markdown, "Many at once", text)


def _try(scene: _Scene, seconds: float, folder: Path, table: Table) -> None:
    with ExitStack() as stack:
        urls = stack.enter_context(workers(SHORT, folder))
        port, grpc_port = free_port(), free_port()
        config = folder / f"{port}.yaml"
        config.write_bytes(msgspec.json.encode(picker_settings(urls, port, grpc_port)))
        url = f"http://127.0.0.1:{port}"
        command = [*python(), "-m", "kvrouter", "picker", "--config", str(config)]
        pid = stack.enter_context(started(command, CORE, folder / f"{port}.log", lambda: answers(f"{url}/ready")))
        _load(grpc_port, "calm", 50, 2.0)  # warm
        if scene.attacked:
            stack.enter_context(_attack(grpc_port))
        cpu, begun = cpu_of(pid), time.monotonic()
        measured = _load(grpc_port, scene.kind, scene.in_flight, seconds)
        busy = (cpu_of(pid) - cpu) / (time.monotonic() - begun)
        table.add(scene.name, "p50, ms", measured.p50 * 1e3)
        table.add(scene.name, "p99, ms", measured.p99 * 1e3)
        table.add(scene.name, "without a worker", measured.failed)
        table.add(scene.name, "left", _left(url))
        table.add(scene.name, "picker's core, %", busy * 100)
        table.add(scene.name, "resident MB", memory_of(pid) / 2**20)


def _load(port: int, kind: str, in_flight: int, seconds: float) -> Measured:
    command = [sys.executable, "-m", "benchmarks.envoy.crowd_load", str(port), kind, str(in_flight)]
    command += [str(_RATE), str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
    return msgspec.json.decode(done.stdout, type=Measured)


@contextmanager
def _attack(port: int) -> Iterator[None]:
    attacking = subprocess.Popen([sys.executable, "-m", "benchmarks.envoy.crowd_load", str(port), "attack"])
    try:
        yield
    finally:
        attacking.kill()
        attacking.wait()


def _left(url: str) -> float:
    """Return the requests that the picker still has in flight, after it had time to notice their end."""
    deadline = time.monotonic() + _RELEASED_SECONDS
    while (left := _in_flight(url)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _in_flight(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvrouter_requests_in_flight{"))


if __name__ == "__main__":
    typer.run(main)
