"""The decode side of a rank: it finds prefill ranks, grants pages to a room, requests it, and receives its result.

All methods run in the channel's thread.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

from worker.kv_transfer.bootstrap_client import Answer, BootstrapError, PrefillDirectory
from worker.kv_transfer.channel import Timer
from worker.kv_transfer.frames import Done, Failure, Hello, Refusal, RoomRequest, Welcome
from worker.kv_transfer.layout import Pages
from worker.kv_transfer.local import LocalRank
from worker.kv_transfer.quarantine import Quarantine
from worker.kv_transfer.ranks import RankMapping, Source, map_ranks, target_dp_group
from worker.kv_transfer.registry import PrefillRanks, RankAddress
from worker.kv_transfer.rooms import KVPoll, Room
from worker.kv_transfer.transfer import GrantKey, Quiescence, Ranges

RETRY_S = 0.2  # seconds before a lost prefill rank is looked up again
HELLO_AGAIN_S = 1.0  # seconds between greetings until a prefill rank answers


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pages that `KVReceiver.init` requests. `ranges` has the bytes of these pages and of the aux item."""

    pages: Pages
    ranges: Ranges
    aux_index: int | None
    prefix_pages: int


@dataclass(slots=True, eq=False)
class Link:
    """A connection to a prefill rank."""

    target: RankAddress
    welcomed: bool = False
    refused: str = ""
    rooms: set[ReceivingRoom] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class ReceivingRoom:
    """A room of this rank's receiver. `done` has the prefill instances that sent all their pages."""

    room: Room
    bootstrap_addr: str
    prefill_dp_rank: int | None
    wanted: Wanted | None = None
    mapping: RankMapping | None = None
    links: dict[str, tuple[Link, Source]] = field(default_factory=dict)
    granted: bool = False
    done: set[str] = field(default_factory=set)
    timer: Timer | None = None
    settled: bool = False

    @property
    def key(self) -> GrantKey:
        return GrantKey(self.room.number, self.room.generation)


class DecodeSide:
    def __init__(self, local: LocalRank, token: str) -> None:
        self.quarantine = Quarantine(local.engine)
        self._local = local
        self._channel = local.channel
        self._directory = PrefillDirectory(
            token, lambda address, answer: self._channel.post(partial(self._found, address, answer))
        )
        self._prefills: dict[str, PrefillRanks] = {}
        self._links: dict[str, Link] = {}
        self._rooms: dict[int, ReceivingRoom] = {}
        self._unplaced: defaultdict[str, set[ReceivingRoom]] = defaultdict(set)
        self._closed = False

    @property
    def peers(self) -> int:
        return len(self._links)

    # Called by the engine through KVReceiver

    def open(self, receiving: ReceivingRoom) -> None:
        if self._closed:
            self.fail(receiving, "the decode rank was closed")
            return
        self._rooms[receiving.room.number] = receiving
        receiving.timer = self._channel.call_at(receiving.room.deadline, partial(self._expire, receiving))
        self._place(receiving)

    def want(self, receiving: ReceivingRoom, wanted: Wanted) -> None:
        receiving.wanted = wanted
        self._proceed(receiving)

    def fail(self, receiving: ReceivingRoom, reason: str, reported_by: str = "") -> None:
        """Fail a room, notify its prefill ranks, and quarantine its pages."""
        receiving.room.fail(reason)
        if receiving.settled:
            return
        welcomed = [
            link for link, _ in receiving.links.values() if link.welcomed and link.target.instance != reported_by
        ]
        self._settle(receiving)
        if receiving.granted and receiving.wanted is not None:
            self.quarantine.add(receiving.room, receiving.key, len(receiving.wanted.pages))
        else:
            receiving.room.set_quiet()
        for link in welcomed:
            failure = Failure(
                sender=self._local.instance,
                to=link.target.instance,
                room=receiving.room.number,
                generation=receiving.room.generation,
                reason=receiving.room.reason[:2000],
            )
            if self._links.get(link.target.instance) is link:
                self._channel.send(link.target.endpoint, failure)

    # Called for frames of prefill ranks

    def on_welcome(self, message: Welcome) -> None:
        link = self._links.get(message.sender)
        if link is not None:
            link.welcomed = True
            for receiving in list(link.rooms):
                self._proceed(receiving)

    def on_refusal(self, message: Refusal) -> None:
        link = self._links.get(message.about)
        if link is None:
            return
        if message.sender != message.about:
            self._channel.forget(link.target.endpoint)
            self.on_lost(link.target.endpoint, message.reason)
            return
        link.refused = message.reason
        for receiving in list(link.rooms):
            self._proceed(receiving)

    def on_done(self, message: Done) -> None:
        receiving = self._room_of(message)
        if receiving is None or receiving.mapping is None or receiving.links[message.sender][1].dummy:
            return
        receiving.done.add(message.sender)
        if len(receiving.done) == receiving.mapping.required_responses and receiving.room.advance(KVPoll.Success):
            receiving.room.set_quiet()  # every write has landed; only the grant remains
            if self._local.engine.revoke(receiving.key, time.monotonic()) is not Quiescence.QUIESCENT:
                self.quarantine.add(receiving.room, receiving.key, 0)
            self._settle(receiving)

    def on_failure(self, message: Failure) -> None:
        receiving = self._room_of(message)
        if receiving is not None:
            rank = receiving.links[message.sender][1].rank
            self.fail(receiving, f"prefill rank {tuple(rank)}: {message.reason}", reported_by=message.sender)

    def on_lost(self, endpoint: str, reason: str) -> None:
        """Forget the ranks at an endpoint, and fail or search again for their rooms."""
        for link in [link for link in self._links.values() if link.target.endpoint == endpoint]:
            del self._links[link.target.instance]
            for address, ranks in list(self._prefills.items()):
                if link.target in ranks.ranks:
                    del self._prefills[address]
            for receiving in list(link.rooms):
                if receiving.granted:
                    self.fail(receiving, f"the prefill rank was lost: {reason}")
                else:
                    self._unlink(receiving)
                    self._unplaced[receiving.bootstrap_addr].add(receiving)
                    self._channel.call_at(time.monotonic() + RETRY_S, partial(self._place, receiving))

    def close(self) -> None:
        """Fail every room. `join` waits for the threads."""
        self._closed = True
        for receiving in list(self._rooms.values()):
            self.fail(receiving, "the decode rank was closed")

    def join(self) -> None:
        self._directory.close()
        self.quarantine.close()

    # Search for prefill ranks

    def _place(self, receiving: ReceivingRoom) -> None:
        """Find the prefill ranks of a room, and greet the new ones."""
        if receiving.settled or receiving.links:
            return
        address = receiving.bootstrap_addr
        prefill = self._prefills.get(address)
        if prefill is None:
            self._unplaced[address].add(receiving)
            self._directory.ask(address)
            return
        self._forget_unplaced(receiving)
        dp_rank = receiving.prefill_dp_rank
        if dp_rank is None:
            dp_rank = target_dp_group(receiving.room.number, prefill.topology.dp)
        local = self._local
        try:
            mapping = map_ranks(local.topology, local.rank, prefill.topology, dp_rank, local.layout.total_heads)
        except ValueError as error:
            self.fail(receiving, str(error))
            return
        receiving.mapping = mapping
        for source in mapping.sources:
            target = prefill.rank(source.rank)
            link = self._links.setdefault(target.instance, Link(target))
            link.rooms.add(receiving)
            receiving.links[target.instance] = (link, source)
        for link, _ in list(receiving.links.values()):
            if not (link.welcomed or link.refused) and len(link.rooms) == 1:
                self._greet(link)
        self._proceed(receiving)

    def _found(self, address: str, answer: Answer) -> None:
        rooms = [receiving for receiving in self._unplaced.get(address, ()) if not receiving.settled]
        # an unused result is not kept, because its end would not be noticed
        if isinstance(answer, PrefillRanks) and rooms:
            self._prefills[address] = answer
        for receiving in rooms:
            if isinstance(answer, BootstrapError):
                self.fail(receiving, str(answer))
            else:
                self._place(receiving)

    def _greet(self, link: Link) -> None:
        """Send a greeting, and repeat it while the rank has not answered and a room waits for it."""
        if self._links.get(link.target.instance) is not link or link.welcomed or link.refused or not link.rooms:
            return
        hello = Hello(
            sender=self._local.instance,
            to=link.target.instance,
            reply_to=self._channel.endpoint,
            engine=self._local.engine.name,
            engine_address=self._local.engine.address(),
            layout=self._local.layout,
        )
        if self._channel.send(link.target.endpoint, hello):
            self._channel.call_at(time.monotonic() + HELLO_AGAIN_S, partial(self._greet, link))

    # Progress of a room

    def _proceed(self, receiving: ReceivingRoom) -> None:
        """Advance a room as far as possible."""
        if receiving.settled or receiving.granted or not receiving.links:
            return
        links = [link for link, _ in receiving.links.values()]
        refused = next((link for link in links if link.refused), None)
        if refused is not None:
            self.fail(receiving, f"prefill rank {tuple(refused.target.rank)} refused: {refused.refused}")
        elif all(link.welcomed for link in links):
            receiving.room.advance(KVPoll.WaitingForInput)
            if receiving.wanted is not None:
                self._ask_for(receiving, receiving.wanted)

    def _ask_for(self, receiving: ReceivingRoom, wanted: Wanted) -> None:
        if receiving.room.terminal:
            return
        try:
            self._local.engine.grant(receiving.key, wanted.ranges)
            receiving.granted = True
            self._send_requests(receiving, wanted)
        except ValueError as error:
            self.fail(receiving, str(error))

    def _send_requests(self, receiving: ReceivingRoom, wanted: Wanted) -> None:
        assert receiving.mapping is not None
        for link, source in list(receiving.links.values()):
            request = RoomRequest(
                sender=self._local.instance,
                to=link.target.instance,
                reply_to=self._channel.endpoint,
                room=receiving.room.number,
                generation=receiving.room.generation,
                pages=b"" if source.dummy else wanted.pages.astype("<i8").tobytes(),
                prefix_pages=wanted.prefix_pages,
                aux_index=wanted.aux_index if source.sends_aux else None,
                dummy=source.dummy,
                destinations=receiving.mapping.required_dst_info_num,
                time_left=max(0.0, receiving.room.deadline - time.monotonic()),
            )
            if not self._channel.send(link.target.endpoint, request):
                return  # the link is lost, and the room failed with it

    def _room_of(self, message: Done | Failure) -> ReceivingRoom | None:
        """Return the room of a message, or `None` for another attempt or a sender without a part in it."""
        receiving = self._rooms.get(message.room)
        if receiving is None or receiving.room.generation != message.generation:
            return None
        return receiving if message.sender in receiving.links else None

    def _expire(self, receiving: ReceivingRoom) -> None:
        self.fail(receiving, f"timed out in state {receiving.room.state.name}")

    def _settle(self, receiving: ReceivingRoom) -> None:
        receiving.settled = True
        if receiving.timer is not None:
            receiving.timer.cancel()
        self._unlink(receiving)
        self._forget_unplaced(receiving)
        if self._rooms.get(receiving.room.number) is receiving:
            del self._rooms[receiving.room.number]
        self._local.rooms.remove(receiving.room)

    def _unlink(self, receiving: ReceivingRoom) -> None:
        for link, _ in receiving.links.values():
            link.rooms.discard(receiving)
        receiving.links.clear()

    def _forget_unplaced(self, receiving: ReceivingRoom) -> None:
        rooms = self._unplaced.get(receiving.bootstrap_addr)
        if rooms is not None:
            rooms.discard(receiving)
            if not rooms:
                del self._unplaced[receiving.bootstrap_addr]
