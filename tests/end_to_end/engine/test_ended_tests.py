"""Servers end with the run of tests that started them, even if the run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from engine.processes import wait_for

STARTS_SERVER = """
    import signal, sys, time
    from pathlib import Path
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    from engine.processes import ServerProcess
    server = ServerProcess("server", Path(sys.argv[1]))
    server.start([sys.executable, "-c", {server!r}])
    time.sleep(60)
"""
# As an engine: with a process of its own.
SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_servers_end_with_the_tests(tmp_path: Path, ended_by: signal.Signals) -> None:
    log = tmp_path / "server.log"
    script = textwrap.dedent(STARTS_SERVER).format(server=SERVER)
    tests = subprocess.Popen([sys.executable, "-c", script, str(log)], cwd=Path(__file__).parents[1])
    pids: list[int] = []
    try:
        pids += wait_for(lambda: pids_in(log), 20, "the server starts")
        tests.send_signal(ended_by)
        tests.wait(10)
        wait_for(lambda: not any(map(runs, pids)), 15, "the server ends")
    finally:
        tests.kill()
        tests.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pids_in(log: Path) -> list[int]:
    """Return the process ids of the server and its child, once they are in the log."""
    words = log.read_text().split() if log.exists() else []
    return [int(word) for word in words[1:3]] if len(words) >= 3 else []


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is read
        return False
    return state != "Z"
