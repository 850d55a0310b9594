"""The machine and the build that are measured: cores, processor time, memory, compiled or interpreted."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CORES = sorted(os.sched_getaffinity(0))
LOAD_CORE = CORES[0]
INDEXER_CORE = CORES[-1]
_TICKS = os.sysconf("SC_CLK_TCK")
# What a page says where `awake` was heeded.
AWAKE = """
Meanwhile no core sleeps (`/dev/cpu_dma_latency`): waking one costs whoever sends to it, on a virtual machine as much as
a request may cost, and how often there is one to wake depends on what else there is to do."""


def pin(*cores: int) -> None:
    """Keep this process, and the threads and processes it will start, on these cores."""
    os.sched_setaffinity(0, cores)


@contextmanager
def awake() -> Iterator[bool]:
    """Let no core sleep, where that is allowed. Whether it is."""
    try:
        asked = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(asked, bytes(4))  # at most so many microseconds to wake, for as long as it is open
        yield True
    finally:
        os.close(asked)


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor seconds of a process by its threads' names, as the scheduler counts them."""
    seconds: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        seconds[name] = seconds.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def resident_bytes(pid: int) -> int:
    """A process's resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def description() -> str:
    """Processor, cores and Python, in a phrase."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{models[0] if models else platform.machine()}, {len(CORES)} cores, Python {platform.python_version()}"


_COMPILED = Path(".compiled/bin/python").absolute()


def is_compiled() -> bool:
    """Whether `make compiled` has been there."""
    return _COMPILED.exists() and (_COMPILED.parent.parent / "installed").exists()


def python(*, interpreted: bool = False) -> list[str]:
    """The command that runs ours: compiled, where it is; `interpreted`: as Python runs it all the same."""
    if interpreted or not is_compiled():
        return [sys.executable]
    return [str(_COMPILED), "-P"]  # with -P the compiled one is imported, not what lies in this directory
