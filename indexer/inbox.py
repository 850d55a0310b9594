"""The inbox of an index: live messages between being received and being applied. The interface of its implementations.

Nearly every message is the expected next batch, and nothing about it needs reporting. `indexer.native.inbox` applies
these messages without Python. `indexer.reference.inbox` returns all messages to the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from indexer.index import Applied
from indexer.targets import Target


class Received(NamedTuple):
    """Messages that one socket received in its turn; there may be none.

    - `socket`: file descriptor of the socket.
    - `first`: sequence number of the first message, if all are batches with consecutive numbers; else None.
    - `payload`: payload of the last batch, if `first` is given.
    """

    socket: int
    messages: int
    size: int
    largest: int
    first: int | None
    payload: bytes


class AppliedBatches(NamedTuple):
    """Expected batches of one socket that the inbox applied itself.

    - `socket`: file descriptor of the socket.
    - `first`, `last`: sequence numbers of the first and the last batch.
    - `received_at`: time at which the last batch was received, in unix seconds.
    """

    socket: int
    first: int
    last: int
    payload: bytes
    size: int
    received_at: float


class Reading(NamedTuple):
    """Result of `Inbox.read`.

    - `results`: results of those batches that need reporting, by socket and sequence number, as in `Inbox.apply`.
    - `received`: messages that were not expected, or not alone. None of them is applied yet.
    - `unreported`: whether applied batches are missing in `batches`. Under load they follow half a second later.
    """

    batches: list[AppliedBatches]
    results: list[tuple[tuple[int, int], Applied | Exception]]
    received: list[Received]
    unreported: bool = False


class Inbox(ABC):
    """Receiver of live messages for an index. Sockets are file descriptors, and only their thread may use it."""

    @abstractmethod
    def follow(self, socket: zmq.Socket[bytes], target: Target) -> int:
        """Start to receive a socket's messages, which are about a target. Returns the socket's file descriptor."""

    @abstractmethod
    def leave(self, socket: int) -> None:
        """Stop receiving a socket's messages. The socket must still be open."""

    @abstractmethod
    def look_again(self, socket: int) -> None:
        """Check a socket in the next reading, because its notification may have been consumed elsewhere."""

    @abstractmethod
    def expect(self, socket: int, seq: int | None, largest: int) -> None:
        """Allow the inbox to apply a socket's batches from `seq` on, if they have at most `largest` bytes."""

    @abstractmethod
    def read(self, seconds: float) -> Reading:
        """Wait at most `seconds` for a message or another event, then receive one round of live messages.

        In a round, each socket has a turn, until enough was received. While everything is expected, more rounds follow.
        """

    @abstractmethod
    def rest(self) -> list[AppliedBatches]:
        """Return the applied batches that no reading has returned yet."""

    @abstractmethod
    def messages(self, place: int) -> list[list[bytes]]:
        """Return the frames of the messages at a place of the last reading's `received`."""

    @abstractmethod
    def apply(self, places: Sequence[int]) -> list[tuple[tuple[int, int], Applied | Exception]]:
        """Apply the batches at these places of the last reading's `received`; each place has consecutive batches.

        Returns the results that need reporting, by place and sequence number: a rejected event, a clear, or an error.
        """
