"""The picker's HTTP/2: with grpcio and h2 as the clients that prove it, and frames as RFC 9113 forbids them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import h2.events
import hpack
import pytest
from grpc_call import GrpcCall, channel_to
from http2_peer import CRASH, ECHO, LARGEST, MANY, SILENT, Calls, grpc_server, message, peer, raw_peer, request

from router.picker.http2 import frames
from router.picker.http2.connection import MOST_STREAMS, Http2Connection, PeerAllowances
from router.picker.http2.frames import frame
from router.picker.http2.headers import RequestHeaders, literal
from router.picker.http2.stream import Stream


@pytest.fixture
async def server() -> AsyncIterator[tuple[Calls, int]]:
    async with grpc_server() as found:
        yield found


# gRPC, by grpcio


@pytest.fixture
async def channel(server: tuple[Calls, int]) -> AsyncIterator[grpc.Channel]:
    async with channel_to(server[1]) as found:
        yield found


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 65_535, 300_000, LARGEST])
async def test_messages_of_any_size_pass_both_ways(channel: grpc.Channel, size: int) -> None:
    call = GrpcCall(channel, ECHO)
    sent = bytes(number % 251 for number in range(size))
    for _ in range(3):
        call.write(sent)
        assert await call.read() == sent
    call.done_writing()
    assert await call.read() is None
    assert await call.status() == (grpc.StatusCode.OK, "")


async def test_many_answers_pass_a_small_window(channel: grpc.Channel) -> None:
    call = GrpcCall(channel, MANY)
    call.write(b"x" * 20_000)
    call.done_writing()
    assert [len(await call.read() or b"") for _ in range(101)] == [20_000] * 100 + [0]


async def test_calls_at_once_do_not_mix(channel: grpc.Channel, server: tuple[Calls, int]) -> None:
    async def ask(number: int) -> None:
        call = GrpcCall(channel, ECHO)
        for turn in range(5):
            call.write(b"%d %d" % (number, turn) * (number % 7))
            assert await call.read() == b"%d %d" % (number, turn) * (number % 7)
        call.done_writing()
        assert await call.read() is None

    await asyncio.gather(*(ask(number) for number in range(100)))
    await server[0].until_empty()


@pytest.mark.parametrize(
    ("path", "sent", "code"),
    [
        ("/t.T/Other", b"", grpc.StatusCode.UNIMPLEMENTED),
        (ECHO, b"x" * (LARGEST + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (CRASH, b"", grpc.StatusCode.INTERNAL),
    ],
)
async def test_invalid_call_ends_with_its_status(
    channel: grpc.Channel, path: str, sent: bytes, code: grpc.StatusCode
) -> None:
    call = GrpcCall(channel, path)
    call.write(sent)
    ended, why = await call.status()
    assert ended is code
    assert why


async def test_compressed_messages_are_refused(server: tuple[Calls, int]) -> None:
    async with channel_to(server[1], compression=grpc.Compression.Gzip) as channel:
        call = GrpcCall(channel, ECHO)
        call.write(b"x" * 1000)
        assert (await call.status())[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_cancelled_call_is_closed(channel: grpc.Channel, server: tuple[Calls, int]) -> None:
    call = GrpcCall(channel, ECHO)
    call.write(b"x")
    await call.read()
    assert len(server[0].open) == 1
    call.cancel()
    await server[0].until_empty()


# Frames, by h2


async def test_message_is_received_in_any_parts(server: tuple[Calls, int]) -> None:
    async with peer(server[1]) as client:
        number = client.open(ECHO)
        whole = message(b"abc") + message(b"") + message(b"defgh")
        for byte in whole:
            client.h2.send_data(number, bytes([byte]), pad_length=3)
            await client.flush()
        client.h2.end_stream(number)
        await client.flush()
        data, headers = await client.answer(number)
        assert data == whole
        assert headers["grpc-status"] == "0"


async def test_half_a_message_is_an_error(server: tuple[Calls, int]) -> None:
    async with peer(server[1]) as client:
        number = client.open(ECHO)
        client.h2.send_data(number, message(b"abc")[:-1], end_stream=True)
        await client.flush()
        assert (await client.answer(number))[1]["grpc-status"] == "13"


async def test_request_without_grpc_is_refused_with_415(server: tuple[Calls, int]) -> None:
    async with peer(server[1]) as client:
        headers = [*request(ECHO)[:4], ("content-type", "text/plain")]
        client.h2.send_headers(1, headers, end_stream=True)
        await client.flush()
        assert (await client.answer(1))[1][":status"] == "415"


async def test_trailers_of_the_peer_end_its_side(server: tuple[Calls, int]) -> None:
    async with peer(server[1]) as client:
        number = client.open(ECHO, b"x")
        client.h2.send_headers(number, [("some", "trailer")], end_stream=True)
        await client.flush()
        assert (await client.answer(number))[0] == message(b"x")


async def test_ping_is_answered(server: tuple[Calls, int]) -> None:
    async with peer(server[1]) as client:
        client.h2.ping(b"12345678")
        await client.flush()
        assert (await client.until(h2.events.PingAckReceived)).ping_data == b"12345678"


async def test_changing_headers_are_decoded(server: tuple[Calls, int]) -> None:
    async with peer(server[1]) as client:
        for turn in range(300):
            number = client.h2.get_next_available_stream_id()
            more = {f"x-{turn % 90}": str(turn), "x-long": "l" * turn}
            client.h2.send_headers(number, request(ECHO, **more))
            client.h2.send_data(number, message(b"%d" % turn), end_stream=True)
            await client.flush()
            assert (await client.answer(number))[0] == message(b"%d" % turn)


async def test_answers_wait_for_windows(server: tuple[Calls, int]) -> None:
    async with peer(server[1]) as client:
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
        await client.flush()
        await client.until(h2.events.SettingsAcknowledged)
        number = client.open(ECHO, b"x" * 100, ends=True)
        await client.flush()
        assert len((await client.until(h2.events.DataReceived, number, credit=False)).data) == 10
        client.h2.increment_flow_control_window(20, number)  # of the stream
        await client.flush()
        assert len((await client.until(h2.events.DataReceived, number, credit=False)).data) == 20
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 40})  # of all streams
        await client.flush()
        assert len((await client.until(h2.events.DataReceived, number, credit=False)).data) == 30
        client.h2.increment_flow_control_window(1000, number)
        await client.flush()
        assert len((await client.until(h2.events.DataReceived, number, credit=False)).data) == 45
        await client.until(h2.events.StreamEnded, number)


async def test_stopping_server_announces_it_and_finishes_calls() -> None:
    stopping = grpc_server(stop_seconds=10)
    calls, port = await stopping.__aenter__()
    async with asyncio.timeout(60), raw_peer(port) as client:
        block = hpack.Encoder().encode(request(ECHO))
        await client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, block))
        await calls.until(lambda: bool(calls.open))
        stopped = asyncio.create_task(stopping.__aexit__(None, None, None))
        assert await client.code() == frames.NO_ERROR  # no new streams soon
        found = await client.frame()
        assert found[0] == frames.PING
        await client.send(frame(frames.PING, frames.ACK, 0, found[3]))
        assert await client.code() == frames.NO_ERROR  # and from here on none
        await client.send(frame(frames.HEADERS, frames.END_HEADERS, 3, block))
        assert await client.code() == frames.REFUSED_STREAM
        await client.send(frame(frames.DATA, frames.END_STREAM, 1, message(b"after")))
        answered = []
        while (found := await client.frame()) is not None:
            answered.append(found[3])
        assert message(b"after") in answered
        await stopped


async def test_calls_finish_after_goaway_of_the_peer(server: tuple[Calls, int]) -> None:
    async with raw_peer(server[1]) as client:
        block = hpack.Encoder().encode(request(ECHO))
        await client.send(
            frame(frames.HEADERS, frames.END_HEADERS, 1, block),
            frames.goaway(0, 0),
            frame(frames.DATA, frames.END_STREAM, 1, message(b"x")),
        )
        seen = []
        while (found := await client.frame()) is not None:
            seen.append(found)
            if found[0] == frames.PING and not found[1]:
                await client.send(frame(frames.PING, frames.ACK, 0, found[3]))
        assert (frames.DATA, 0, 1, message(b"x")) in seen
    assert not server[0].open


async def test_streams_up_to_the_limit_are_served(server: tuple[Calls, int]) -> None:
    async with raw_peer(server[1]) as client:
        block = hpack.Encoder().encode(request(SILENT))
        for number in range(1, 2 * MOST_STREAMS + 3, 2):
            await client.send(frame(frames.HEADERS, frames.END_HEADERS, number, block))
        assert await client.code() == frames.REFUSED_STREAM
        assert len(server[0].open) == MOST_STREAMS
    await server[0].until_empty()


# What RFC 9113 forbids

_BLOCK = hpack.Encoder().encode(request(SILENT))
_OPEN = frame(frames.HEADERS, frames.END_HEADERS, 1, _BLOCK)
_CLOSED = frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, hpack.Encoder().encode(request(ECHO)))


def _headers(*headers: tuple[str, str]) -> bytes:
    return frame(frames.HEADERS, frames.END_HEADERS, 1, hpack.Encoder().encode(headers))


def _with_length(length: str, *frames_after: bytes, ends: bool = False) -> bytes:
    block = hpack.Encoder().encode([*request(SILENT), ("content-length", length)])
    flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
    return frame(frames.HEADERS, flags, 1, block) + b"".join(frames_after)


_TRAILERS = frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, hpack.Encoder().encode([("x-a", "b")]))
_BAD_TRAILERS = frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, hpack.Encoder().encode([("a b", "c")]))

PROTOCOL_ERRORS = {
    "no preface": b"GET / HTTP/1.1\r\n\r\n",
    "no settings first": frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)),
    "data of no stream": frame(frames.DATA, 0, 0, b"x"),
    "data of an idle stream": frame(frames.DATA, 0, 1, b"x"),
    "data with too much padding": _OPEN + frame(frames.DATA, frames.PADDED, 1, b"\x05abc"),
    "headers of no stream": frame(frames.HEADERS, frames.END_HEADERS, 0, _BLOCK),
    "headers of a server's stream": frame(frames.HEADERS, frames.END_HEADERS, 2, _BLOCK),
    "a stream below the last": frame(frames.HEADERS, frames.END_HEADERS, 5, _BLOCK)
    + frame(frames.HEADERS, frames.END_HEADERS, 3, _BLOCK),
    "trailers that do not end": _OPEN + _OPEN,
    "a block that is interrupted": frame(frames.HEADERS, 0, 1, _BLOCK) + frame(frames.PING, 0, 0, bytes(8)),
    "continuation of nothing": frame(frames.CONTINUATION, frames.END_HEADERS, 1, _BLOCK),
    "no path": _headers((":method", "POST"), (":scheme", "http")),
    "an unknown pseudo-header": _headers(*request(ECHO)[:3], (":other", "x")),
    "a pseudo-header after others": _headers(*request(ECHO)[4:], *request(ECHO)[:4]),
    "a name in capitals": _headers(*request(ECHO), ("X-A", "b")),
    "a header of a connection": _headers(*request(ECHO), ("connection", "close")),
    "a name with a line end": _headers(*request(ECHO), ("x\r\ny", "b")),
    "more data than the length": _with_length("1", frame(frames.DATA, 0, 1, b"ab")),
    "less data than the length": _with_length("3", frame(frames.DATA, frames.END_STREAM, 1, b"ab")),
    "less data than the length before trailers": _with_length("3", frame(frames.DATA, 0, 1, b"ab"), _TRAILERS),
    "no data for the length": _with_length("1", ends=True),
    "trailers that are no headers": _OPEN + _BAD_TRAILERS,
    "reset of no stream": frames.reset(0, 0),
    "reset of an idle stream": frames.reset(1, 0),
    "settings of a stream": frame(frames.SETTINGS, 0, 1),
    "push neither on nor off": frames.settings({frames.ENABLE_PUSH: 2}),
    "frames too small": frames.settings({frames.MAX_FRAME_SIZE: 100}),
    "a ping of a stream": frame(frames.PING, 0, 1, bytes(8)),
    "goaway of a stream": frame(frames.GOAWAY, 0, 1, bytes(8)),
    "a push": frame(frames.PUSH_PROMISE, 0, 1, bytes(8)),
    "priority of itself": frame(frames.PRIORITY, 0, 1, (1).to_bytes(4, "big") + b"x"),
    "a window opened by nothing": frames.window_update(0, 0),
    "a stream's window opened by nothing": _OPEN + frames.window_update(1, 0),
    "a window of an idle stream": frames.window_update(1, 5),
}
FORBIDDEN = {name: (data, frames.PROTOCOL_ERROR) for name, data in PROTOCOL_ERRORS.items()} | {
    "a frame too long": (frame(frames.DATA, 0, 1, bytes(16_385)), frames.FRAME_SIZE_ERROR),
    "data of a closed stream": (_CLOSED + frame(frames.DATA, 0, 1, b"x"), frames.STREAM_CLOSED),
    "data after the end": (
        _OPEN + frame(frames.DATA, frames.END_STREAM, 1, message(b"")) + frame(frames.DATA, 0, 1, b"x"),
        frames.STREAM_CLOSED,
    ),
    "headers of a closed stream": (_CLOSED + _OPEN, frames.STREAM_CLOSED),
    "a block of nonsense": (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff"), frames.COMPRESSION_ERROR),
    "a reset too short": (_OPEN + frame(frames.RST_STREAM, 0, 1, b"x"), frames.FRAME_SIZE_ERROR),
    "settings too short": (frame(frames.SETTINGS, 0, 0, bytes(5)), frames.FRAME_SIZE_ERROR),
    "an acknowledgement that sets": (frame(frames.SETTINGS, frames.ACK, 0, bytes(6)), frames.FRAME_SIZE_ERROR),
    "a window too large": (frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), frames.FLOW_CONTROL_ERROR),
    "a ping too short": (frame(frames.PING, 0, 0, bytes(7)), frames.FRAME_SIZE_ERROR),
    "a window that overflows": (frames.window_update(0, 2**31 - 1) * 2, frames.FLOW_CONTROL_ERROR),
    "a stream's window that overflows": (_OPEN + frames.window_update(1, 2**31 - 1), frames.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_protocol_violation_is_answered_by_its_error_code(server: tuple[Calls, int], name: str) -> None:
    data, code = FORBIDDEN[name]
    async with raw_peer(server[1], greet=name not in ("no preface", "no settings first")) as client:
        await client.send(data)
        assert await client.code() == code
    await server[0].until_empty()


async def test_frames_of_unknown_kinds_are_passed_over(server: tuple[Calls, int]) -> None:
    async with raw_peer(server[1]) as client:
        await client.send(frame(200, 0xFF, 77, b"anything"), frame(frames.PING, 0, 0, b"12345678"))
        while (found := await client.frame()) is not None and found[0] != frames.PING:
            pass
        assert found == (frames.PING, frames.ACK, 0, b"12345678")


class Failing:
    """A handler of which one step fails, by its path."""

    def __init__(self, headers: RequestHeaders, stream: Stream) -> None:
        self._stream, self._path = stream, headers.path
        self._step(b"/accept")

    def data(self, data: bytes) -> None:  # noqa: ARG002
        self._step(b"/data")

    def ended(self) -> None:
        self._step(b"/ended")
        self._stream.end(literal(b":status", b"204"))

    def closed(self) -> None:
        pass

    def _step(self, name: bytes) -> None:
        if self._path == name:
            raise ValueError("as meant")


@pytest.mark.parametrize("failing", ["/accept", "/data", "/ended"])
async def test_handler_that_fails_costs_its_stream_alone(failing: str) -> None:
    loop = asyncio.get_running_loop()
    connections: set[Http2Connection] = set()
    server = await loop.create_server(
        lambda: Http2Connection(Failing, connections, PeerAllowances(), loop), "127.0.0.1", 0
    )
    async with peer(server.sockets[0].getsockname()[1]) as client:
        open_before = client.open("/other")
        bad = client.open(failing, b"x", ends=True)
        await client.flush()
        reset = await client.until(h2.events.StreamReset, bad)
        assert reset.error_code == frames.INTERNAL_ERROR
        client.h2.end_stream(open_before)
        after = client.open("/other", b"x", ends=True)
        await client.flush()
        for number in (open_before, after):
            await client.until(h2.events.StreamEnded, number)
    server.close()
    await server.wait_closed()
