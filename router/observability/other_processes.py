"""A recording of the requests of all processes that share a port: the one that is asked reads the others' too.

They get the recording's key and its beginning, so that equal prefixes have equal ids whichever process they pass.
The clock is that of the machine, which is the same for all processes.
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import structlog
from starlette.requests import Request

from router.http.client import refuse_redirects
from router.observability.request_recorder import Listener, Recording
from router.sharing.worker_processes import WorkerProcesses

log = structlog.get_logger()

_RECORDING = "x-kvrouter-recording"
_AGAIN_SECONDS = 1.0
_SILENCE = 10.0
_MAX_LINE = 1 << 24


def recording_of(request: Request, worker_processes: WorkerProcesses | None) -> Recording | None:
    """The recording that another process asks for; None when somebody else asks."""
    if worker_processes is None or (request.scope.get("server") or ("",))[0] != str(worker_processes.path):
        return None
    sent = request.headers.get(_RECORDING)
    return msgspec.json.decode(sent, type=Recording) if sent else None


class OtherProcesses:
    """Reads the requests of the other processes for the listeners of this one."""

    def __init__(self, worker_processes: WorkerProcesses, token: str) -> None:
        self._worker_processes = worker_processes
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def read(self, listener: Listener) -> None:
        """Until cancelled. A process that ends is asked again when it is back."""
        async with asyncio.TaskGroup() as tasks:
            for number in self._worker_processes.others:
                tasks.create_task(self._read(number, listener))

    async def _read(self, number: int, listener: Listener) -> None:
        headers = self._headers | {_RECORDING: msgspec.json.encode(listener.recording).decode()}
        url = f"http://sibling/requests?block_tokens={listener.recording.block_tokens}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
        while True:
            try:
                async with (
                    aiohttp.ClientSession(
                        middlewares=(refuse_redirects,),
                        connector=aiohttp.UnixConnector(str(self._worker_processes.path_of(number))),
                        timeout=timeout,
                        read_bufsize=_MAX_LINE,
                    ) as session,
                    session.get(url, headers=headers) as response,
                ):
                    if response.status == 200:
                        async for line in response.content:
                            listener.take_from(number, line)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                log.debug("a process tells no requests", process=number, reason=str(error) or type(error).__name__)
            await asyncio.sleep(_AGAIN_SECONDS)
