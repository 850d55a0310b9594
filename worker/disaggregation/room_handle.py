"""What an engine holds for a request on either side: how its room stands, and how to give it up."""

from __future__ import annotations

from collections.abc import Callable

from worker.disaggregation.rooms import KVPoll, KVTransferError, Room


class RoomHandle:
    """One thread uses it; none of the calls waits, but for those named so.

    `engine`: whose side this is. `tell_failed` has the other side told why the room failed.
    """

    def __init__(self, room: Room, engine: str, tell_failed: Callable[[str], None]) -> None:
        self._room = room
        self._engine = engine
        self._tell_failed = tell_failed

    def poll(self) -> KVPoll:
        return self._room.state

    def wait(self, timeout: float) -> KVPoll:
        """The state as soon as it is terminal, at the latest after `timeout` seconds."""
        return self._room.wait(timeout)

    def pages_reusable(self) -> bool:
        """Whether nothing touches the room's pages any more: what that means is said by each side."""
        return self._room.quiet

    def wait_reusable(self, timeout: float) -> bool:
        """`pages_reusable` as soon as it is true, at the latest after `timeout` seconds."""
        return self._room.wait_quiet(timeout)

    def abort(self, reason: str | None = None) -> None:
        """Fail the room, unless it is over; the other side is told."""
        if reason is None:
            reason = f"aborted by the {self._engine} engine"
        if self._room.fail(reason):
            self._tell_failed(reason)

    def clear(self) -> None:
        """Give the room up if it is not over."""
        self.abort(f"cleared by the {self._engine} engine")

    def failure_exception(self) -> None:
        """Raise why the room failed, KVTransferError; nothing when it has not."""
        if self._room.state is KVPoll.Failed:
            raise KVTransferError(self._room.number, self._room.reason)
