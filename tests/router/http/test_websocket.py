"""One side of a relay of WebSockets: its turns, what it holds and counts, and how it ends. Over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import CLIENT, Protocol, State

from http_api.errors import RequestError
from router.http import websocket
from router.http.arriving import ArrivingBytes, ArrivingMessage
from router.http.websocket import SharedWebSockets, WebSocketPeer, WebSocketRelay


class Relay(WebSocketRelay):
    """An owner that keeps what it receives."""

    def __init__(self) -> None:
        self.frames: list[tuple[Opcode, bytes, bool]] = []
        self.batches: list[int] = []
        self.ends: list[tuple[int | None, str]] = []
        self.pauses: list[bool] = []

    def received(self, peer: WebSocketPeer, frames: list[Frame]) -> None:  # noqa: ARG002
        self.frames += [(frame.opcode, bytes(frame.data), frame.fin) for frame in frames]
        self.batches.append(len(frames))

    def ended(self, peer: WebSocketPeer, code: int | None, reason: str) -> None:  # noqa: ARG002
        self.ends.append((code, reason))

    def paused(self, peer: WebSocketPeer, is_paused: bool) -> None:  # noqa: ARG002
        self.pauses.append(is_paused)


class Side:
    """A client's socket, and the peer that serves it."""

    def __init__(self, client: socket.socket, peer: WebSocketPeer, relay: Relay) -> None:
        self.client = client
        self.peer = peer
        self.relay = relay

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.client, data)

    async def closed_with(self) -> int | None:
        """Return the code of the frame that closes the WebSocket."""
        protocol = Protocol(CLIENT, state=State.OPEN, max_size=None)
        async with asyncio.timeout(60):
            while protocol.close_rcvd is None:
                data = await asyncio.get_running_loop().sock_recv(self.client, 65_536)
                if not data:
                    return None
                protocol.receive_data(data)
        return protocol.close_rcvd.code


@asynccontextmanager
async def side(shared: SharedWebSockets) -> AsyncIterator[Side]:
    relay = Relay()
    peer = WebSocketPeer(relay, False, shared)
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    await shared.loop.connect_accepted_socket(lambda: peer, ours)  # type: ignore[arg-type, return-value]
    try:
        yield Side(theirs, peer, relay)
    finally:
        peer.abort()
        theirs.close()
        await until(lambda: peer.lost)


def shared_websockets(limit: int = 2**30, stall_timeout: float = 60.0) -> SharedWebSockets:
    return SharedWebSockets(asyncio.get_running_loop(), ArrivingBytes(limit), stall_timeout)


def frame(opcode: Opcode, data: bytes = b"", fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


async def test_others_have_turns_between_the_frames_of_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which each slice takes a whole turn, the loop continues after each slice."""
    times = iter(range(10**9))
    monkeypatch.setattr(websocket, "_clock", lambda: float(next(times)))
    async with side(shared_websockets()) as one, side(shared_websockets()) as two:
        for each in (one, two):
            await each.send(frame(Opcode.TEXT, b"x") * 10_000)
        turns = 0
        while len(one.relay.frames) < 10_000 or len(two.relay.frames) < 10_000:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 30
        assert max(one.relay.batches + two.relay.batches) < 500


async def test_all_websockets_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(10**9))
    monkeypatch.setattr(websocket, "_clock", lambda: float(next(times)))
    shared = shared_websockets()
    async with side(shared) as one, side(shared) as two:
        for each in (one, two):
            await each.send(frame(Opcode.TEXT, b"x") * 10_000)
        while len(one.relay.frames) < 10_000 or len(two.relay.frames) < 10_000:
            before = len(one.relay.batches) + len(two.relay.batches)
            await asyncio.sleep(0)
            assert len(one.relay.batches) + len(two.relay.batches) <= before + 1


async def test_pings_of_a_peer_that_does_not_read_are_not_answered_without_end() -> None:
    shared = shared_websockets()
    async with side(shared) as one:
        one.peer._idle_frames = shared.idle_frames.connected("")
        one.peer._idle_frames._left = one.peer._idle_frames._most = 1e9
        sends = asyncio.create_task(one.send(frame(Opcode.PING, bytes(125)) * 100_000))
        await until(lambda: one.relay.pauses)
        done, _ = await asyncio.wait([sends], timeout=0.3)
        assert not done
        sends.cancel()
        assert one.relay.pauses == [True]
        transport = one.peer._transport
        assert transport is not None
        assert transport.get_write_buffer_size() < 500_000


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.PONG, Opcode.TEXT])
async def test_frames_without_data_have_a_budget(opcode: Opcode) -> None:
    async with side(shared_websockets()) as one:
        reads = asyncio.create_task(one.closed_with())
        await one.send(frame(opcode) * 20_000)
        assert await reads == CloseCode.POLICY_VIOLATION
        assert one.relay.ends == [(CloseCode.POLICY_VIOLATION, "too many frames without data")]


async def test_frames_with_data_earn_pings() -> None:
    async with side(shared_websockets()) as one:
        await one.send((frame(Opcode.TEXT, b"x") + frame(Opcode.PONG)) * 20_000)
        await until(lambda: len(one.relay.frames) == 20_000)
        assert one.relay.ends == []


async def test_unfinished_messages_stay_within_the_limit_of_arriving_bytes() -> None:
    """The largest message is refused, and what its sender still sends is ignored."""
    limit = 3_000_000
    shared = shared_websockets(limit)
    message = frame(Opcode.TEXT, bytes(3_000_000))
    async with side(shared) as small, side(shared) as medium, side(shared) as large:
        await small.send(message[:1000])
        shorter = frame(Opcode.TEXT, bytes(1_500_000))
        await medium.send(shorter[:400_000])
        await until(lambda: shared.arriving.bytes > 401_000)
        sends = asyncio.create_task(large.send(message))
        assert await large.closed_with() == CloseCode.TRY_AGAIN_LATER
        await sends
        assert shared.arriving.bytes < 1_000_000
        await medium.send(shorter[400_000:1_400_000])
        await until(lambda: shared.arriving.bytes > 1_400_000)
        await medium.send(shorter[1_400_000:])
        await until(lambda: medium.relay.frames)
        assert [each.relay.ends for each in (small, medium)] == [[], []]
    assert not shared.arriving.bytes


async def test_received_bytes_are_released_when_the_connection_breaks() -> None:
    shared = shared_websockets()
    async with side(shared) as one:
        one.peer.hold_back(True)
        one.peer.data_received(frame(Opcode.TEXT, b"x") * 1000 + frame(Opcode.TEXT, bytes(1000))[:-1])
        assert shared.arriving.bytes > 7000
        one.peer.abort()
        await until(lambda: one.peer.lost)
        assert one.relay.ends == []
        one.peer.hold_back(False)
        await until(lambda: one.relay.ends)
        assert len(one.relay.frames) == 1000
    assert not shared.arriving.bytes


def test_message_beyond_its_share_makes_room_for_a_body() -> None:
    arriving = ArrivingBytes(100)
    refused: list[Message] = []

    class Message(ArrivingMessage):
        def refuse(self) -> None:
            refused.append(self)

    large, small = Message(), Message()
    arriving.hold(small, 10)
    arriving.hold(large, 60)
    with pytest.raises(RequestError) as error:
        arriving.add(0, 50)  # larger than the share itself
    assert error.value.status == 503
    assert refused == []
    arriving.add(0, 33)
    assert refused == [large]
    assert arriving.bytes == 43


async def test_each_peer_that_does_not_read_has_its_own_time() -> None:
    """One side continues to read; the other one is closed in time all the same."""
    shared = shared_websockets(stall_timeout=0.2)
    async with side(shared) as one, side(shared) as two:
        for each in (one, two):
            each.peer.pause_writing()
        one.peer.resume_writing()
        await until(lambda: two.peer.lost)
        assert two.relay.ends == [(CloseCode.ABNORMAL_CLOSURE, "")]
        assert not one.peer.lost


async def test_closing_peer_that_does_not_read_is_not_read() -> None:
    async with side(shared_websockets()) as one:
        one.peer.pause_writing()
        one.peer.close(1000, "")
        await one.send(frame(Opcode.PING, b"x") * 10)
        await asyncio.sleep(0.02)
        transport = one.peer._transport
        assert transport is not None
        assert not transport.is_reading()
        one.peer.resume_writing()
        assert transport.is_reading()


MESSAGES = st.lists(
    st.tuples(st.sampled_from([Opcode.TEXT, Opcode.BINARY]), st.lists(st.binary(max_size=300), min_size=1, max_size=4)),
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(MESSAGES, st.lists(st.integers(1, 400), max_size=20), st.randoms())
def test_messages_are_the_same_however_they_are_cut(
    messages: list[tuple[Opcode, list[bytes]]], cuts: list[int], random: object
) -> None:
    """A client's message is passed on whole, with pings between its fragments and any cuts of the bytes."""
    data = b""
    for opcode, parts in messages:
        for index, part in enumerate(parts):
            data += frame(Opcode.CONT if index else opcode, part, index == len(parts) - 1)
            data += frame(Opcode.PING, b"p") if random.random() < 0.3 else b""  # type: ignore[attr-defined]
    data += frame(Opcode.CLOSE, b"\x0f\xa1bye")

    async def relayed() -> None:
        async with side(shared_websockets()) as one:
            place = 0
            for cut in cuts:
                one.peer.data_received(data[place : place + cut])
                place += cut
                if cut % 2:
                    await asyncio.sleep(0)
            one.peer.data_received(data[place:])
            one.peer.eof_received()
            await until(lambda: one.relay.ends)
            assert one.relay.frames == [(opcode, b"".join(parts), True) for opcode, parts in messages]
            assert one.relay.ends == [(4001, "bye")]

    asyncio.run(relayed())
