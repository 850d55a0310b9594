"""The indexers that are compared, each as a process with a client."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from benchmarks.index import timed
from benchmarks.index.workload import BLOCK_SIZE
from benchmarks.machine import cpu_seconds, pin, python, resident_bytes, thread_seconds
from benchmarks.ports import free_port
from indexer.native import CORE_VARIABLE


class HttpError(Exception):
    """An answer that is not 2xx."""


def post_request(path: str, body: Any) -> bytes:
    """Return a whole POST request with a JSON body, to be sent repeatedly."""
    content = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


# Servers close connections that are idle for longer.
_IDLE_SECONDS = 2.0


class Client:
    """A client that sends whole requests and reads whole answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._used = time.monotonic()

    def exchange(self, request: bytes) -> bytes:
        """Send a request, and return the body of its answer. Raises HttpError."""
        now = time.monotonic()
        if now - self._used > _IDLE_SECONDS:
            self._socket.close()
            self._connect()
        self._used = now
        self._socket.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._receive()
        head = data[:end].lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        while len(data) < end + 4 + length:
            data += self._receive()
        body = data[end + 4 :]
        if not head.startswith(b"http/1.1 2"):
            raise HttpError(f"{head[:80].decode()}: {body[:300].decode(errors='replace')}")
        return body

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the indexer closed the connection")
        return data


MODEL = "model"


class _Instance(msgspec.Struct):
    """The fields of a worker in our answer."""

    longest_matched: int


class _Scores(msgspec.Struct):
    """The fields of Dynamo's answer: matched tokens by worker and rank."""

    scores: dict[str, dict[str, int]]


_instances = msgspec.json.Decoder(dict[str, dict[str, _Instance]]).decode  # by tenant and worker
_scores = msgspec.json.Decoder(_Scores).decode


class Side(ABC):
    """An indexer: its command line, and the API that both have."""

    name: str
    environment: Mapping[str, str] = MappingProxyType({})

    def reader_seconds(self) -> tuple[float, float]:
        """Return the processor seconds of the streams' reader, and those without Python's lock, if reported."""
        return 0.0, 0.0

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Return the command that starts the indexer."""

    @abstractmethod
    def registration(self, worker: int, endpoint: str) -> dict[str, Any]:
        """Return the body of `POST /register` for a worker's stream."""

    @abstractmethod
    def query(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the body of `POST /query`."""

    @abstractmethod
    def matched(self, answer: bytes) -> dict[int, int]:
        """Return the matched tokens of an answer by worker, without workers that hold nothing."""


class Kvrouter(Side):
    """Our indexer with one of its cores: the native one as built for use, or the reference, interpreted."""

    def __init__(self, core: str) -> None:
        self.name = "kvrouter" if core == "native" else "in Python"
        self.environment = {CORE_VARIABLE: core}
        self._python = python(interpreted=core != "native")

    def command(self, port: int) -> list[str]:
        return [*self._python, "-m", "kvrouter", "indexer", "--port", str(port)]

    def registration(self, worker: int, endpoint: str) -> dict[str, Any]:
        return {
            "instance_id": str(worker),
            "endpoint": endpoint,
            "modelname": MODEL,
            "type": "vLLM",
            "block_size": BLOCK_SIZE,
        }

    def query(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"model": MODEL, "token_ids": tokens}

    def matched(self, answer: bytes) -> dict[int, int]:
        (instances,) = _instances(answer).values()
        return {int(worker): held.longest_matched for worker, held in instances.items() if held.longest_matched}


class Timed(Kvrouter):
    """Our indexer with the native core, which reports the time of its reader in a file."""

    def __init__(self, file: Path) -> None:
        super().__init__("native")
        self._file = file

    def command(self, port: int) -> list[str]:
        return [*self._python, "-m", "benchmarks.index.timed", str(self._file), "indexer", "--port", str(port)]

    def reader_seconds(self) -> tuple[float, float]:
        return timed.seconds(self._file)


class Dynamo(Side):
    """The standalone indexer of NVIDIA Dynamo, from its own environment."""

    name = "Dynamo"

    def __init__(self, python: Path) -> None:
        self._python = python

    def command(self, port: int) -> list[str]:
        indexer = [str(self._python), "-m", "dynamo.indexer", "--port", str(port)]
        return [*indexer, "--block-size", str(BLOCK_SIZE), "--threads", "4"]

    def registration(self, worker: int, endpoint: str) -> dict[str, Any]:
        return {
            "instance_id": worker,
            "endpoint": endpoint,
            "model_name": MODEL,
            "block_size": BLOCK_SIZE,
            "dp_rank": 0,
        }

    def query(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"model_name": MODEL, "token_ids": tokens}

    def matched(self, answer: bytes) -> dict[int, int]:
        scores = _scores(answer).scores
        return {int(worker): tokens for worker, ranks in scores.items() if (tokens := ranks["0"])}

    def version(self) -> str:
        """Return the installed release."""
        code = "from importlib.metadata import version; print(version('ai-dynamo-runtime'))"
        return subprocess.check_output([self._python, "-c", code], text=True).strip()


class RunningIndexer:
    """The process of one side, and a connection to it."""

    def __init__(self, side: Side, process: subprocess.Popen[bytes], client: Client) -> None:
        self.side = side
        self.client = client
        self._pid = process.pid

    def register(self, endpoints: dict[int, str]) -> None:
        """Register these workers' streams."""
        for worker, endpoint in endpoints.items():
            self.client.exchange(post_request("/register", self.side.registration(worker, endpoint)))

    def query_request(self, tokens: Sequence[int]) -> bytes:
        """Return a query, ready to be sent."""
        return post_request("/query", self.side.query(tokens))

    def ask(self, request: bytes) -> dict[int, int]:
        """Send a query, and return matched tokens by worker."""
        return self.side.matched(self.client.exchange(request))

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._pid)

    def thread_seconds(self) -> dict[str, float]:
        """Return processor seconds by the names of threads."""
        return thread_seconds(self._pid)

    def resident_bytes(self) -> int:
        return resident_bytes(self._pid)


@contextmanager
def running(side: Side, cores: Sequence[int]) -> Iterator[RunningIndexer]:
    """Start an indexer on these cores, yield it once it answers, and end it."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            side.command(port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: pin(*cores),
            env={**os.environ, "DYN_LOG": "error", **side.environment},
        )
        try:
            client = _connect(port, process)
            if client is None:
                log.seek(0)
                raise RuntimeError(f"{side.name} did not start:\n{log.read()[-3000:].decode(errors='replace')}")
            try:
                yield RunningIndexer(side, process, client)
            finally:
                client.close()
        finally:
            process.kill()
            process.wait()


def _connect(port: int, process: subprocess.Popen[bytes]) -> Client | None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return Client(port)
        except OSError:
            time.sleep(0.05)
    return None
