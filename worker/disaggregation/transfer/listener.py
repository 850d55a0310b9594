"""The listener of a receiver: it accepts connections, runs a thread for each, and ends them all."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from worker.disaggregation.transfer.channel import Channel
from worker.disaggregation.transfer.engine import RefusedError, TransferError
from worker.disaggregation.transfer.handshake import welcome

MOST_SESSIONS = 1024
_GREETING_SECONDS = 5.0
_logger = logging.getLogger(__name__)


class Listener:
    """A listener that serves sessions on its socket until `close`."""

    def __init__(
        self, listening: socket.socket, engine: str, secret: bytes | None, serve: Callable[[Channel], None]
    ) -> None:
        self.socket = listening
        self._engine, self._secret, self._serve = engine, secret, serve
        self._lock = threading.Lock()
        self._sessions: dict[threading.Thread, Channel] = {}
        self._ending: set[threading.Thread] = set()  # cut, to limit the number of sessions
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"transfer-{engine}-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Refuse new sessions, cut existing ones, and wait for their threads. Repeated calls have no effect."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            sessions, ending = dict(self._sessions), list(self._ending)
        with suppress(OSError):  # an unusable socket: accept fails either way
            self.socket.shutdown(socket.SHUT_RDWR)
        for channel in sessions.values():
            channel.cut()
        self._thread.join()
        for thread in (*sessions, *ending):
            thread.join()
        self.socket.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self.socket.accept()
            except OSError as error:
                if not self._closing.is_set():
                    _logger.warning("a transfer session could not be accepted: %s", error)
                    self._closing.wait(0.1)  # probably no file descriptor is free
                continue
            try:
                self._admit(connection)
            except (OSError, RuntimeError) as error:  # the connection has ended, or no thread can be started
                connection.close()
                _logger.warning("a transfer session could not begin: %s", error)

    def _admit(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        name = f"transfer-{self._engine}-session"
        thread = threading.Thread(target=self._run, args=(channel,), name=name, daemon=True)
        with self._lock:
            closing = self._closing.is_set()
            if not closing:
                self._make_room()
                thread.start()  # the thread removes itself under this lock
                self._sessions[thread] = channel
        if closing:
            channel.close()

    def _make_room(self) -> None:
        """End one session if MOST_SESSIONS are open, at best one without granted writes. The caller holds the lock."""
        if len(self._sessions) < MOST_SESSIONS:
            return
        least = min(
            self._sessions, key=lambda thread: (self._sessions[thread].landed, self._sessions[thread].idle_since)
        )
        _logger.warning("a transfer session was ended for a new one: %d are open", MOST_SESSIONS)
        self._sessions.pop(least).cut()
        self._ending.add(least)

    def _run(self, channel: Channel) -> None:
        try:
            welcome(channel, self._engine, self._secret, time.monotonic() + _GREETING_SECONDS)
            self._serve(channel)
        except RefusedError as error:
            _logger.warning("a transfer session was refused: %s", error)
        except TransferError as error:
            if not self._closing.is_set():
                _logger.info("a transfer session ended: %s", error)
        finally:
            with self._lock:
                self._sessions.pop(threading.current_thread(), None)
                self._ending.discard(threading.current_thread())
            channel.close()
