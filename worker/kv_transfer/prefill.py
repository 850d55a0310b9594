"""The prefill side of a rank: decode ranks request rooms, and the engine fills them chunk by chunk.

All methods run in the channel's thread, except `Destination.begin` and `end`, which the peers' writers call.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from worker.kv_transfer.channel import Timer
from worker.kv_transfer.frames import Done, Failure, Hello, Refusal, RoomRequest, Welcome
from worker.kv_transfer.layout import Pages, aux_writes, kv_writes, mismatch
from worker.kv_transfer.local import MAX_ROOMS, LocalRank
from worker.kv_transfer.ranks import page_share
from worker.kv_transfer.rooms import KVPoll, RecentRooms
from worker.kv_transfer.sending import Chunk, Destination, PeerWriter, SendingRoom, WriteTask
from worker.kv_transfer.transfer import GrantKey, Writes, join_writes

MAX_WAITING_BYTES = 256 << 20  # bytes of waiting page indices


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request for a room without a sender."""

    request: RoomRequest
    timer: Timer


class PrefillSide:
    def __init__(self, local: LocalRank) -> None:
        self._local = local
        self._channel = local.channel
        self._peers: dict[str, PeerWriter] = {}
        self._stopped: list[PeerWriter] = []
        self._rooms: dict[int, SendingRoom] = {}
        self._waiting: dict[int, dict[str, _Waiting]] = {}
        self._waiting_bytes = 0
        self._failed = RecentRooms(local.room_timeout_s)  # failed on this rank
        self._aborted = RecentRooms(local.room_timeout_s)  # aborted by decode before the sender existed
        self._closed = False

    @property
    def peers(self) -> int:
        return len(self._peers)

    @property
    def waiting_requests(self) -> int:
        return sum(map(len, list(self._waiting.values())))

    # Called by the engine through KVSender

    def open(self, sending: SendingRoom) -> None:
        room = sending.room
        if self._closed:
            self.fail(sending, "the prefill rank was closed")
            return
        self._failed.forget(room.number)
        self._rooms[room.number] = sending
        aborted = self._aborted.get(room.number)
        if aborted is not None:
            self.fail(sending, aborted)
            return
        self._set_deadline(sending, room.deadline)
        for waiting in list(self._waiting.get(room.number, {}).values()):
            if self._drop_waiting(waiting):
                self._join(sending, waiting.request)

    def start(self, sending: SendingRoom, pages: int, aux_index: int | None) -> None:
        sending.pages, sending.aux_index = pages, aux_index
        self._flush(sending)

    def add_chunk(self, sending: SendingRoom, chunk: Chunk) -> None:
        if not sending.room.terminal:
            sending.chunks.append(chunk)
            self._flush(sending)

    def fail(self, sending: SendingRoom, reason: str) -> None:
        """Fail a room, notify every destination without all its pages, and forget the room."""
        room = sending.room
        room.fail(reason)
        if sending.settled:
            return
        self._settle(sending)
        self._failed.add(room.number, room.reason)
        for destination in list(sending.destinations.values()):
            if not destination.done:
                self._send_failure(destination.request, room.reason)
        self._quiet_when_unread(sending)

    # Called for frames of decode ranks

    def on_hello(self, message: Hello) -> None:
        reason = self._refuse(message)
        if reason is not None:
            refusal = Refusal(sender=self._local.instance, to=message.sender, about=self._local.instance, reason=reason)
            self._channel.send(message.reply_to, refusal)
            return
        if not self._channel.send(message.reply_to, Welcome(sender=self._local.instance, to=message.sender)):
            return
        for instance in [key for key, peer in self._peers.items() if peer.endpoint == message.reply_to]:
            if instance != message.sender:
                self._drop_peer(instance, f"{message.reply_to} is another rank's now")
        # the decode rank lost the connection, and with it the rooms that it had requested
        if message.sender in self._peers:
            self._drop_rooms(message.sender, "the decode rank lost its connection")
        else:
            self._peers[message.sender] = PeerWriter(
                self._local.engine, message.reply_to, message.layout, message.engine_address
            )

    def on_room(self, request: RoomRequest) -> None:
        failed = self._failed.get(request.room)
        if request.sender not in self._peers:
            self._reject(request, "the prefill rank does not know this decode rank: send a hello first")
        elif failed is not None:
            self._send_failure(request, failed)
        elif (problem := self._check(request)) is not None:
            self._reject(request, problem)
        elif request.room in self._rooms:
            self._join(self._rooms[request.room], request)
        elif len(self._waiting) >= MAX_ROOMS or self._waiting_bytes + len(request.pages) > MAX_WAITING_BYTES:
            self._reject(request, "too many requests wait for the prefill rank")
        else:
            self._wait(request)

    def on_failure(self, message: Failure) -> None:
        """Handle a room that a decode rank aborted, before or after its request."""
        if message.sender not in self._peers:
            return
        reason = f"decode aborted: {message.reason}"
        waiting = self._waiting.get(message.room, {}).get(message.sender)
        if waiting is not None and waiting.request.generation == message.generation:
            self._drop_waiting(waiting)
        self._abort_room(message.room, message.sender, reason)
        sending = self._rooms.get(message.room)
        destination = sending.destinations.get(message.sender) if sending else None
        if sending and destination and destination.request.generation == message.generation and not destination.done:
            self.fail(sending, reason)

    def on_lost(self, endpoint: str, reason: str) -> None:
        for instance in [key for key, peer in self._peers.items() if peer.endpoint == endpoint]:
            self._drop_peer(instance, reason)

    def close(self) -> None:
        """Fail every room. `join` waits for the threads."""
        self._closed = True
        for sending in list(self._rooms.values()):
            self.fail(sending, "the prefill rank was closed")
        for by_peer in list(self._waiting.values()):
            for waiting in list(by_peer.values()):
                self._send_failure(waiting.request, "the prefill rank was closed")
                self._drop_waiting(waiting)
        for peer in self._peers.values():
            peer.stop()

    def join(self) -> None:
        for peer in (*self._peers.values(), *self._stopped):
            peer.join()

    # Requests

    def _refuse(self, message: Hello) -> str | None:
        engine = self._local.engine.name
        if message.engine != engine:
            return f"transfer engine differs: prefill has {engine}, decode {message.engine}"
        try:
            message.layout.check()
        except ValueError as error:
            return f"decode's layout: {error}"
        return mismatch(self._local.layout, message.layout)

    def _check(self, request: RoomRequest) -> str | None:
        layout = self._peers[request.sender].layout
        try:
            pages = request.page_array()
            layout.check_pages(pages)
            if request.aux_index is not None:
                layout.check_aux(request.aux_index)
        except ValueError as error:
            return f"decode's request: {error}"
        return None

    def _wait(self, request: RoomRequest) -> None:
        earlier = self._waiting.get(request.room, {}).get(request.sender)
        if earlier is not None:  # an attempt that decode has aborted
            self._drop_waiting(earlier)
        timeout = min(request.time_left, self._local.room_timeout_s)
        reason = f"timed out: the prefill engine did not begin this room within {timeout:g} s"
        timer = self._channel.call_at(time.monotonic() + timeout, partial(self._expire_waiting, request, reason))
        self._waiting.setdefault(request.room, {})[request.sender] = _Waiting(request, timer)
        self._waiting_bytes += len(request.pages)

    def _expire_waiting(self, request: RoomRequest, reason: str) -> None:
        waiting = self._waiting.get(request.room, {}).get(request.sender)
        if waiting is not None and waiting.request is request:
            self._drop_waiting(waiting)
            self._reject(request, reason)

    def _reject(self, request: RoomRequest, reason: str) -> None:
        """Reject a request. Its room fails, now or when its sender opens it."""
        self._send_failure(request, reason)
        self._abort_room(request.room, request.sender, reason)

    def _abort_room(self, number: int, instance: str, reason: str) -> None:
        sending = self._rooms.get(number)
        if sending is None:
            self._aborted.add(number, reason)
        elif instance not in sending.destinations and not sending.complete:
            self.fail(sending, reason)

    def _drop_peer(self, instance: str, reason: str) -> None:
        peer = self._peers.pop(instance)
        peer.stop()
        self._stopped = [old for old in self._stopped if old.alive] + [peer]
        self._drop_rooms(instance, f"the decode rank was lost: {reason}")

    def _drop_rooms(self, instance: str, reason: str) -> None:
        for sending in list(self._rooms.values()):
            if instance in sending.destinations:
                self.fail(sending, reason)
        for waiting in [by_peer[instance] for by_peer in self._waiting.values() if instance in by_peer]:
            if self._drop_waiting(waiting):
                self._abort_room(waiting.request.room, instance, reason)

    def _drop_waiting(self, waiting: _Waiting) -> bool:
        by_peer = self._waiting.get(waiting.request.room, {})
        if by_peer.get(waiting.request.sender) is not waiting:
            return False
        waiting.timer.cancel()
        self._waiting_bytes -= len(waiting.request.pages)
        del by_peer[waiting.request.sender]
        if not by_peer:
            del self._waiting[waiting.request.room]
        return True

    def _join(self, sending: SendingRoom, request: RoomRequest) -> None:
        """Add a decode rank to a room that has a sender."""
        known = sending.destinations.get(request.sender)
        if known is not None and known.request.generation == request.generation:
            return
        if known is not None:
            self.fail(sending, "decode began another attempt")
            self._send_failure(request, "the prefill rank had begun an earlier attempt: use a new room for a retry")
        elif sending.complete:
            self._send_failure(request, "duplicate room: the prefill rank already sends it to other decode ranks")
        elif sending.required not in (None, request.destinations):
            reason = f"decode ranks disagree: {sending.required} or {request.destinations} of them for a prefill rank"
            self._send_failure(request, reason)
            self.fail(sending, reason)
        else:
            sending.required = request.destinations
            writer = self._peers[request.sender]
            sending.destinations[request.sender] = Destination(sending.room, request, writer)
            self._set_deadline(sending, min(sending.room.deadline, time.monotonic() + request.time_left))
            if sending.complete:
                sending.room.advance(KVPoll.WaitingForInput)
                self._flush(sending)

    def _set_deadline(self, sending: SendingRoom, deadline: float) -> None:
        if sending.timer is not None:
            sending.timer.cancel()
        sending.room.deadline = deadline
        sending.timer = self._channel.call_at(deadline, partial(self._expire, sending))

    def _expire(self, sending: SendingRoom) -> None:
        joined = f"{len(sending.destinations)} of {sending.required or 'unknown'} decode ranks requested it"
        self.fail(sending, f"timed out in state {sending.room.state.name}: {joined}")

    # Chunks

    def _flush(self, sending: SendingRoom) -> None:
        if sending.settled or not sending.complete or sending.pages is None:
            return
        for destination in sending.destinations.values():
            wanted = len(destination.pages) + destination.request.prefix_pages
            if not destination.request.dummy and wanted != sending.pages:
                self.fail(sending, f"number of pages differs: prefill has {sending.pages}, decode {wanted}")
                return
        chunks, sending.chunks = sending.chunks, []
        for chunk in chunks:
            sending.room.advance(KVPoll.Transferring)
            for destination in list(sending.destinations.values()):
                self._submit(sending, destination, chunk)

    def _submit(self, sending: SendingRoom, destination: Destination, chunk: Chunk) -> None:
        if sending.settled:
            return
        destination.has_last = destination.has_last or chunk.is_last
        aux = destination.request.aux_index if chunk.is_last else None
        if aux is not None and sending.aux_index is None:
            self.fail(sending, f"decode wants aux item {aux}, but init() of the sender had no aux_index")
            return
        sources, targets = self._part(sending, destination, chunk)
        if not len(sources) and aux is None:
            self._finish(sending, destination)
            return
        destination.queued += 1
        task = WriteTask(
            GrantKey(sending.room.number, destination.request.generation),
            sending.room.deadline,
            destination.begin,
            partial(self._plan, destination, sources, targets, sending.aux_index if aux is not None else None),
            lambda error: self._after_write(sending, destination, error),
        )
        if not destination.writer.submit(task):
            destination.queued -= 1
            self.fail(sending, f"too many writes wait for the decode rank at {destination.writer.endpoint}")

    def _part(self, sending: SendingRoom, destination: Destination, chunk: Chunk) -> tuple[Pages, Pages]:
        """Return the pages of a chunk that this rank sends: its CP share, without the prefix that decode holds."""
        assert sending.pages is not None
        nothing = np.empty(0, np.int64)
        if destination.request.dummy:
            return nothing, nothing
        share = page_share(sending.pages, self._local.topology.cp, self._local.rank.cp)
        prefix = destination.request.prefix_pages
        begin = max(chunk.start, share.start, prefix)
        end = max(begin, min(chunk.start + len(chunk.pages), share.stop))
        return chunk.pages[begin - chunk.start : end - chunk.start], destination.pages[begin - prefix : end - prefix]

    def _plan(self, destination: Destination, sources: Pages, targets: Pages, aux_index: int | None) -> Writes:
        ours, theirs = self._local.layout, destination.writer.layout
        parts = []
        if len(sources):
            parts.append(kv_writes(ours, theirs, sources, targets))
        if aux_index is not None and destination.request.aux_index is not None:
            parts.append(aux_writes(ours, theirs, aux_index, destination.request.aux_index))
        return join_writes(*parts)

    def _after_write(self, sending: SendingRoom, destination: Destination, error: str) -> None:
        """Finish a write, in the writer's thread."""
        destination.end()
        self._channel.post(partial(self._written, sending, destination, error))

    def _written(self, sending: SendingRoom, destination: Destination, error: str) -> None:
        destination.queued -= 1
        if error and not sending.settled:
            self.fail(sending, error)
        elif sending.room.terminal:
            self._quiet_when_unread(sending)
        else:
            self._finish(sending, destination)

    def _finish(self, sending: SendingRoom, destination: Destination) -> None:
        """Report success to a complete destination, and end the room after the last one."""
        if not destination.has_last or destination.queued or destination.done:
            return
        destination.done = True
        request = destination.request
        if not request.dummy:
            done = Done(
                sender=self._local.instance, to=request.sender, room=request.room, generation=request.generation
            )
            self._channel.send(destination.writer.endpoint, done)
        if all(other.done for other in sending.destinations.values()) and sending.room.advance(KVPoll.Success):
            self._settle(sending)
            sending.room.set_quiet()

    def _settle(self, sending: SendingRoom) -> None:
        sending.settled = True
        sending.chunks.clear()
        if sending.timer is not None:
            sending.timer.cancel()
        if self._rooms.get(sending.room.number) is sending:
            del self._rooms[sending.room.number]
        self._local.rooms.remove(sending.room)

    def _quiet_when_unread(self, sending: SendingRoom) -> None:
        if not any(destination.writing for destination in sending.destinations.values()):
            sending.room.set_quiet()

    def _send_failure(self, request: RoomRequest, reason: str) -> None:
        failure = Failure(
            sender=self._local.instance,
            to=request.sender,
            room=request.room,
            generation=request.generation,
            reason=reason[:2000],
        )
        self._channel.send(request.reply_to, failure)
