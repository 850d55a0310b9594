"""Transfers of one prompt's KV pages: sent by a prefill rank, received by a decode rank."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from simulator.worker.cache import CachedSequence
from simulator.worker.engine import Answer, Generation, Output
from simulator.worker.kv_transfer.memory import FirstToken
from simulator.worker.kv_transfer.rank import OVER, TransferRank, until
from worker.kv_transfer import KVPoll, KVReceiver, KVSender, KVTransferError

NO_ITEM = "This rank accepts no more transfers at the moment. Retry later."


class Sending:
    """A transfer of one room. Its pages may be freed after `until_over`. Raises ValueError and RuntimeError."""

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
        """Send the pages that the first `num_tokens` tokens fill, which are not the whole prompt."""
        self._send(sequence, num_tokens // self._rank.settings.block_size, is_last=False)

    def send_last(self, sequence: CachedSequence, token: int, cached_tokens: int) -> None:
        """Send the remaining pages, with the first token of the answer."""
        first = FirstToken(self._room, token, self._prompt_tokens, cached_tokens)
        self._rank.memory.write_first_token(self._item, first)
        self._send(sequence, self._pages(self._prompt_tokens), is_last=True)

    def abort(self, reason: str) -> None:
        """Abort the transfer unless it has ended, and notify the decode worker."""
        self._sender.abort(reason)

    async def until_over(self, ended: Callable[[str | None], None]) -> None:
        """Call `ended` with the reason of a failure or with None, then wait until the pages are no longer read."""
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


logger = logging.getLogger(__name__)


class ArrivalError(Exception):
    """KV that did not arrive, or that differs from its tokens."""


class Arrival:
    """A request that begins when its prompt's KV has arrived. It is otherwise used like a Generation.

    `meet` returns the receiver of the pages, once they have memory. It raises ArrivalError and ValueError.
    """

    def __init__(
        self,
        rank: TransferRank,
        sequence: CachedSequence,
        answer: Answer,
        deliver: Callable[[Output], None],
        meet: Callable[[], Awaitable[KVReceiver]],
    ) -> None:
        self._rank = rank
        self._sequence = sequence
        self._answer = answer
        self._deliver = deliver
        self._meet = meet
        self._generation: Generation | None = None
        self._aborted = asyncio.Event()
        rank.engine.arriving += 1
        rank.run(self._run())

    def cancel(self) -> None:
        """Abort the request, unless it has finished."""
        if self._generation is not None:
            self._generation.cancel()
        elif not self._aborted.is_set():
            self._aborted.set()
            self._deliver(Output(None, 0, "abort"))

    async def _run(self) -> None:
        engine = self._rank.engine
        try:
            if not await self._until_held():
                return
            adopted = False
            try:
                adopted = await self._receive()
            finally:
                if not adopted:
                    engine.release(self._sequence)
        except (ArrivalError, ValueError, RuntimeError) as error:
            self._rank.counts.failed += 1
            logger.warning("no KV for a prompt of %d tokens: %s", len(self._sequence.tokens), error)
            if not self._aborted.is_set():
                self._aborted.set()
                self._deliver(Output(None, 0, "abort", str(error)))
        finally:
            engine.arriving -= 1

    async def _until_held(self) -> bool:
        """Wait for memory for the whole prompt. Return False if the request was aborted. Raises ArrivalError."""
        engine = self._rank.engine
        try:
            async with asyncio.timeout(self._rank.settings.transfer_timeout_s):
                while not self._aborted.is_set():
                    if engine.hold(self._sequence):
                        return True
                    await _first_of(engine.freed, self._aborted)
        except TimeoutError:
            raise ArrivalError("No memory for the prompt's KV became free in time.") from None
        return False

    async def _receive(self) -> bool:
        """Receive the KV and continue from it. Return False if the request was aborted.

        After the return, nothing can write to the pages. Raises ArrivalError, ValueError and RuntimeError.
        """
        rank, sequence = self._rank, self._sequence
        item = rank.take_item()
        if item is None:
            raise RuntimeError(NO_ITEM)
        try:
            first_page = sequence.num_stored  # earlier pages are cached here
            room = await self._fill(first_page, item)
            if room is None:
                return False
            rank.counts.received += 1
            rank.counts.bytes_received += (len(sequence.blocks) - first_page) * rank.memory.page_bytes
            self._go_on(room, item)
            return True
        finally:
            rank.free_item(item)

    async def _fill(self, first_page: int, item: int) -> int | None:
        """Receive the pages from `first_page` on and an aux item. Return the room, or `None` if aborted."""
        pages = self._sequence.blocks[first_page:]
        receiver = await self._meet()
        try:
            receiver.init(pages, item, first_page * self._rank.settings.block_size)
            await until(lambda: receiver.poll() in OVER or self._aborted.is_set())
        finally:
            receiver.abort("the request was aborted")  # has no effect after the end
            await until(receiver.pages_reusable)
        if self._aborted.is_set():
            return None
        try:
            receiver.failure_exception()
        except KVTransferError as error:
            raise ArrivalError(f"The KV transfer failed: {error}") from error
        return receiver.bootstrap_room

    def _go_on(self, room: int, item: int) -> None:
        rank, sequence = self._rank, self._sequence
        prompt_tokens = len(sequence.tokens)
        first = rank.memory.read_first_token(item)
        if (first.room, first.prompt_tokens) != (room, prompt_tokens):
            raise ArrivalError(f"The KV of room {room} has the first token of another prompt: {first}.")
        wrong = rank.memory.wrong_pages(sequence, prompt_tokens)
        rank.counts.pages_checked += len(sequence.blocks)
        rank.counts.pages_wrong += wrong
        if wrong:
            raise ArrivalError(f"{wrong} of {len(sequence.blocks)} KV pages of room {room} have wrong bytes.")
        answer = replace(self._answer, tokens=[first.token, *self._answer.tokens[1:]])
        self._generation = rank.engine.adopt(sequence, answer, self._deliver, first.cached_tokens)


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
