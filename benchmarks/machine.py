"""The machine and the build that are measured: cores, processor time, memory, compiled or interpreted."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CORES = sorted(os.sched_getaffinity(0))
LOAD_CORE = CORES[0]
INDEXER_CORE = CORES[-1]
_TICKS = os.sysconf("SC_CLK_TCK")
# The note of a page whose run kept the cores awake.
AWAKE = """
During the run no core sleeps (`/dev/cpu_dma_latency`). Waking a core delays the sender, on a virtual machine by as much
as a request needs, and the number of wake-ups depends on other work."""


def pin(*cores: int) -> None:
    """Bind this process, its threads and its future child processes to these cores."""
    os.sched_setaffinity(0, cores)


@contextmanager
def awake() -> Iterator[bool]:
    """Keep all cores awake, if permitted. Yield whether it is."""
    try:
        asked = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(asked, bytes(4))  # maximal wake-up latency in microseconds, while the file is open
        yield True
    finally:
        os.close(asked)


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def thread_seconds(pid: int) -> dict[str, float]:
    """Return processor seconds of a process by its threads' names, as counted by the scheduler."""
    seconds: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        seconds[name] = seconds.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def description() -> str:
    """Return a phrase with processor, cores, Python, and whether Python was built with profile-guided optimization."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    optimized = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    build = f"Python {platform.python_version()} built {'with' if optimized else 'without'} PGO"
    return f"{models[0] if models else platform.machine()}, {len(CORES)} cores, {build}"


def is_compiled(checkout: Path = Path()) -> bool:
    """Return whether `make compiled` has built the router of a checkout."""
    return (checkout / ".compiled/bin/python").exists() and (checkout / ".compiled/installed").exists()


def python(*, interpreted: bool = False, checkout: Path = Path()) -> list[str]:
    """Return the command for the code of a checkout, by default this one: compiled if built, unless `interpreted`."""
    if not interpreted and is_compiled(checkout):
        # -P: import the compiled package, not this directory
        return [str(checkout.absolute() / ".compiled/bin/python"), "-P"]
    return [sys.executable] if checkout == Path() else [str(checkout.absolute() / ".venv/bin/python"), "-P"]
