"""Telling other routers what changes here, and hearing from them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex
from typing import Any, Protocol

import msgspec
import structlog

from indexer import Target
from router.load import LoadTable
from router.sharing.elsewhere import Elsewhere
from router.sharing.messages import Kind, Message, RankLoad, SentPrompt, decode, encode, told

log = structlog.get_logger()

# How often in the time in which others would forget it everything in flight is told again.
BEATS = 3
# What one message holds at most; the rest goes into the next.
MAX_LOADS = 512
MAX_PREFIX_BYTES = 32 * 1024
# How long a goodbye may take.
FLUSH_SECONDS = 0.5


class Carrier(Protocol):
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
    """Tells the load of `table` over some carriers, and gives what others tell to `elsewhere`.

    `on_heard` is called whenever more is known of the others.
    """

    def __init__(self, table: LoadTable, elsewhere: Elsewhere, carriers: list[Carrier]) -> None:
        self.router = token_hex(8)
        self.elsewhere = elsewhere
        self.on_heard: list[Callable[[], None]] = []
        self._table = table
        self._messages = 0
        self._prompts = 0
        self._open: dict[int, None] = {}
        self._tellers = [_Teller(self, carrier) for carrier in carriers]
        self._tasks: list[asyncio.Task[None]] = []
        if carriers:
            table.on_change.append(self._changed)

    def start(self) -> None:
        """Begin to tell and to hear."""
        for teller in self._tellers:
            running = teller.carrier.run(self.receive, teller.hello)
            self._tasks.append(asyncio.create_task(running, name=f"share load over {teller.carrier.name}"))
        if self._tellers:
            self._tasks.append(asyncio.create_task(self._beat(), name="share load"))

    async def stop(self) -> None:
        """Say goodbye and end."""
        for teller in self._tellers:
            teller.tell(Kind.GONE)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await asyncio.gather(*(t.carrier.flush() for t in self._tellers if t.carrier.problem is None))
        await self.kill()

    async def kill(self) -> None:
        """End without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def sent(self, target: Target, hashes: array[int]) -> Callable[[], None]:
        """A prompt was sent to a target: the hash of each of its chunks. Returns what to call when it ended."""
        prefixes = told(hashes)
        if not self._tellers or not prefixes:
            return lambda: None
        self._prompts = number = self._prompts + 1
        self._open[number] = None
        prompt = SentPrompt(number, target.worker, target.dp_rank, target.model, prefixes.tobytes())
        for teller in self._tellers:
            teller.sent(prompt)

        def ended() -> None:
            if number in self._open:
                del self._open[number]
                for teller in self._tellers:
                    teller.ended(number)

        return ended

    @property
    def carriers(self) -> list[Carrier]:
        """What it is shared over."""
        return [teller.carrier for teller in self._tellers]

    def findings(self) -> list[dict[str, Any]]:
        """What is wrong, for /health."""
        return [
            {"finding": "load_not_shared", "carrier": carrier.name, "detail": carrier.problem}
            for carrier in self.carriers
            if carrier.problem is not None
        ]

    def message(self, kind: Kind, ranks: list[tuple[str, int]], sent: list[SentPrompt], ended: list[int]) -> bytes:
        """The next message: about these ranks and prompts."""
        loads = [self._load(*rank) for rank in ranks]
        self._messages += 1
        oldest = next(iter(self._open), self._prompts + 1)
        return encode(Message(self.router, self._messages, kind, loads, sent, ended, oldest))

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

    def receive(self, data: bytes) -> None:
        """Take in a message; what is none counts for nothing."""
        try:
            message = decode(data)
        except msgspec.DecodeError as error:
            log.debug("a message of another router cannot be read", reason=str(error))
            return
        if message.router == self.router:
            return
        if self.elsewhere.hear(message) or message.kind is Kind.HELLO:
            self.tell_everything()

    def tell_everything(self) -> None:
        """Tell all that is in flight here."""
        for teller in self._tellers:
            teller.everything()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.elsewhere.expiry / BEATS)
            self.elsewhere.expire()
            self.tell_everything()


class _Teller:
    """What is to be told over one carrier, gathered for its interval."""

    def __init__(self, sharing: LoadSharing, carrier: Carrier) -> None:
        self.carrier = carrier
        self._sharing = sharing
        self._ranks: dict[tuple[str, int], None] = {}
        self._sent: list[SentPrompt] = []
        self._ended: list[int] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, rank: tuple[str, int]) -> None:
        self._ranks[rank] = None
        if len(self._ranks) >= MAX_LOADS:
            self.tell()
        else:
            self._soon()

    def sent(self, prompt: SentPrompt) -> None:
        self._sent.append(prompt)
        self._bytes += len(prompt.prefixes)
        if self._bytes >= MAX_PREFIX_BYTES:
            self.tell()
        else:
            self._soon()

    def ended(self, number: int) -> None:
        self._ended.append(number)
        self._soon()

    def hello(self) -> None:
        """The carrier works now: ask the others what they have in flight, and tell them."""
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
        if self.carrier.problem is None:
            self.carrier.send(self._sharing.message(kind, list(self._ranks), self._sent, self._ended))
        self._ranks, self._sent, self._ended, self._bytes = {}, [], [], 0

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.carrier.interval, self.tell)
