"""Processes: `kvrouter` subcommands as child processes, and a stop signal for this one."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT = 60.0  # seconds; importing everything from a cold disk can be slow
STOP_TIMEOUT = 10.0

_READY = re.compile(r'(?:listens on|ready at) (https?://[^\s"]+)')


class ProcessError(Exception):
    """A process that did not start. The message has the end of its output."""


class KvrouterProcess(AbstractContextManager["KvrouterProcess"]):
    """A `kvrouter` subcommand in a child process, which prints its URL when it listens."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._name = arguments[0]
        number, path = tempfile.mkstemp(prefix=f"kvrouter-{self._name}-", suffix=".log")
        self._log = Path(path)
        command = [sys.executable, "-P", "-m", "kvrouter", *arguments]  # -P: ignore modules in the working directory
        with open(number, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait_until_listening(self) -> str:
        """Return the URL once the process has printed it. Raises ProcessError if it ends, or after the deadline."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if ready := _READY.search(self.output()):
                return ready.group(1)
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise ProcessError(f"kvrouter {self._name} did not start:\n{self.output()[-2000:]}")

    @property
    def pid(self) -> int:
        """The ID of the process."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, for example SIGKILL."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Return the exit status once the process ended. Raises subprocess.TimeoutExpired."""
        return self._process.wait(seconds)

    def output(self) -> str:
        """Return what the process has printed."""
        return self._log.read_text(errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signal() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets, in the running loop. A second signal acts as usual."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def leave() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def stop() -> None:
        stopped.set()
        leave()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        leave()
