"""Processes of a benchmark: start on a core, readiness, measurement with children, end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import resident_bytes

_START_SECONDS = 60.0


class StartError(Exception):
    """A process that did not start, with the end of its output."""


def answers(url: str) -> bool:
    """Return whether a URL answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextmanager
def started(command: list[str], core: int, log: Path, ready: Callable[[], bool]) -> Iterator[int]:
    """Run a command on a core until the context ends. Yield its process ID once it is ready. Raises StartError."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"{' '.join(command)}\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def cpu_of(pid: int) -> float:
    """Return the processor seconds of a process and its descendants, of live threads, as counted by the scheduler."""
    return sum(_thread_seconds(each) for each in family(pid))


def _thread_seconds(pid: int) -> float:
    counts = (task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(running) for running, *_ in counts) / 1e9


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    return sum(resident_bytes(each) for each in family(pid))
