"""The base of engines whose library writes into the peer's memory by itself, so that the receiver cannot stop it.

One connection of ours runs beside those of the library:
    receiver  MEMORY   the receiver's description for the sender's library, once
    sender    BEGIN    the runs to write (as in writing.py)
    receiver  GRANTED, or REFUSED with the reason
    sender    DONE     all bytes landed, as the library reports

From GRANTED to DONE, bytes may land. A grant that is revoked meanwhile becomes quiescent only with DONE. The end of the
connection or of the sender proves nothing: bytes may be in transit or in a buffer of our own library. Those pages are
lost until the receiver restarts. A write that misses its deadline continues in the background, so that its DONE is
still sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from math import inf
from typing import Protocol

from worker.kv_transfer.transfer.channel import Channel, Kind
from worker.kv_transfer.transfer.endpoint import Endpoint, Writer, listen
from worker.kv_transfer.transfer.engine import (
    DeadlineError,
    GrantKey,
    PeerLostError,
    RefusedError,
    Region,
    TransferError,
)
from worker.kv_transfer.transfer.memory import Memory
from worker.kv_transfer.transfer.runs import Ranges, Writes, split_writes
from worker.kv_transfer.transfer.sessions import expect
from worker.kv_transfer.transfer.writing import MOST_BYTES, decode_runs, encode_runs, next_write

_MOST_RUNS = 1024  # runs of one request; 4096 make Mooncake fail, and its peer for a while


class Library(Protocol):
    """The operations that an engine needs of a transfer library. `write` may be called from several threads."""

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory as source and destination. Raises ValueError."""
        ...

    def describe(self) -> bytes:
        """Return the description that a peer passes to `open`."""
        ...

    def open(self, description: bytes) -> str:
        """Return a peer's name for `write`. Raises PeerLostError."""
        ...

    def forget(self, peer: str) -> None:
        """Remove a peer that `open` returned. Never raises."""
        ...

    def write(self, peer: str, writes: Writes) -> None:
        """Write bytes, and return when all have landed. Raises PeerLostError if that is not known."""
        ...

    def close(self) -> None:
        """Release the library's resources."""
        ...


class OneSidedEndpoint(Endpoint):
    """An Endpoint whose writes ask for a grant before the library runs."""

    def __init__(self, host: str, secret: bytes | None, library: Library) -> None:
        self._library = library
        super().__init__(listen(host), secret)

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self._library.register(regions)

    def close(self) -> None:
        super().close()
        self._library.close()

    def _writer(self, channel: Channel, deadline: float) -> Writer:
        return _OneSidedWriter(channel, self.memory, self._library, expect(channel, Kind.MEMORY, deadline))

    def _serve(self, channel: Channel) -> None:
        channel.send(Kind.MEMORY, self._library.describe())
        while True:
            key, (destinations, lengths) = decode_runs(next_write(channel, Kind.BEGIN), 2)
            try:
                grant = self.grants.find(key, destinations, lengths)
                grant.enter()
            except RefusedError as error:
                channel.answer(Kind.REFUSED, str(error).encode())
                continue
            channel.answer(Kind.GRANTED)
            channel.idle_since = inf  # an open grant must not lose its session: its DONE would be lost
            expect(channel, Kind.DONE)  # without DONE, the grant is never left
            grant.leave()
            channel.idle_since = time.monotonic()


class _OneSidedWriter:
    """A writer with a thread for each write, which continues after the deadline of its caller."""

    def __init__(self, channel: Channel, memory: Memory, library: Library, description: bytes) -> None:
        self._channel, self._memory, self._library = channel, memory, library
        self._peer = library.open(description)
        self._changed = threading.Condition()
        self._running = self._ended = self._closed = False
        self._failure: TransferError | None = None

    def write(self, key: GrantKey, writes: Writes, deadline: float) -> None:
        self._memory.check(Ranges(writes.sources, writes.lengths))
        self._running, self._failure = True, PeerLostError("the write was interrupted")
        threading.Thread(target=self._run, args=(key, writes), name="transfer-one-sided", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._running, max(0, deadline - time.monotonic()))
            if self._running:
                if self._ended:
                    raise PeerLostError("the session was closed")
                raise DeadlineError("the bytes did not land within the deadline")
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            if not self._running:
                self._channel.cut()

    def close(self) -> None:
        with self._changed:
            closed, self._closed = self._closed, True
            if not closed and not self._running:
                self._release()

    def _release(self) -> None:
        self._channel.close()
        self._library.forget(self._peer)

    def _run(self, key: GrantKey, writes: Writes) -> None:
        try:
            for portion in split_writes(writes, _MOST_RUNS, MOST_BYTES):
                self._channel.send(Kind.BEGIN, encode_runs(key, portion.destinations, portion.lengths))
                expect(self._channel, Kind.GRANTED)
                if not self._ended:
                    self._library.write(self._peer, portion)
                self._channel.send(Kind.DONE)
                if self._ended:
                    break
            else:
                self._failure = None
        except TransferError as error:
            self._failure = error
        finally:
            with self._changed:
                self._running = False
                if self._ended:
                    self._channel.cut()
                if self._closed:
                    self._release()
                self._changed.notify_all()
