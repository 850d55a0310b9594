"""The processor instructions of one chat: python -m benchmarks.proxy.instructions [--against DIR].

Times depend on the machine and on its neighbours, instructions hardly do. The router runs in valgrind's callgrind,
which counts what all its threads execute in user space: nothing of the kernel. It has default settings and the model's
tokenizer, in front of two light workers. The instructions of the same seconds without chats are subtracted.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.machine import python
from benchmarks.ports import free_port
from benchmarks.proxy.prompts import MODEL, PATH, STAMP, bodies
from benchmarks.proxy.workers import whole_workers
from simulator.worker.settings import BUNDLED_MODEL

_SIZES = (1024, 65536)
_WARM_UP = 150
_CHATS = 400
_ROUNDS = 3
_SECONDS = 180.0  # until a router under callgrind answers, and until a dump is complete


class _Counted:
    """A router under callgrind."""

    def __init__(self, checkout: Path, workers: list[str], folder: Path) -> None:
        self._folder, self._dumps = folder, count(1)
        self._port = free_port()
        settings = {
            "server": {"port": self._port},
            "workers": [{"url": url} for url in workers],
            "models": {MODEL: {"tokenizer": str(BUNDLED_MODEL)}},
        }
        config = folder / "config.json"
        config.write_text(json.dumps(settings))
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        command += [*python(interpreted=False, checkout=checkout), "-m", "kvrouter", "serve", "--config", str(config)]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        self._numbers = count(int(time.time()) * 1000)

    def count(self, size: int) -> float:
        """Return the instructions of one chat of a size."""
        requests = bodies(size, stamped=True)
        connection = self._connected()
        for number in range(_WARM_UP):
            self._ask(connection, requests[number % len(requests)])
        self._control("--instr=on")
        found = []
        for _ in range(_ROUNDS):
            self._dump()
            started = time.monotonic()
            for number in range(_CHATS):
                self._ask(connection, requests[number % len(requests)])
            seconds = time.monotonic() - started
            with_chats = self._dump()
            time.sleep(seconds)
            found.append((with_chats - self._dump()) / _CHATS)
        self._control("--instr=off")
        connection.close()
        return median(found)

    def end(self) -> None:
        """End the router."""
        self._process.terminate()
        self._process.wait(60)

    def _connected(self) -> http.client.HTTPConnection:
        deadline = time.monotonic() + _SECONDS
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            try:
                connection.request("GET", "/ready")
                if (response := connection.getresponse()).read() and response.status == 200:
                    return connection
            except OSError:
                connection.close()
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError((self._folder / "log").read_text()[-2000:])
            time.sleep(0.5)

    def _ask(self, connection: http.client.HTTPConnection, body: bytes) -> None:
        body = body.replace(STAMP.encode(), b"%020d" % next(self._numbers), 1)
        connection.request("POST", PATH, body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(text.decode(errors="replace"))

    def _control(self, option: str) -> None:
        command = ["callgrind_control", option, str(self._process.pid)]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)

    def _dump(self) -> int:
        """Return the instructions since the last dump, of all threads."""
        path = self._folder / f"out.{next(self._dumps)}"
        self._control("--dump")
        deadline = time.monotonic() + _SECONDS
        while time.monotonic() < deadline:
            # The totals are the last line, so a file with them is complete.
            if path.exists() and (totals := re.search(r"^totals: (\d+)$", path.read_text(), re.MULTILINE)):
                return int(totals.group(1))
            time.sleep(0.2)
        raise RuntimeError(f"callgrind wrote no totals to {path} within {_SECONDS:.0f} s")


def main(
    against: Annotated[Path | None, typer.Option(help="Another checkout, whose build is counted beside.")] = None,
) -> None:
    """Count the instructions of a chat with a new last message."""
    checkouts = [Path(), *([against] if against is not None else [])]
    for size in _SIZES:
        counts = []
        for checkout in checkouts:
            with tempfile.TemporaryDirectory(prefix="instructions-") as name, whole_workers(Path(name)) as workers:
                router = _Counted(checkout, workers, Path(name))
                try:
                    counts.append(router.count(size))
                finally:
                    router.end()
        beside = f", other checkout {counts[1]:,.0f}, ratio {counts[0] / counts[1]:.2f}" if len(counts) > 1 else ""
        print(f"chat of {size // 1024} KB, new last message: {counts[0]:,.0f} instructions{beside}", flush=True)


if __name__ == "__main__":
    typer.run(main)
