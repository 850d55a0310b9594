"""`kvrouter serve --processes N`: processes that share a port, started again when they die, ended together.

The kernel spreads connections over them (SO_REUSEPORT): of one socket that all accept from, the process that is
quickest would take most of a burst.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import structlog
import uvloop

from router.fleet.kubernetes import KubernetesError
from router.server.http_server import SignalWaiter
from router.server.logs import announce_page, announce_start, log_to_stderr, say
from router.server.serving import serve_worker_process
from router.server.sockets import bind, url_of
from router.settings import Settings, SettingsFile
from router.sharing.worker_processes import WorkerProcesses
from router.tokens import TokenizerUnavailableError

log = structlog.get_logger()

_SHORT_LIFE = 10.0  # seconds; what dies sooner is started again more and more slowly
_LONGEST_BACKOFF = 10.0
# Beyond the time that requests in flight have.
_MARGIN = 5.0

_spawn = get_context("spawn")


class ProcessFailedError(Exception):
    """A process that could not be started. It has printed the reason."""


@dataclass(slots=True)
class _Running:
    process: BaseProcess
    ready: Connection
    began: float


class Supervisor:
    """Keeps `processes` processes running until a signal is received."""

    def __init__(self, settings: Settings, file: SettingsFile | None, processes: int, log_level: str) -> None:
        self._settings = settings
        self._file = file
        self._processes = processes
        self._log_level = log_level
        self._running: dict[int, _Running] = {}
        self._restart_at: dict[int, float] = {}
        self._backoff: dict[int, float] = {}

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM. Raises OSError for the address, ProcessFailedError when none starts."""
        server = self._settings.server
        with ExitStack() as stack:
            bind(server.host, server.port).close()  # fails where others share the port already
            address = stack.enter_context(closing(bind(server.host, server.port, shared=True)))  # it keeps the port
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-")))
            host, port = address.getsockname()[:2]
            signals = stack.enter_context(SignalWaiter())
            stack.callback(self._kill)
            announce_start(self._settings, "kvrouter")
            for number in range(self._processes):
                self._start(WorkerProcesses(folder, number, self._processes), port)
            if self._wait_until_ready(signals):
                url = url_of(host, port, server.certificate is not None)
                say(f"kvrouter listens on {url} with {self._processes} processes")
                announce_page(self._settings.policy.name, url)
                self._supervise(folder, port, signals)
            self._stop(signals)

    def _start(self, worker_processes: WorkerProcesses, port: int) -> None:
        ready, serves = _spawn.Pipe(duplex=False)
        process = _spawn.Process(
            target=_run_process,
            args=(self._settings, self._file, worker_processes, port, self._log_level, serves),
            name=f"kvrouter-{worker_processes.number}",
        )
        process.start()
        serves.close()
        self._running[worker_processes.number] = _Running(process, ready, time.monotonic())

    def _wait_until_ready(self, signals: SignalWaiter) -> bool:
        """Return True once all serve, False after a signal. Raises ProcessFailedError if a process ends."""
        waiting = {running.ready: running for running in self._running.values()}
        while waiting:
            woken = connection.wait([*waiting, signals.readable])
            if signals.readable in woken:
                return False
            for each in [ready for ready in waiting if ready in woken]:
                running = waiting.pop(each)
                try:
                    running.ready.recv()
                except EOFError:
                    raise ProcessFailedError(f"process {running.process.name} did not start") from None
        return True

    def _supervise(self, folder: Path, port: int, signals: SignalWaiter) -> None:
        while not signals.last:
            sentinels = {running.process.sentinel: number for number, running in self._running.items()}
            now = time.monotonic()
            wait = min((at - now for at in self._restart_at.values()), default=None)
            woken = connection.wait([*sentinels, signals.readable], None if wait is None else max(wait, 0))
            for sentinel in [each for each in sentinels if each in woken]:
                self._ended(sentinels[sentinel])
            for number in [n for n, at in self._restart_at.items() if at <= time.monotonic()]:
                del self._restart_at[number]
                self._start(WorkerProcesses(folder, number, self._processes, again=True), port)

    def _ended(self, number: int) -> None:
        """Schedule the restart of a process that ended: soon at first, later if it ends repeatedly."""
        running = self._running.pop(number)
        running.process.join()
        lived = time.monotonic() - running.began
        backoff = min(2 * self._backoff.get(number, 0.25), _LONGEST_BACKOFF) if lived < _SHORT_LIFE else 0.0
        self._backoff[number] = backoff
        self._restart_at[number] = time.monotonic() + backoff
        log.error("process ended", process=number, code=running.process.exitcode, again_in=backoff)
        running.ready.close()

    def _stop(self, signals: SignalWaiter) -> None:
        """Let all finish what they have. A second signal ends that."""
        number = signals.last or signal.SIGTERM
        for running in self._running.values():
            if running.process.pid is not None and running.process.is_alive():
                os.kill(running.process.pid, number)
        server = self._settings.server
        drain = server.drain_seconds if number == signal.SIGTERM else 0.0
        deadline = time.monotonic() + drain + server.shutdown_timeout + _MARGIN
        signals.forget()
        while alive := [r.process.sentinel for r in self._running.values() if r.process.is_alive()]:
            if signals.last or time.monotonic() > deadline:
                return
            connection.wait([*alive, signals.readable], max(deadline - time.monotonic(), 0))

    def _kill(self) -> None:
        for running in self._running.values():
            running.process.kill()
            running.process.join()
            running.ready.close()


def _run_process(
    settings: Settings,
    file: SettingsFile | None,
    worker_processes: WorkerProcesses,
    port: int,
    log_level: str,
    serves: Connection,
) -> None:
    """Run one of the processes. It sends a message to `serves` once it serves."""
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which passes it on
    log_to_stderr(log_level)
    structlog.contextvars.bind_contextvars(process=worker_processes.number)
    parent = parent_process()
    assert parent is not None

    def ready() -> None:
        serves.send(True)
        serves.close()

    try:
        uvloop.run(serve_worker_process(settings, file, worker_processes, port, ready, parent.sentinel))
    except KeyboardInterrupt:
        return  # interrupted before it served
    except (OSError, TokenizerUnavailableError, KubernetesError) as error:
        print(f"kvrouter: {error}", file=sys.stderr)
        raise SystemExit(1) from error
