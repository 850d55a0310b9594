"""The sharing of load: sends local changes to other routers, and applies theirs."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any, Protocol

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from indexer import Target
from router.cache_state.in_flight_prefixes import ReleaseCallback
from router.fleet.fleet import Fleet
from router.fleet.worker import EngineState
from router.load.load_messages import EngineChange, Kind, Message, RankLoad, SentPrompt, decode, encode, shared_hashes
from router.load.peer_load import PeerLoad
from router.load.target_load import LoadTable

log = structlog.get_logger()

# The number of times that everything in flight is repeated within the expiry of peers.
BEATS = 3
# The most loads and bytes of one message. The rest is sent in the next message.
MAX_LOADS = 512
MAX_BYTES = 32 * 1024
# The most workers whose engines' states are kept.
MAX_ENGINES = 65_536
# The most seconds for the last message.
FLUSH_SECONDS = 0.5


class SharingChannel(Protocol):
    """A channel for messages to and from other routers.

    - `interval`: the seconds for which changes are gathered into one message.
    """

    name: str
    interval: float
    problem: str | None

    def send(self, message: bytes) -> None:
        """Send a message to all other routers, at once or soon. A message that cannot be sent is dropped."""

    async def run(self, receive: Callable[[bytes], None], connected: Callable[[], None]) -> None:
        """Receive messages until cancelled. Reconnects by itself, and calls `connected` each time it works again."""

    async def flush(self) -> None:
        """Wait until all messages have left."""


class LoadSharing:
    """Sends the load of a table over its channels, and applies the load of other routers to `peer_load`.

    - `on_response`: called with a response that another router received, and the URL of its worker.
    - `on_spent`: called with a tenant, and the requests and tokens that it used at another router.
    - `on_finished`: called with the name of a session that a caller ended at another router.
    - `on_engine`: called with the URL of a worker, and what another router's command did to its engine.
    """

    def __init__(self, table: LoadTable, peer_load: PeerLoad, channels: list[SharingChannel]) -> None:
        self.router = token_hex(8)
        self.peer_load = peer_load
        self.on_update: list[Callable[[], None]] = []
        self.on_response: list[Callable[[str, str], None]] = []
        self.on_spent: list[Callable[[str, int, int], None]] = []
        self.on_finished: list[Callable[[str], None]] = []
        self.on_engine: list[Callable[[str, EngineState], None]] = []
        self.engines: dict[str, EngineChange] = {}  # the latest of each worker
        self._table = table
        table.peers_of = peer_load.of
        peer_load.on_change.append(table.peers_changed)
        self._messages = 0
        self._prompts = 0
        self._open: dict[int, None] = {}
        self.channels = list(channels)
        self._outboxes = [_Outbox(self, channel) for channel in channels]
        self._tasks: list[asyncio.Task[None]] = []
        self._routers = 1  # heard while all channels worked
        self._nearest: dict[str, float] = {}  # by router: the interval of its fastest channel

    def start(self) -> None:
        """Start to send and to receive."""
        for outbox in self._outboxes:
            running = outbox.channel.run(partial(self.receive, interval=outbox.channel.interval), outbox.hello)
            self._tasks.append(asyncio.create_task(running, name=f"share load over {outbox.channel.name}"))
        if self._outboxes:
            self._tasks.append(asyncio.create_task(self._beat(), name="share load"))

    def parts(self) -> float:
        """Return into how many parts routers divide what each may use of a worker: 1 while all of them are heard.

        While a channel does not work, the routers that were heard before it failed may still send requests.
        """
        if self._works():
            return 1.0
        return max(self._routers / (1 + len(self.peer_load.routers())), 1.0)

    async def stop(self) -> None:
        """Report that this router stops, and stop."""
        for outbox in self._outboxes:
            outbox.send(Kind.GONE)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await asyncio.gather(*(t.channel.flush() for t in self._outboxes if t.channel.problem is None))
        await self.kill()

    async def kill(self) -> None:
        """Stop without a report."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def sent(self, target: Target, hashes: array[int], session: int = 0, tokens: int = 0) -> ReleaseCallback | None:
        """Report a prompt's hashes. Return the callback for the end of its request; None if it is not shared.

        - `session`: the number of its session; 0 if it has none.
        - `tokens`: the number of its tokens.
        """
        if not self._outboxes or not (prefixes := shared_hashes(hashes)):
            return None
        self._prompts = number = self._prompts + 1
        self._open[number] = None
        prompt = SentPrompt(number, target.worker, target.dp_rank, target.model, prefixes.tobytes(), session, tokens)
        for outbox in self._outboxes:
            outbox.sent(prompt)

        def ended(failed: bool = False) -> None:
            if number in self._open:
                del self._open[number]
                for outbox in self._outboxes:
                    outbox.ended(number, failed)

        return ended

    def share_response(self, response: str, worker: str) -> None:
        """Report a stored response, and the URL of the worker that made it."""
        for outbox in self._outboxes:
            outbox.response(response, worker)

    def spent(self, tenant: str, requests: int, tokens: int) -> None:
        """Report the requests and tokens that a tenant used."""
        for outbox in self._outboxes:
            outbox.spent(tenant, requests, tokens)

    def share_finished(self, session: str) -> None:
        """Report the name of a session that its caller ended."""
        for outbox in self._outboxes:
            outbox.finished(session)

    def share_engine(self, worker: str, state: EngineState) -> None:
        """Report what a command did to a worker's engine."""
        if self._outboxes:
            change = EngineChange(worker, state.at, state.paused, sorted(state.released), state.lost_at)
            self.engines[worker] = change
            for outbox in self._outboxes:
                outbox.engine(change)

    def forget_engine(self, worker: str) -> None:
        """Forget what commands did to a worker that was removed or has a new process."""
        self.engines.pop(worker, None)

    def findings(self) -> list[dict[str, Any]]:
        """Return the channels that do not work, as findings of /health."""
        return [
            {"finding": "load_not_shared", "carrier": channel.name, "detail": channel.problem}
            for channel in self.channels
            if channel.problem is not None
        ]

    def message(self, kind: Kind, changes: _Changes) -> bytes:
        """Return the encoded next message of this router."""
        self._messages += 1
        oldest = next(iter(self._open), self._prompts + 1)
        loads = [self._load(*rank) for rank in changes.ranks]
        spent = [(tenant, requests, tokens) for tenant, (requests, tokens) in changes.spent.items()]
        head = self.router, self._messages, kind
        engines, ended, failed = list(changes.engines.values()), changes.ended, changes.failed
        made, finished = changes.made, changes.finished
        return encode(Message(*head, loads, changes.sent, ended, oldest, made, spent, failed, engines, finished))

    def in_use(self) -> list[tuple[str, int]]:
        """Return the DP ranks that have requests in flight, or that live sessions need."""
        return self._table.in_use()

    def _load(self, worker: str, dp_rank: int) -> RankLoad:
        load = self._table.of(worker, dp_rank)
        amounts = load.requests, load.pending, load.context, load.waiting, load.streamed
        live = round(self._table.live_of(worker, dp_rank))
        return RankLoad(worker, dp_rank, *amounts, round(load.backlog, 3), live, load.memory, load.prefill)

    def changed(self, worker: str, dp_rank: int) -> None:
        """Send the load of a DP rank soon, because it changed."""
        for outbox in self._outboxes:
            outbox.changed((worker, dp_rank))

    def receive(self, data: bytes, interval: float = 0.0) -> None:
        """Apply another router's message, if it is valid, from a channel with this interval."""
        try:
            message = decode(data)
        except ValueError as error:
            log.debug("a message of another router cannot be read", reason=str(error))
            return
        if message.router == self.router:
            return
        nearest = self._nearest[message.router] = min(self._nearest.get(message.router, interval), interval)
        if interval > nearest:
            return  # a faster channel has delivered it
        for response, worker in message.made:
            for on_response in self.on_response:
                on_response(response, worker)
        for tenant, requests, tokens in message.spent:
            for on_spent in self.on_spent:
                on_spent(tenant, requests, tokens)
        for session in message.finished:
            for on_finished in self.on_finished:
                on_finished(session)
        for change in message.engines:
            known = self.engines.get(change.worker)
            if (known is None or change.at > known.at) and len(self.engines) < MAX_ENGINES:
                self.engines[change.worker] = change
                state = EngineState(change.at, change.paused, frozenset(change.released), change.lost_at)
                for on_engine in self.on_engine:
                    on_engine(change.worker, state)
        if self.peer_load.apply(message) or message.kind is Kind.HELLO:
            self.send_everything()
        self._updated()

    def send_everything(self) -> None:
        """Send all that is in flight here."""
        for outbox in self._outboxes:
            outbox.everything()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.peer_load.expiry / BEATS)
            self.peer_load.expire()
            known = self.peer_load.routers()
            if self._works():
                self._routers = 1 + len(known)
            self._nearest = {router: interval for router, interval in self._nearest.items() if router in known}
            self._updated()
            self.send_everything()

    def _works(self) -> bool:
        return all(channel.problem is None for channel in self.channels)

    def _updated(self) -> None:
        for on_update in self.on_update:
            on_update()


@dataclass(slots=True)
class _Changes:
    """The contents of the next message. `bytes`: its approximate size without the loads."""

    ranks: dict[tuple[str, int], None] = field(default_factory=dict)
    sent: list[SentPrompt] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    made: list[tuple[str, str]] = field(default_factory=list)
    spent: dict[str, tuple[int, int]] = field(default_factory=dict)
    engines: dict[str, EngineChange] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    bytes: int = 0


class _Outbox:
    """The changes to send over one channel, gathered for its interval."""

    def __init__(self, sharing: LoadSharing, channel: SharingChannel) -> None:
        self.channel = channel
        self._sharing = sharing
        self._changes = _Changes()
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, rank: tuple[str, int]) -> None:
        self._changes.ranks[rank] = None
        self._soon(0)

    def sent(self, prompt: SentPrompt) -> None:
        self._changes.sent.append(prompt)
        self._soon(len(prompt.prefixes))

    def ended(self, number: int, failed: bool) -> None:
        self._changes.ended.append(number)
        if failed:
            self._changes.failed.append(number)
        self._soon(8)

    def response(self, response: str, worker: str) -> None:
        self._changes.made.append((response, worker))
        self._soon(len(response) + len(worker))

    def spent(self, tenant: str, requests: int, tokens: int) -> None:
        before = self._changes.spent.get(tenant, (0, 0))
        self._changes.spent[tenant] = before[0] + requests, before[1] + tokens
        self._soon(0)

    def engine(self, change: EngineChange) -> None:
        self._changes.engines[change.worker] = change
        self._soon(len(change.worker) + 64)

    def finished(self, session: str) -> None:
        self._changes.finished.append(session)
        self._soon(len(session))

    def hello(self) -> None:
        """Request everything that the others have in flight, and send the same, because the channel works again."""
        self.send(Kind.HELLO)
        self.everything()

    def everything(self) -> None:
        """Send all that is in flight."""
        for rank in self._sharing.in_use():
            self.changed(rank)
        for change in self._sharing.engines.values():
            self.engine(change)
        self.send()

    def send(self, kind: Kind = Kind.NEWS) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.channel.problem is None:
            self.channel.send(self._sharing.message(kind, self._changes))
        self._changes = _Changes()

    def _soon(self, size: int) -> None:
        self._changes.bytes += size
        if len(self._changes.ranks) >= MAX_LOADS or self._changes.bytes >= MAX_BYTES:
            self.send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.channel.interval, self.send)


class SharingCollector(Collector):
    """The metrics of the channels, of the other routers, and of their requests in flight."""

    def __init__(self, sharing: LoadSharing, fleet: Fleet) -> None:
        self._sharing = sharing
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvrouter_sharing_up", "1 while load is shared over this carrier", labels=["carrier"])
        for channel in self._sharing.channels:
            up.add_metric([channel.name], float(channel.problem is None))
        peer_load = self._sharing.peer_load
        routers = GaugeMetricFamily(
            "kvrouter_sharing_routers", "Other routers that sent a message within the expiry", len(peer_load.routers())
        )
        labels = ["worker", "dp_rank"]
        requests = GaugeMetricFamily(
            "kvrouter_requests_elsewhere", "Requests in flight from other routers", labels=labels
        )
        for worker in self._fleet.workers:
            for dp_rank in worker.ranks():
                requests.add_metric([worker.name, str(dp_rank)], peer_load.of(worker.url, dp_rank).requests)
        yield from (up, routers, requests)
