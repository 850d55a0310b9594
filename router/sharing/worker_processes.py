"""The processes of one port. Each listens on a Unix socket, on which the others send it requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import Any

import aiohttp
import msgspec
import structlog
from pydantic import ValidationError

from indexer.dump import DumpError, SavedTarget, read_dump
from kvevents.decoding import read_json
from router.fleet.fleet import Fleet
from router.http.client import refuse_redirects
from router.http.headers import Headers
from router.settings import WorkerSettings
from router.sharing.channels import DatagramChannel

log = structlog.get_logger()

# The path at which a new process requests the API changes of another. It is answered on the Unix socket only.
CHANGES_PATH = "/processes/changes"

# The most seconds between two reads of a dump.
_DUMP_SECONDS = 5.0
_CONNECTION_HEADERS = {b"host", b"connection", b"content-length", b"transfer-encoding", b"expect"}


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """The answer of process `number`."""

    number: int
    status: int
    body: bytes


class _ApiChanges(msgspec.Struct):
    """The changes by the API.

    - `added`: the settings of added workers.
    - `draining`: the URLs of draining workers.
    - `selected`: the workers that were registered below `/selection`.
    """

    added: list[dict[str, object]]
    draining: list[str]
    selected: list[dict[str, object]] = []


@dataclass(frozen=True, slots=True)
class WorkerProcesses:
    """One process of several that serve a port, numbered from 0. `again`: it replaces a process that ended."""

    folder: Path
    number: int
    processes: int
    again: bool = False

    @property
    def path(self) -> Path:
        """The Unix socket on which this process answers the others."""
        return self.path_of(self.number)

    @property
    def others(self) -> list[int]:
        """The numbers of all other processes."""
        return [number for number in range(self.processes) if number != self.number]

    def channel(self) -> DatagramChannel:
        """Return the channel over which the processes share load."""
        return DatagramChannel(self.folder, self.number, self.processes)

    async def ask(self, method: str, target: str, headers: Headers, body: bytes, seconds: float) -> list[ProcessAnswer]:
        """Send a request to all other processes, and return the answers that arrive within `seconds` seconds."""
        answers = await asyncio.gather(
            *(self._ask(number, method, target, headers, body, seconds) for number in self.others)
        )
        return [answer for answer in answers if answer is not None]

    async def catch_up(self, fleet: Fleet, select: Callable[[Any], Awaitable[object]]) -> None:
        """Apply the API changes of another process, if this one replaces a process that ended.

        `select`: called with each worker that was registered below `/selection`.
        """
        if not self.again:
            return
        for answer in await self.ask("GET", CHANGES_PATH, [], b"", 1.0):
            try:
                changes = read_json(answer.body, _ApiChanges)
                fleet.assign("api", [WorkerSettings.model_validate(each) for each in changes.added])
            except (msgspec.DecodeError, ValidationError) as error:
                log.warning("another process reports no API changes", process=answer.number, reason=str(error))
                continue
            for worker in fleet.workers:
                fleet.drain(worker, worker.url in changes.draining)
            for selected in changes.selected:
                await select(selected)
            return

    def load_index(self, secret: str, token: str) -> list[SavedTarget]:
        """Return the targets in the index of another process, if this one replaces a process that ended."""
        if not self.again:
            return []
        for number in self.others:
            connection = _UnixConnection(self.path_of(number))
            try:
                connection.request("GET", "/dump", headers={"authorization": f"Bearer {token}"} if token else {})
                answer = connection.getresponse()
                if answer.status == 200:
                    return read_dump(answer, secret)
            except (OSError, DumpError, ValueError) as error:
                log.debug("another process has no index", process=number, reason=str(error))
            finally:
                connection.close()
        return []

    async def _ask(
        self,
        number: int,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        seconds: float,
    ) -> ProcessAnswer | None:
        forwarded = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in headers
            if name not in _CONNECTION_HEADERS
        ]
        connector = aiohttp.UnixConnector(str(self.path_of(number)))
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with (
                aiohttp.ClientSession(middlewares=(refuse_redirects,), connector=connector, timeout=timeout) as session,
                session.request(method, f"http://process{target}", headers=forwarded, data=body or None) as response,
            ):
                return ProcessAnswer(number, response.status, await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("another process does not answer", process=number, reason=str(error) or type(error).__name__)
            return None

    def path_of(self, number: int) -> Path:
        """Return the Unix socket on which a process answers the others."""
        return self.folder / f"{number}.http"


def api_changes(fleet: Fleet, selected: list[Any]) -> bytes:
    """Return this process's API changes, for a process that starts."""
    added = [
        worker.model_dump(mode="json") | {"api_key": worker.api_key and worker.api_key.get_secret_value()}
        for worker in fleet.assigned("api")
    ]
    return msgspec.json.encode(
        _ApiChanges(added, [worker.url for worker in fleet.workers if worker.draining], selected)
    )


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("process", timeout=_DUMP_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX, SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
