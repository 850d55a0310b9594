"""What a decode engine holds for each request: it asks for the request's pages and says when they may be reused."""

from __future__ import annotations

import secrets
import time
from functools import partial

from numpy.typing import ArrayLike

from worker.disaggregation.addresses import split_host_port
from worker.disaggregation.decode import ReceivingRoom, Wanted
from worker.disaggregation.manager import KVManager
from worker.disaggregation.rooms import KVPoll, KVTransferError, Room, check_room, check_timeout
from worker.disaggregation.transfer.runs import page_array


class KVReceiver:
    """One thread uses it; none of the calls waits, but for `wait`.

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
        self._room = Room(bootstrap_room, secrets.randbits(62), time.monotonic() + timeout)
        self._local.rooms.add(self._room)
        self._receiving = ReceivingRoom(self._room, bootstrap_addr, prefill_dp_rank)
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

    def poll(self) -> KVPoll:
        return self._room.state

    def wait(self, timeout: float) -> KVPoll:
        """The state as soon as it is terminal, at the latest after `timeout` seconds."""
        return self._room.wait(timeout)

    def pages_reusable(self) -> bool:
        """Whether no write to the room's pages can still land. **After Failed, free them only then.**"""
        return self._room.quiet

    def wait_reusable(self, timeout: float) -> bool:
        """`pages_reusable` as soon as it is true, at the latest after `timeout` seconds."""
        return self._room.wait_quiet(timeout)

    def abort(self, reason: str = "aborted by the decode engine") -> None:
        """Fail the room, unless it is over; the prefill is told."""
        if self._room.fail(reason):
            self._local.channel.post(partial(self._side.fail, self._receiving, reason))

    def clear(self) -> None:
        """Give the room up if it is not over; its pages stay in quarantine as long as they must."""
        self.abort("cleared by the decode engine")

    def failure_exception(self) -> None:
        """Raise why the room failed, KVTransferError; nothing when it has not."""
        if self._room.state is KVPoll.Failed:
            raise KVTransferError(self.bootstrap_room, self._room.reason)
