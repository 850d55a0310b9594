"""`kvrouter serve --processes N`: processes that share a port, started again when they die, ended together.

The kernel spreads connections over them (SO_REUSEPORT): of one socket that all accept from, the process that is
quickest would take most of a burst.
"""

from __future__ import annotations

import os
import signal
import socket
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

from router.errors import KubernetesError, TokenizerUnavailableError
from router.fleet.config_reload import SettingsFile
from router.server.logs import log_to_stderr
from router.server.serving import bind, serve_worker_process, url_of
from router.settings import Settings
from router.sharing.worker_processes import WorkerProcesses

log = structlog.get_logger()

_SHORT_LIFE = 10.0  # seconds; what dies sooner is started again more and more slowly
_LONGEST_BACKOFF = 10.0
# Beyond the time that requests in flight have.
_MARGIN = 5.0

_spawn = get_context("spawn")


class ProcessFailedError(Exception):
    """A process could not be started. It has said why."""


@dataclass(slots=True)
class _Running:
    process: BaseProcess
    ready: Connection
    began: float


class Supervisor:
    """Keeps `processes` processes running until it is told to stop."""

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
            place = stack.enter_context(closing(bind(server.host, server.port, shared=True)))  # it keeps the port
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrouter-")))
            host, port = place.getsockname()[:2]
            signals = stack.enter_context(_Signals())
            stack.callback(self._kill)
            for number in range(self._processes):
                self._start(WorkerProcesses(folder, number, self._processes), port)
            if self._wait_until_ready(signals):
                url = url_of(host, port, server.certificate is not None)
                print(f"kvrouter listens on {url} with {self._processes} processes", file=sys.stderr, flush=True)
                self._supervise(folder, port, signals)
            self._stop(signals)

    def _start(self, worker_processes: WorkerProcesses, port: int) -> None:
        ready, tell = _spawn.Pipe(duplex=False)
        process = _spawn.Process(
            target=_run_process,
            args=(self._settings, self._file, worker_processes, port, self._log_level, tell),
            name=f"kvrouter-{worker_processes.number}",
        )
        process.start()
        tell.close()
        self._running[worker_processes.number] = _Running(process, ready, time.monotonic())

    def _wait_until_ready(self, signals: _Signals) -> bool:
        """Whether all serve; False when told to stop. Raises ProcessFailedError when one ends instead."""
        waiting = {running.ready: running for running in self._running.values()}
        while waiting:
            said = connection.wait([*waiting, signals.readable])
            if signals.readable in said:
                return False
            for each in [ready for ready in waiting if ready in said]:
                running = waiting.pop(each)
                try:
                    running.ready.recv()
                except EOFError:
                    raise ProcessFailedError(f"process {running.process.name} did not start") from None
        return True

    def _supervise(self, folder: Path, port: int, signals: _Signals) -> None:
        while not signals.came:
            sentinels = {running.process.sentinel: number for number, running in self._running.items()}
            now = time.monotonic()
            wait = min((at - now for at in self._restart_at.values()), default=None)
            said = connection.wait([*sentinels, signals.readable], None if wait is None else max(wait, 0))
            for sentinel in [each for each in sentinels if each in said]:
                self._ended(sentinels[sentinel])
            for number in [n for n, at in self._restart_at.items() if at <= time.monotonic()]:
                del self._restart_at[number]
                self._start(WorkerProcesses(folder, number, self._processes, again=True), port)

    def _ended(self, number: int) -> None:
        """A process died: another will take its place, soon unless it dies again and again."""
        running = self._running.pop(number)
        running.process.join()
        lived = time.monotonic() - running.began
        backoff = min(2 * self._backoff.get(number, 0.25), _LONGEST_BACKOFF) if lived < _SHORT_LIFE else 0.0
        self._backoff[number] = backoff
        self._restart_at[number] = time.monotonic() + backoff
        log.error("process ended", process=number, code=running.process.exitcode, again_in=backoff)
        running.ready.close()

    def _stop(self, signals: _Signals) -> None:
        """Let all finish what they have. A second signal ends that."""
        number = signals.came or signal.SIGTERM
        for running in self._running.values():
            if running.process.pid is not None and running.process.is_alive():
                os.kill(running.process.pid, number)
        server = self._settings.server
        drain = server.drain_seconds if number == signal.SIGTERM else 0.0
        deadline = time.monotonic() + drain + server.shutdown_timeout + _MARGIN
        signals.forget()
        while alive := [r.process.sentinel for r in self._running.values() if r.process.is_alive()]:
            if signals.came or time.monotonic() > deadline:
                return
            connection.wait([*alive, signals.readable], max(deadline - time.monotonic(), 0))

    def _kill(self) -> None:
        for running in self._running.values():
            running.process.kill()
            running.process.join()
            running.ready.close()


class _Signals:
    """SIGINT and SIGTERM, as something to wait for beside others. `came`: the last one."""

    def __init__(self) -> None:
        self.came: int | None = None
        self.readable, self._writable = socket.socketpair()

    def __enter__(self) -> _Signals:
        for each in (self.readable, self._writable):
            each.setblocking(False)
        self._before = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self.readable.close()
        self._writable.close()

    def forget(self) -> None:
        """Wait for the next one."""
        self.came = None
        while True:
            try:
                self.readable.recv(64)
            except BlockingIOError:
                return

    def _note(self, number: int, _: object) -> None:
        self.came = number
        self._writable.send(b"!")


def _run_process(
    settings: Settings,
    file: SettingsFile | None,
    worker_processes: WorkerProcesses,
    port: int,
    log_level: str,
    ready: Connection,
) -> None:
    """What one of the processes does."""
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which passes it on
    log_to_stderr(log_level)
    structlog.contextvars.bind_contextvars(process=worker_processes.number)
    parent = parent_process()
    assert parent is not None

    def serving() -> None:
        ready.send(True)
        ready.close()

    try:
        uvloop.run(serve_worker_process(settings, file, worker_processes, port, serving, parent.sentinel))
    except KeyboardInterrupt:
        return  # told to stop before it served
    except (OSError, TokenizerUnavailableError, KubernetesError) as error:
        print(f"kvrouter: {error}", file=sys.stderr)
        raise SystemExit(1) from error
