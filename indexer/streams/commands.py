"""Commands from other threads to the thread that reads the event streams."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

import zmq

from indexer.sockets import receive

T = TypeVar("T")

_ANSWER_TIMEOUT = 30.0  # seconds


class CommandQueue:
    """Queue of commands for one thread, whose poll the `socket` wakes. Any thread may call `send` and `ask`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._sender, self.socket = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._sender.set_hwm(0)  # without a limit, `send` never blocks, even before the thread starts
        self.socket.set_hwm(0)
        self.socket.bind("inproc://wake")
        self._sender.connect("inproc://wake")
        self._sending = Lock()  # a ZeroMQ socket must not be used by two threads at once

    def send(self, command: Callable[[], None]) -> None:
        """Add a command, and wake the thread."""
        with self._sending:
            self._commands.put(command)
            self._sender.send(b"")

    def ask(self, question: Callable[[], T]) -> T:
        """Call `question` in the thread and return its result. Raises TimeoutError after 30 seconds."""
        answer: Future[T] = Future()

        def command() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self.send(command)
        return answer.result(_ANSWER_TIMEOUT)

    def run_next(self) -> bool:
        """Run the next command. Returns False if no command is waiting."""
        if receive(self.socket) is None:
            return False
        with suppress(Empty):
            self._commands.get_nowait()()
        return True

    def run_all(self) -> None:
        """Run all remaining commands."""
        while not self._commands.empty():
            self._commands.get_nowait()()

    def close(self) -> None:
        """Close the sockets."""
        self._sender.close(0)
        self.socket.close(0)
