"""Follows the master of a shared pool in a thread: its stream of events and its HTTP API.

A master is not trusted. Its answers have a deadline and a limit, and its redirects are refused. The follower continues
after any answer.
"""

from __future__ import annotations

import asyncio
import time
from threading import Event as Flag
from threading import Thread
from typing import Final

import aiohttp
import structlog
import zmq

from indexer.pools.keys import MOST_KEY
from indexer.pools.mooncake import MasterContent, MooncakeMaster
from indexer.pools.pool import SharedPool
from router.http.client import connection_problem, read_answer, refuse_redirects

log = structlog.get_logger()

# Limits of the stream: bytes of a message, and messages that wait. What is dropped shows as a gap in the numbers.
_MOST_MESSAGE: Final = 4 * 2**20
_MOST_WAITING: Final = 16
_MOST_METRICS: Final = 4 * 2**20  # bytes
_STOP_SECONDS: Final = 2.0


class MooncakeFollower:
    """A thread that follows the master of a pool from `start` to `stop`."""

    def __init__(self, pool: SharedPool, master: MooncakeMaster) -> None:
        self.content = MasterContent(pool, master, self._fetch)
        self._pool = pool
        self._master = master
        self._stopping = Flag()
        self._loop = asyncio.new_event_loop()
        self._question: asyncio.Task[bytes] | None = None
        self._thread = Thread(target=self._run, name=f"pool-{pool.config.name}", daemon=True)

    def start(self) -> None:
        """Start to follow the master."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for the thread for at most two seconds."""
        self._stopping.set()
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(_STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _cancel(self) -> None:
        if self._question is not None:
            self._question.cancel()

    def _fetch(self, path: str) -> bytes:
        if self._stopping.is_set():
            raise OSError("the router stops")
        self._question = self._loop.create_task(self._get(path))
        try:
            return self._loop.run_until_complete(self._question)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(connection_problem(error)) from error
        except asyncio.CancelledError as error:
            raise OSError("the router stops") from error
        finally:
            self._question = None

    async def _get(self, path: str) -> bytes:
        """Return the body of a path. The timeout is that of the whole answer."""
        most = _MOST_METRICS if path == "/metrics" else (MOST_KEY + 1) * self._master.most_keys
        timeout = aiohttp.ClientTimeout(total=self._master.timeout)
        async with (
            aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=timeout) as session,
            session.get(self._master.url.rstrip("/") + path, allow_redirects=False) as answer,
        ):
            answer.raise_for_status()
            return await read_answer(answer, most)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except Exception as error:
                log.exception("follower of a pool restarts", pool=self._pool.config.name)
                self._pool.answers = False
                self._pool.lose(f"the master's answers cannot be read: {type(error).__name__}: {error}"[:300])
                self._stopping.wait(self._master.interval)

    def _follow(self) -> None:
        with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.MAXMSGSIZE, _MOST_MESSAGE)
            socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(self._master.events)
            checked_at = float("-inf")
            while not self._stopping.is_set():
                if socket.poll(100):
                    frames = socket.recv_multipart()
                    if len(frames) == 3 and len(frames[1]) == 8:
                        self.content.receive(int.from_bytes(frames[1], "big"), frames[2])
                now = time.monotonic()
                if now - checked_at >= self._master.interval:
                    self.content.check(now)
                    checked_at = now
