"""The light worker of benchmarks.proxy, with streams of another length.

python -m benchmarks.envoy.worker EVENTS CORE PORT…
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from benchmarks.index.machine import LOAD_CORE
from benchmarks.ports import free_port
from benchmarks.proxy import raw_worker
from benchmarks.proxy.processes import answers, started
from benchmarks.proxy.workers import WORKERS

SHORT, LONG = 4, 256  # events of a stream


@contextmanager
def workers(events: int, folder: Path) -> Iterator[list[str]]:
    """Workers whose streams have so many events; their URLs."""
    ports = [free_port() for _ in range(WORKERS)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "benchmarks.envoy.worker", str(events), str(LOAD_CORE), *map(str, ports)]
    log = folder / f"worker-{events}.log"
    with started(command, LOAD_CORE, log, lambda: all(answers(f"{url}/health") for url in urls)):
        yield urls


async def _serve(events: int, ports: list[int]) -> None:
    raw_worker.CHUNKS = events
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(raw_worker._Worker, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[2])})
    uvloop.run(_serve(int(sys.argv[1]), [int(port) for port in sys.argv[3:]]))
