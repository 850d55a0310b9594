"""The server of a simulated worker: in this process until a signal, or beside other code on one event loop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import uvicorn

from router.server.sockets import listen
from simulator.worker.server import create_app
from simulator.worker.settings import SimulatedWorkerSettings
from simulator.worker.worker import SimulatedWorker

GRACE_S = 1  # seconds for open responses at the end


def run(settings: SimulatedWorkerSettings) -> None:
    """Serve until SIGINT or SIGTERM, and print the worker's URL when it is ready. Raises OSError."""
    asyncio.run(_serve_until_signalled(settings))


@asynccontextmanager
async def running(settings: SimulatedWorkerSettings) -> AsyncIterator[str]:
    """Serve on this event loop within the block, and yield the worker's URL. Raises OSError as `run` does."""
    worker = SimulatedWorker(settings)
    async with worker.running():
        with listen(settings.host, settings.port) as listener:
            if worker.disaggregated is not None:
                worker.disaggregated.listens_on(listener.getsockname()[1])
            server = _Server(worker)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield _url(settings, listener)  # earlier connections wait in the listener's backlog
            finally:
                server.should_exit = True
                await serving


async def _serve_until_signalled(settings: SimulatedWorkerSettings) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: loop.call_soon_threadsafe(ended.set))
    async with running(settings) as url:
        print(f"Simulated worker ready at {url}", flush=True)
        await ended.wait()


class _Server(uvicorn.Server):
    def __init__(self, worker: SimulatedWorker) -> None:
        app = create_app(worker)
        config = uvicorn.Config(
            app, lifespan="off", log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=GRACE_S
        )
        super().__init__(config)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # the owner of the event loop handles signals


def _url(settings: SimulatedWorkerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"
