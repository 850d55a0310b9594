"""What a decode engine holds for each request: it asks for the request's pages and says when they may be reused."""

from __future__ import annotations

import secrets
import time
from functools import partial

from numpy.typing import ArrayLike

from worker.disaggregation.addresses import split_host_port
from worker.disaggregation.decode import ReceivingRoom, Wanted
from worker.disaggregation.manager import KVManager
from worker.disaggregation.room_handle import RoomHandle
from worker.disaggregation.rooms import Room, check_room, check_timeout
from worker.disaggregation.transfer.runs import page_array


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
