"""The processes of a side. `python -m benchmarks.transfer.process NAME` sends, and starts the receiving process.

Both answer lines of JSON with lines of JSON. Together they are one process group, which `run` stops during another
side's turn, because some libraries poll permanently.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import IO, Any

from benchmarks.transfer.sides import (
    MEMCPY,
    RAW_SOCKET,
    EngineReceiver,
    EngineSender,
    Memcpy,
    RawReceiver,
    RawSender,
    Receiver,
    Sender,
    batch,
    checksum,
)

_QUIET = {"NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3"}


class ReceivingProcess:
    """The receiving process of this sender."""

    def __init__(self, name: str) -> None:
        self._process = _start(name, "receive")
        self.where = _ask(self._process)

    def empty(self) -> None:
        """Fill the arena with zeros."""
        _ask(self._process, {"do": "empty"})

    def checksum(self, size: int) -> str:
        """Return the checksum of a batch's blocks at their destinations."""
        return str(_ask(self._process, {"do": "checksum", "size": size}))


class SidesProcess:
    """The processes of a side, as `run` uses them. Raises ImportError if its library cannot be imported."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = _start(name, "send")
        problem = _ask(self._process)
        if problem:
            raise ImportError(problem)
        self.rest()

    def verify(self, size: int) -> None:
        """Check that a batch lands as it was sent. Raises RuntimeError."""
        self._in_turn({"do": "verify", "size": size})

    def times(self, size: int, blocks: int | None, repeats: int) -> list[float]:
        """Return the seconds of each batch, or of its first blocks."""
        return list(self._in_turn({"do": "time", "size": size, "blocks": blocks, "repeats": repeats}))

    def rest(self) -> None:
        """Stop both processes until the next turn."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def end(self) -> None:
        """End both processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _in_turn(self, request: dict[str, Any]) -> Any:
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            return _ask(self._process, request)
        finally:
            self.rest()


def _start(name: str, role: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.transfer.process", name, role]
    pipe = subprocess.PIPE
    own_group = 0 if role == "send" else None
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, process_group=own_group, env={**os.environ, **_QUIET}
    )


def _ask(process: subprocess.Popen[str], request: dict[str, Any] | None = None) -> Any:
    """Send a request, and return its answer. Without a request, return the process's report of readiness."""
    assert process.stdin is not None
    assert process.stdout is not None
    if request is not None:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended: {process.args!r}")
    answer = json.loads(line)
    if isinstance(answer, dict) and "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def _receive(name: str, answers: IO[str]) -> None:
    receiver: Receiver = RawReceiver() if name == RAW_SOCKET else EngineReceiver(name)
    print(json.dumps(receiver.where()), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = None
        if request["do"] == "empty":
            receiver.arena[:] = 0
        else:
            answer = checksum(receiver.arena, batch(request["size"]).destinations, request["size"])
        print(json.dumps(answer), file=answers, flush=True)


def _send(name: str, answers: IO[str]) -> None:
    receiver: ReceivingProcess | None = None
    sender: Sender
    try:
        if name == MEMCPY:
            sender = Memcpy()
        else:
            receiver = ReceivingProcess(name)
            sender = RawSender(receiver.where) if name == RAW_SOCKET else EngineSender(name, receiver.where)
    except (ImportError, RuntimeError) as error:
        print(json.dumps(str(error)), file=answers, flush=True)
        return
    print(json.dumps(None), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "time":
            answer: Any = _times(sender, request["size"], request["blocks"], request["repeats"])
        else:
            answer = _verified(sender, receiver, request["size"])
        print(json.dumps(answer), file=answers, flush=True)


def _times(sender: Sender, size: int, blocks: int | None, repeats: int) -> list[float]:
    work = batch(size, blocks)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        sender.send(work)
        times.append(time.perf_counter() - start)
    return times


def _verified(sender: Sender, receiver: ReceivingProcess | None, size: int) -> dict[str, str] | None:
    work = batch(size)
    if receiver is None:
        return None
    receiver.empty()
    sender.send(work)
    landed = receiver.checksum(size) == checksum(sender.arena, work.sources, size)
    return None if landed else {"error": f"blocks of {size} bytes did not land as they were sent"}


def main() -> None:
    name, role = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    (_send if role == "send" else _receive)(name, answers)
    answers.flush()
    os._exit(0)  # NIXL may crash an exiting process


if __name__ == "__main__":
    main()
