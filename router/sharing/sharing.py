"""Telling other routers what changes here, and hearing from them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any, Protocol

import msgspec
import structlog

from indexer import Target
from router.fleet.load import LoadTable
from router.holdings.speculation import ReleaseCallback
from router.sharing.messages import Kind, Message, RankLoad, SentPrompt, decode, encode, told
from router.sharing.peer_load import PeerLoad

log = structlog.get_logger()

# How often in the time in which others would forget it everything in flight is told again.
BEATS = 3
# What one message holds at most; the rest goes into the next.
MAX_LOADS = 512
MAX_BYTES = 32 * 1024
# How long a goodbye may take.
FLUSH_SECONDS = 0.5


class SharingChannel(Protocol):
    """Takes messages to other routers and brings theirs.

    `name` for people; `interval`: seconds for which changes are gathered; `problem`: why it does not work now, if so.
    """

    name: str
    interval: float
    problem: str | None

    def send(self, message: bytes) -> None:
        """Send to all others, at once or soon. What cannot be sent is dropped."""

    async def run(self, receive: Callable[[bytes], None], connected: Callable[[], None]) -> None:
        """Bring messages until cancelled; mends itself. Calls `connected` each time that it works again."""

    async def flush(self) -> None:
        """Wait until what was sent has left."""


class LoadSharing:
    """Tells the load of `table` over some channels, and gives what others tell to `peer_load`.

    `on_heard` is called whenever more is known of the others; `on_made` with a response that another router saw and its
    worker; `on_spent` with a tenant and what it spent elsewhere, requests and tokens.
    """

    def __init__(self, table: LoadTable, peer_load: PeerLoad, channels: list[SharingChannel]) -> None:
        self.router = token_hex(8)
        self.peer_load = peer_load
        self.on_heard: list[Callable[[], None]] = []
        self.on_made: list[Callable[[str, str], None]] = []
        self.on_spent: list[Callable[[str, int, int], None]] = []
        self._table = table
        self._messages = 0
        self._prompts = 0
        self._open: dict[int, None] = {}
        self.channels = list(channels)  # what it is shared over
        self._tellers = [_Teller(self, channel) for channel in channels]
        self._tasks: list[asyncio.Task[None]] = []
        self._nearest: dict[str, float] = {}  # of each router the interval of the channel that it is heard on
        if channels:
            table.on_change.append(self._changed)

    def start(self) -> None:
        """Begin to tell and to hear."""
        for teller in self._tellers:
            running = teller.channel.run(partial(self.receive, interval=teller.channel.interval), teller.hello)
            self._tasks.append(asyncio.create_task(running, name=f"share load over {teller.channel.name}"))
        if self._tellers:
            self._tasks.append(asyncio.create_task(self._beat(), name="share load"))

    async def stop(self) -> None:
        """Say goodbye and end."""
        for teller in self._tellers:
            teller.tell(Kind.GONE)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await asyncio.gather(*(t.channel.flush() for t in self._tellers if t.channel.problem is None))
        await self.kill()

    async def kill(self) -> None:
        """End without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def sent(self, target: Target, hashes: array[int]) -> ReleaseCallback | None:
        """A prompt was sent to a target: the hash of each of its chunks.

        Returns what to call when it ended; None where nobody is told.
        """
        if not self._tellers or not (prefixes := told(hashes)):
            return None
        self._prompts = number = self._prompts + 1
        self._open[number] = None
        prompt = SentPrompt(number, target.worker, target.dp_rank, target.model, prefixes.tobytes())
        for teller in self._tellers:
            teller.sent(prompt)

        def ended(failed: bool = False) -> None:
            if number in self._open:
                del self._open[number]
                for teller in self._tellers:
                    teller.ended(number, failed)

        return ended

    def made(self, response: str, worker: str) -> None:
        """A worker made a response."""
        for teller in self._tellers:
            teller.made(response, worker)

    def spent(self, tenant: str, requests: int, tokens: int) -> None:
        """A tenant used something up."""
        for teller in self._tellers:
            teller.spent(tenant, requests, tokens)

    def findings(self) -> list[dict[str, Any]]:
        """What is wrong, for /health."""
        return [
            {"finding": "load_not_shared", "carrier": channel.name, "detail": channel.problem}
            for channel in self.channels
            if channel.problem is not None
        ]

    def message(self, kind: Kind, news: _News) -> bytes:
        """The next message."""
        self._messages += 1
        oldest = next(iter(self._open), self._prompts + 1)
        loads = [self._load(*rank) for rank in news.ranks]
        spent = [(tenant, requests, tokens) for tenant, (requests, tokens) in news.spent.items()]
        head = self.router, self._messages, kind
        return encode(Message(*head, loads, news.sent, news.ended, oldest, news.made, spent, news.failed))

    def in_flight(self) -> list[tuple[str, int]]:
        """The ranks that have anything."""
        return self._table.in_flight()

    def _load(self, worker: str, dp_rank: int) -> RankLoad:
        load = self._table.of(worker, dp_rank)
        amounts = load.requests, load.pending, load.context, load.waiting, load.streamed
        return RankLoad(worker, dp_rank, *amounts, round(load.backlog, 3))

    def _changed(self, worker: str, dp_rank: int) -> None:
        for teller in self._tellers:
            teller.changed((worker, dp_rank))

    def receive(self, data: bytes, interval: float = 0.0) -> None:
        """Take in a message; what is none counts for nothing."""
        try:
            message = decode(data)
        except msgspec.DecodeError as error:
            log.debug("a message of another router cannot be read", reason=str(error))
            return
        if message.router == self.router:
            return
        nearest = self._nearest[message.router] = min(self._nearest.get(message.router, interval), interval)
        if interval > nearest:
            return  # the same came a quicker way
        for response, worker in message.made:
            for made in self.on_made:
                made(response, worker)
        for tenant, requests, tokens in message.spent:
            for spent in self.on_spent:
                spent(tenant, requests, tokens)
        if self.peer_load.hear(message) or message.kind is Kind.HELLO:
            self.tell_everything()
        self._heard()

    def tell_everything(self) -> None:
        """Tell all that is in flight here."""
        for teller in self._tellers:
            teller.everything()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.peer_load.expiry / BEATS)
            self.peer_load.expire()
            known = self.peer_load.routers()
            self._nearest = {router: interval for router, interval in self._nearest.items() if router in known}
            self._heard()
            self.tell_everything()

    def _heard(self) -> None:
        for heard in self.on_heard:
            heard()


@dataclass(slots=True)
class _News:
    """What is to be told. `bytes`: roughly, beside the loads."""

    ranks: dict[tuple[str, int], None] = field(default_factory=dict)
    sent: list[SentPrompt] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    made: list[tuple[str, str]] = field(default_factory=list)
    spent: dict[str, tuple[int, int]] = field(default_factory=dict)
    bytes: int = 0


class _Teller:
    """What is to be told over one channel, gathered for its interval."""

    def __init__(self, sharing: LoadSharing, channel: SharingChannel) -> None:
        self.channel = channel
        self._sharing = sharing
        self._news = _News()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, rank: tuple[str, int]) -> None:
        self._news.ranks[rank] = None
        self._soon(0)

    def sent(self, prompt: SentPrompt) -> None:
        self._news.sent.append(prompt)
        self._soon(len(prompt.prefixes))

    def ended(self, number: int, failed: bool) -> None:
        self._news.ended.append(number)
        if failed:
            self._news.failed.append(number)
        self._soon(8)

    def made(self, response: str, worker: str) -> None:
        self._news.made.append((response, worker))
        self._soon(len(response) + len(worker))

    def spent(self, tenant: str, requests: int, tokens: int) -> None:
        before = self._news.spent.get(tenant, (0, 0))
        self._news.spent[tenant] = before[0] + requests, before[1] + tokens
        self._soon(0)

    def hello(self) -> None:
        """The channel works now: ask the others what they have in flight, and tell them."""
        self.tell(Kind.HELLO)
        self.everything()

    def everything(self) -> None:
        """Tell of all that is in flight."""
        for rank in self._sharing.in_flight():
            self.changed(rank)
        self.tell()

    def tell(self, kind: Kind = Kind.NEWS) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.channel.problem is None:
            self.channel.send(self._sharing.message(kind, self._news))
        self._news = _News()

    def _soon(self, size: int) -> None:
        self._news.bytes += size
        if len(self._news.ranks) >= MAX_LOADS or self._news.bytes >= MAX_BYTES:
            self.tell()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.channel.interval, self.tell)
