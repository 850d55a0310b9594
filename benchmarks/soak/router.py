"""`kvrouter serve` in this process with a report of its objects: python -m benchmarks.soak.router CONFIG FILE.

At SIGUSR1 the file receives one more line of JSON: the number of objects of each kind, tasks, connections, and
bytes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import uvloop

from benchmarks.machine import resident_bytes
from router.forwarding.proxied_request import ProxiedRequest
from router.load.target_load import ReservedLoad
from router.routing.assignment import Assignment
from router.server.http_connection import HttpConnection
from router.server.logs import log_to_stderr
from router.server.serving import serve_router
from router.settings import load_settings
from router.upstream.connection import UpstreamConnection
from router.upstream.request import UpstreamRequest

_COUNTED = {
    "clients": HttpConnection,
    "exchanges": ProxiedRequest,
    "placements": Assignment,
    "reservations": ReservedLoad,
    "upstream legs": UpstreamRequest,
    "upstream connections": UpstreamConnection,
}


def _holds() -> dict[str, int]:
    gc.collect()
    kinds = Counter(type(each) for each in gc.get_objects())
    counted = {name: kinds[kind] for name, kind in _COUNTED.items()}
    files = os.listdir("/proc/self/fd")
    open_now = {"sockets": sum(_is_socket(name) for name in files), "files": len(files)}
    return counted | {"tasks": len(asyncio.all_tasks())} | open_now | {"bytes": resident_bytes(os.getpid())}


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False


async def _serve(config: Path, reports: Path) -> None:
    def tell() -> None:
        with reports.open("a") as file:
            file.write(json.dumps(_holds()) + "\n")

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    await serve_router(load_settings(config))


if __name__ == "__main__":
    log_to_stderr("error")
    uvloop.run(_serve(Path(sys.argv[1]), Path(sys.argv[2])))
