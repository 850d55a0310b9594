"""The engine's handles of a room: KVSender on the prefill side, KVReceiver on the decode side."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

from numpy.typing import ArrayLike

from worker.disaggregation.addresses import split_host_port
from worker.disaggregation.decode import ReceivingRoom, Wanted
from worker.disaggregation.manager import KVManager
from worker.disaggregation.rooms import KVPoll, KVTransferError, Room, check_room, check_timeout
from worker.disaggregation.sending_room import Chunk, SendingRoom
from worker.disaggregation.transfer.runs import page_array


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


class KVSender(RoomHandle):
    """One thread uses it.

    `pages_reusable`: the pages given to `send` are no longer read, a moment after Success or Failed.

    `timeout_s`: how long the room may take, from now on (the manager's `room_timeout_s`). Raises ValueError for a room
    that is in use on this rank.
    """

    def __init__(
        self, mgr: KVManager, bootstrap_addr: str, bootstrap_room: int, *, timeout_s: float | None = None
    ) -> None:
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = check_room(bootstrap_room)
        self._side = mgr.prefill
        self._local = mgr.local
        timeout = self._local.room_timeout_s if timeout_s is None else check_timeout(timeout_s, "timeout_s")
        room = Room(bootstrap_room, 0, time.monotonic() + timeout)
        self._local.rooms.add(room)
        self._sending = SendingRoom(room)
        super().__init__(room, "prefill", self._tell_decode)
        self._pages: int | None = None
        self._sent = 0
        self._has_last = False
        self._local.channel.post(partial(self._side.open, self._sending))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """How many pages the prompt has in all, and which item of the aux buffers belongs to it.

        Raises ValueError for a number below 0 and for an item that does not exist.
        """
        if self._pages is not None:
            raise ValueError("init() was called before")
        if num_kv_indices < 0:
            raise ValueError(f"num_kv_indices {num_kv_indices}: must be 0 or more")
        if aux_index is not None:
            self._local.layout.check_aux(aux_index)
        self._pages = num_kv_indices
        self._local.channel.post(partial(self._side.start, self._sending, num_kv_indices, aux_index))

    def send(self, kv_indices: ArrayLike, index_slice: slice | None = None, is_last: bool | None = None) -> None:
        """Send the next pages of the prompt, even before decode asked for them; read until `pages_reusable`.

        `kv_indices`: pages of this rank. `index_slice`: their positions among the prompt's pages, which follow those of
        the chunk before. `is_last`: the aux item goes with it; by default when all pages are there. Only the last chunk
        may be empty. Raises ValueError, and sends nothing, for what does not fit.
        """
        if self._pages is None:
            raise ValueError("call init() before send()")
        pages = page_array(kv_indices, "kv_indices").copy()
        end = self._sent + len(pages)
        if is_last is None:
            is_last = end == self._pages
        if self._has_last:
            raise ValueError("the last chunk has been sent")
        if not len(pages) and not is_last:
            raise ValueError("kv_indices is empty: only the last chunk may be")
        if index_slice is not None and (index_slice.start, index_slice.stop) != (self._sent, end):
            raise ValueError(
                f"index_slice {index_slice.start}:{index_slice.stop} does not fit: {len(pages)} pages follow "
                f"position {self._sent}, so it must be {self._sent}:{end}"
            )
        if end > self._pages or (is_last and end != self._pages):
            raise ValueError(f"{end} pages are sent with this chunk, init() said {self._pages}")
        self._local.layout.check_pages(pages)
        self._has_last = is_last
        chunk = Chunk(pages, self._sent, is_last)
        self._sent = end
        self._local.channel.post(partial(self._side.add_chunk, self._sending, chunk))

    def _tell_decode(self, reason: str) -> None:
        self._local.channel.post(partial(self._side.fail, self._sending, reason))


class KVReceiver(RoomHandle):
    """One thread uses it.

    `pages_reusable`: no write to the room's pages can still land. **After Failed, free them only then**: they stay in
    quarantine until then, also after `clear`.

    `prefill_dp_rank`: the prefill's DP rank that got the request (room modulo its DP size). `timeout_s`: how long the
    room may take, from now on (the manager's `room_timeout_s`). Raises ValueError for an address that can't be read and
    for a room that is in use on this rank.
    """

    def __init__(
        self,
        mgr: KVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        *,
        prefill_dp_rank: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        split_host_port(bootstrap_addr, "bootstrap_addr")
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = check_room(bootstrap_room)
        self._side = mgr.decode
        self._local = mgr.local
        timeout = self._local.room_timeout_s if timeout_s is None else check_timeout(timeout_s, "timeout_s")
        room = Room(bootstrap_room, secrets.randbits(62), time.monotonic() + timeout)
        self._local.rooms.add(room)
        self._receiving = ReceivingRoom(room, bootstrap_addr, prefill_dp_rank)
        super().__init__(room, "decode", self._tell_prefill)
        self._wanted = False
        self._local.channel.post(partial(self._side.open, self._receiving))

    def init(self, kv_indices: ArrayLike, aux_index: int | None = None, decode_prefix_len: int = 0) -> None:
        """Ask for the prompt's pages, to be written to `kv_indices` in their order, and for an aux item.

        `decode_prefix_len`: tokens at the prompt's start that this rank has cached, whole pages of them; `kv_indices`
        then holds the pages after those, and none when everything is cached. Raises ValueError for what does not fit.
        """
        if self._wanted:
            raise ValueError("init() was called before")
        pages = page_array(kv_indices, "kv_indices").copy()
        layout = self._local.layout
        if decode_prefix_len < 0 or decode_prefix_len % layout.page_size:
            raise ValueError(f"decode_prefix_len {decode_prefix_len}: must be whole pages of {layout.page_size} tokens")
        ranges = layout.ranges(pages, aux_index)
        self._wanted = True
        wanted = Wanted(pages, ranges, aux_index, decode_prefix_len // layout.page_size)
        self._local.channel.post(partial(self._side.want, self._receiving, wanted))

    def _tell_prefill(self, reason: str) -> None:
        self._local.channel.post(partial(self._side.fail, self._receiving, reason))
