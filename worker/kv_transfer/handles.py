"""The engine's handles of a room: KVSender on the prefill side, KVReceiver on the decode side."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

from numpy.typing import ArrayLike

from kvevents.endpoints import split_host_port
from worker.kv_transfer.decode import ReceivingRoom, Wanted
from worker.kv_transfer.manager import KVManager
from worker.kv_transfer.rooms import KVPoll, KVTransferError, Room, check_room, check_timeout
from worker.kv_transfer.sending import Chunk, SendingRoom
from worker.kv_transfer.transfer.runs import page_array


class RoomHandle:
    """The engine's handle of one room, for use by one thread. Only the `wait` methods block."""

    def __init__(self, room: Room, engine: str, notify_failed: Callable[[str], None]) -> None:
        self._room = room
        self._engine = engine
        self._notify_failed = notify_failed

    def poll(self) -> KVPoll:
        return self._room.state

    def wait(self, timeout: float) -> KVPoll:
        """Return the state once it is terminal, or after `timeout` seconds."""
        return self._room.wait(timeout)

    def pages_reusable(self) -> bool:
        """Return whether the room's pages are no longer accessed. KVSender and KVReceiver define the exact moment."""
        return self._room.quiet

    def wait_reusable(self, timeout: float) -> bool:
        """Return True once `pages_reusable` does, or False after `timeout` seconds."""
        return self._room.wait_quiet(timeout)

    def abort(self, reason: str | None = None) -> None:
        """Fail the room unless it has ended, and notify the other side."""
        if reason is None:
            reason = f"aborted by the {self._engine} engine"
        if self._room.fail(reason):
            self._notify_failed(reason)

    def clear(self) -> None:
        """Abort the room unless it has ended."""
        self.abort(f"cleared by the {self._engine} engine")

    def failure_exception(self) -> None:
        """Raise KVTransferError if the room failed."""
        if self._room.state is KVPoll.Failed:
            raise KVTransferError(self._room.number, self._room.reason)


class KVSender(RoomHandle):
    """The prefill engine's handle of one request, for use by one thread.

    `pages_reusable` becomes true shortly after Success or Failed, when the pages given to `send` are no longer read.

    `timeout_s`: seconds until the room fails; `None`: the manager's `room_timeout_s`. Raises ValueError for a room that
    is in use on this rank.
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
        super().__init__(room, "prefill", self._notify_decode)
        self._pages: int | None = None
        self._sent = 0
        self._has_last = False
        self._local.channel.post(partial(self._side.open, self._sending))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Set the number of the prompt's pages and its item in the aux buffers. Raises ValueError if invalid."""
        if self._pages is not None:
            raise ValueError("init() was called before")
        if num_kv_indices < 0:
            raise ValueError(f"num_kv_indices {num_kv_indices}: must be 0 or more")
        if aux_index is not None:
            self._local.layout.check_aux(aux_index)
        self._pages = num_kv_indices
        self._local.channel.post(partial(self._side.start, self._sending, num_kv_indices, aux_index))

    def send(self, kv_indices: ArrayLike, index_slice: slice | None = None, is_last: bool | None = None) -> None:
        """Send the next pages of the prompt, also before decode requested them. They are read until `pages_reusable`.

        - `kv_indices`: pages of this rank.
        - `index_slice`: their positions among the prompt's pages, directly after the previous chunk.
        - `is_last`: whether the aux item follows; `None`: if all pages are sent.

        Only the last chunk may be empty. Raises ValueError, and sends nothing, for invalid arguments.
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
            raise ValueError(f"{end} pages are sent with this chunk, but init() announced {self._pages}")
        self._local.layout.check_pages(pages)
        self._has_last = is_last
        chunk = Chunk(pages, self._sent, is_last)
        self._sent = end
        self._local.channel.post(partial(self._side.add_chunk, self._sending, chunk))

    def _notify_decode(self, reason: str) -> None:
        self._local.channel.post(partial(self._side.fail, self._sending, reason))


class KVReceiver(RoomHandle):
    """The decode engine's handle of one request, for use by one thread.

    `pages_reusable` is true when no write to the room's pages can still land. **After Failed, free the pages only
    then.** Until then they are in quarantine, also after `clear`.

    - `prefill_dp_rank`: the prefill's DP rank that received the request; `None`: room modulo its DP size.
    - `timeout_s`: seconds until the room fails; `None`: the manager's `room_timeout_s`.

    Raises ValueError for an invalid address and for a room that is in use on this rank.
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
        super().__init__(room, "decode", self._notify_prefill)
        self._wanted = False
        self._local.channel.post(partial(self._side.open, self._receiving))

    def init(self, kv_indices: ArrayLike, aux_index: int | None = None, decode_prefix_len: int = 0) -> None:
        """Request the prompt's pages, to be written to `kv_indices` in their order, and an aux item.

        `decode_prefix_len` is the number of tokens at the prompt's start that this rank has cached, in whole pages.
        `kv_indices` then has only the pages after them, and is empty if all are cached. Raises ValueError for invalid
        arguments.
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

    def _notify_prefill(self, reason: str) -> None:
        self._local.channel.post(partial(self._side.fail, self._receiving, reason))
