"""Fast starts of the `kvrouter` command and of workers: a server that has imported its modules forks each process.

An import of all modules takes more than a second of processor time, and the tests start the command about 150 times.
A forked process is a child of the test's process and runs the same command; only the start of Python is skipped.
`ForkedPopen` replaces `subprocess.Popen`, and forks the commands of `PROGRAMS` on Linux. It starts all else as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULES = (
    "kvrouter.cli",
    "router.app.app",
    "router.server.serving",
    "router.server.supervisor",
    "router.tokens.local_tokenizer",
    "simulator.worker.serve",
    "tokenizers",
    "fastokens",
)
# Modules and scripts that the server runs.
PROGRAMS = ("kvrouter", "simulator.worker", str(Path(__file__).parent / "end_to_end" / "faulty_worker.py"))
_MAX_REQUEST = 200_000  # bytes
_SET_CHILD_SUBREAPER = 36  # of prctl


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A `subprocess.Popen` that forks the command from the server if it can."""

    # Tests of the interpreter's own start switch this off.
    enabled = sys.platform == "linux"

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        program = _program(args) if self.enabled and cwd is None and not pass_fds else None
        environment = dict(os.environ if env is None else env)
        if program is None or _interpreter(environment) != _Server.running().interpreter:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)  # type: ignore[misc]
            return
        pipes = more[3:9]
        inherited = [pipe if pipe != -1 else number for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            self.pid = _Server.running().fork(program, environment, inherited)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _program(args: Any) -> list[str] | None:
    """Return the program and the arguments of a command that the server forks, None for another command."""
    if not isinstance(args, list | tuple) or not args or args[0] != sys.executable:
        return None
    program = [str(each) for each in args[1:] if each not in ("-P", "-m")]
    return program if program and program[0] in PROGRAMS else None


def _interpreter(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that Python or a module reads once, when it starts."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("PYTHON", "LD_")) or name == "KVROUTER_INDEX_CORE"
    }


class _Server:
    """The test process's end of the server."""

    _only: _Server | None = None

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-P", __file__, str(other.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()], stdout=subprocess.DEVNULL)
        self._socket.settimeout(60)
        self.interpreter = _interpreter(dict(os.environ))
        atexit.register(self._end)

    @classmethod
    def running(cls) -> _Server:
        """Return the only server, which the first call starts."""
        if cls._only is None:
            cls._only = cls()
        return cls._only

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, program: Sequence[str], environment: dict[str, str], files: Sequence[int]) -> int:
        """Start a process with these standard files as a child of this process, and return its ID."""
        request = json.dumps([list(program), environment, os.getcwd()]).encode()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the process whose parent ends becomes a child of this one
        try:
            socket.send_fds(self._socket, [request], list(files))
            return int(self._socket.recv(64))
        finally:
            libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _requested(server: socket.socket) -> list[str]:
    """Fork a process for each request, and return its program in the forked process. Exit when the tests end."""
    while True:
        data, files, _, _ = socket.recv_fds(server, _MAX_REQUEST, 3)
        if not data:
            os._exit(0)
        program, environment, folder = json.loads(data)
        reads, writes = os.pipe()
        parent = os.fork()
        if parent == 0:
            pid = os.fork()
            if pid != 0:
                os.write(writes, str(pid).encode())
                os._exit(0)
            server.close()
            os.close(reads)
            os.close(writes)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            return list(program)
        os.waitpid(parent, 0)  # after this, the process is a child of the test's process
        server.send(os.read(reads, 64))
        for file in (*files, reads, writes):
            os.close(file)


def main() -> None:
    """Import the modules, fork, and run the command in the forked process."""
    server = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, which is for the tests
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    program, *arguments = _requested(server)
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
