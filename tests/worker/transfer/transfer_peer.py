"""Another process with a transfer engine: the handle tests have of it, and, run as a script, the process.

Each line of JSON on its input is a call, each line of its output the answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from worker.kv_transfer.transfer import (
    GrantKey,
    Ranges,
    Region,
    Session,
    TransferError,
    Writes,
    open_engine,
)


class Peer:
    """The process of the peer."""

    def __init__(self, engine: str, size: int, seed: int | None, secret: str | None = None) -> None:
        self.engine = open_engine(engine, secret=secret.encode() if secret else None)
        self.arena = self.engine.allocate(size)
        if seed is not None:
            self.arena[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.engine.register([Region.of(self.arena)])
        self.sessions: list[Session] = []
        self.stream: threading.Thread | None = None
        self.stream_error = ""

    def where(self) -> dict[str, Any]:
        return {"address": self.engine.address().decode(), "pointer": self.arena.ctypes.data, "pid": os.getpid()}

    def grant(self, room: int, generation: int, pointers: list[int], lengths: list[int]) -> None:
        self.engine.grant(GrantKey(room, generation), Ranges(np.array(pointers, "u8"), np.array(lengths, "u8")))

    def revoke(self, room: int, generation: int) -> str:
        return self.engine.revoke(GrantKey(room, generation), time.monotonic() + 60).value

    def connect(self, address: str) -> int:
        self.sessions.append(self.engine.connect(address.encode(), time.monotonic() + 60))
        return len(self.sessions) - 1

    def write(self, session: int, key: list[int], writes: list[list[int]], seconds: float = 10.0) -> str:
        """Sources are offsets into the arena. The error's name and text, or nothing."""
        try:
            self.sessions[session].write(GrantKey(*key), self._writes(writes), time.monotonic() + seconds)
        except TransferError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def start_stream(self, session: int, key: list[int], writes: list[list[int]]) -> None:
        """Write the same again and again, until it fails."""

        def stream() -> None:
            while not self.stream_error:
                self.stream_error = self.write(session, key, writes, 60.0)

        self.stream_error = ""
        self.stream = threading.Thread(target=stream)
        self.stream.start()

    def end_of_stream(self) -> str:
        """The reason of a failure, once it failed."""
        assert self.stream is not None
        self.stream.join()
        return self.stream_error

    def checksum(self, offset: int, length: int) -> str:
        return hashlib.blake2b(self.arena[offset : offset + length]).hexdigest()

    def threads(self) -> int:
        return threading.active_count()

    def _writes(self, writes: list[list[int]]) -> Writes:
        sources, destinations, lengths = (np.array(column, "u8") for column in writes)
        return Writes(sources + np.uint64(self.arena.ctypes.data), destinations, lengths)


class PeerProcess:
    """`peer.method(…)` calls the method of that name over there; `later` leaves its answer for `answer`."""

    def __init__(self, engine: str, size: int, seed: int | None = None, secret: str | None = None) -> None:
        arguments = json.dumps({"engine": engine, "size": size, "seed": seed, "secret": secret})
        self.process = subprocess.Popen(
            [sys.executable, __file__, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NIXL_LOG_LEVEL": "ERROR"},
        )
        self.where: dict[str, Any] = self("where")

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.later(name, *arguments)
        return self.answer()

    def later(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer's process has ended"
        return json.loads(line)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """The end of its input ends it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Fails the test when the condition does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    peer = Peer(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(peer, name)(*arguments)), file=answers, flush=True)
    peer.engine.close()
    os._exit(0)  # NIXL may crash a process that exits


if __name__ == "__main__":
    main()
