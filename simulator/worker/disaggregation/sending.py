"""A prompt's pages on their way out: what a prefill worker does once it knows the room."""

from __future__ import annotations

from collections.abc import Callable

from simulator.worker.cache import CachedSequence
from simulator.worker.disaggregation.memory import FirstToken
from simulator.worker.disaggregation.rank import OVER, TransferRank, until
from worker.disaggregation import KVPoll, KVSender, KVTransferError

NO_ITEM = "As many transfers as this rank takes are under way. Try again later."


class Sending:
    """One room. Its pages may be freed when `until_over` has returned.

    Raises ValueError for a room that is in use, RuntimeError when there are too many.
    """

    def __init__(self, rank: TransferRank, room: int, prompt_tokens: int) -> None:
        item = rank.take_item()
        if item is None:
            raise RuntimeError(NO_ITEM)
        self._rank = rank
        self._item = item
        self._room = room
        self._prompt_tokens = prompt_tokens
        self._sent = 0  # pages
        try:
            self._sender = KVSender(rank.manager, rank.bootstrap_addr, room)
        except BaseException:
            rank.free_item(item)
            raise
        self._sender.init(self._pages(prompt_tokens), item)

    def send(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Send the pages that the first `num_tokens` tokens fill; less than the whole prompt."""
        self._send(sequence, num_tokens // self._rank.settings.block_size, is_last=False)

    def send_last(self, sequence: CachedSequence, token: int, cached_tokens: int) -> None:
        """Send what is left, with the first token of the answer."""
        first = FirstToken(self._room, token, self._prompt_tokens, cached_tokens)
        self._rank.memory.write_first_token(self._item, first)
        self._send(sequence, self._pages(self._prompt_tokens), is_last=True)

    def abort(self, reason: str) -> None:
        """Give it up, unless it is over; the decode worker is told."""
        self._sender.abort(reason)

    async def until_over(self, ended: Callable[[str | None], None]) -> None:
        """Wait until nothing reads the pages any more. `ended` is told first how it went: None, or what failed."""
        await until(lambda: self._sender.poll() in OVER)
        failure = None
        try:
            self._sender.failure_exception()
            self._rank.counts.sent += 1
        except KVTransferError as error:
            failure = f"The KV transfer failed: {error}"
            self._rank.counts.failed += 1
        ended(failure)
        await until(self._sender.pages_reusable)
        self._rank.free_item(self._item)

    def _send(self, sequence: CachedSequence, pages: int, is_last: bool) -> None:
        if self._sender.poll() is not KVPoll.Failed and (pages > self._sent or is_last):
            self._sender.send(sequence.blocks[self._sent : pages], slice(self._sent, pages), is_last)
            self._sent = pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._rank.settings.block_size)
