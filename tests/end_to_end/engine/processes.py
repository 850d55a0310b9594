"""Servers in processes of their own: started with a log file, stopped with everything they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from engine.web import answers

T = TypeVar("T")

STOP_SECONDS = 20.0
START_SILENCE = 240.0  # seconds without a line of the log, after which a start has failed
_BOUND = Path(__file__).with_name("bound_to_parent.py")


def wait_for(find: Callable[[], T | None], seconds: float, what: str) -> T:
    """Call `find` until its result is true, and return the result. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)
    return found


class ServerProcess:
    """A command that runs until it is stopped or this process ends, in a process group of its own."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        """Start the command and append its output to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_BOUND), *command],
                stdin=subprocess.PIPE,  # which ends with this process
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def keep_to(self, core: int) -> None:
        """Let it, just started, and whatever it will start run on one core alone."""
        assert self._process is not None
        os.sched_setaffinity(self._process.pid, {core})

    def wait_for(self, find: Callable[[], T | None], seconds: float, what: str) -> T:
        """Like the function of this name, but fails at once, and with the log, when the process ends."""

        def look() -> T | None:
            if not self.running:
                raise ChildProcessError(f"{self.name} ended before: {what}\n{self.log_end()}")
            return find()

        try:
            return wait_for(look, seconds, f"{self.name}: {what}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log_end()}") from None

    def wait_until_healthy(self, url: str) -> None:
        """Wait until a started engine answers. Its start fails if its log does not grow, or after an hour.

        Importing an engine costs a minute of processor time, and several minutes on a machine with other work.
        """
        for _ in range(round(3600 / START_SILENCE)):
            written = self.log.stat().st_size
            try:
                self.wait_for(lambda: answers(f"{url}/health"), START_SILENCE, "answers /health")
                return
            except TimeoutError:
                if self.log.stat().st_size == written:
                    raise
        raise TimeoutError(f"{self.name}: did not start within an hour\n{self.log_end()}")

    def stop(self) -> None:
        """Ask it to end, then insist."""
        self._signal(signal.SIGTERM)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP to the whole group."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT to the whole group."""
        self._signal(signal.SIGCONT)

    def log_end(self) -> str:
        """The last lines of the log, and where it is."""
        lines = self.log.read_text(errors="replace").splitlines()[-30:]
        return "\n".join([f"--- end of {self.log}", *lines])

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
