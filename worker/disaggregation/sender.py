"""What a prefill engine holds for each request: it sends the request's pages, chunk by chunk."""

from __future__ import annotations

import time
from functools import partial

from numpy.typing import ArrayLike

from worker.disaggregation.manager import KVManager
from worker.disaggregation.room_handle import RoomHandle
from worker.disaggregation.rooms import Room, check_room, check_timeout
from worker.disaggregation.sending_room import Chunk, SendingRoom
from worker.disaggregation.transfer.runs import page_array


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
