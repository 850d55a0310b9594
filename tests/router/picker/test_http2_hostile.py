"""Hostile peers lose their connection, and other peers are not affected. Cached header blocks keep their meaning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, islice, takewhile

import h2.events
import hpack
import pytest
from http2_peer import ECHO, MANY, SILENT, RawPeer, grpc_server, message, peer, raw_peer, request
from hypothesis import given
from hypothesis import strategies as st

from router.http.allowance import Allowance, Allowances
from router.picker.http2 import connection, frames
from router.picker.http2.frames import frame
from router.picker.http2.headers import HeaderDecoder, leaves_table, literal

_BLOCK = hpack.Encoder().encode(request(SILENT))


def _endless(*parts: bytes) -> Iterator[bytes]:
    while True:
        yield b"".join(parts) * 100


def _rapid_reset() -> Iterator[bytes]:
    for number in count(1, 2):
        yield frame(frames.HEADERS, frames.END_HEADERS, number, _BLOCK) + frames.reset(number, frames.CANCEL)


def _continuations() -> Iterator[bytes]:
    yield frame(frames.HEADERS, 0, 1, _BLOCK)
    yield from _endless(frame(frames.CONTINUATION, 0, 1, b""))


def _long_block() -> Iterator[bytes]:
    yield frame(frames.HEADERS, 0, 1, _BLOCK)
    yield from _endless(frame(frames.CONTINUATION, 0, 1, bytes(16_000)))


def _header_bomb() -> Iterator[bytes]:
    """One long header in the table, and references to it: a few bytes that are many."""
    encoder = hpack.Encoder()
    block = encoder.encode([*request(SILENT), ("x-bomb", "b" * 2000)])
    yield frame(frames.HEADERS, frames.END_HEADERS, 1, block)
    for number in count(3, 2):
        again = encoder.encode([*request(SILENT), ("x-bomb", "b" * 2000)])
        yield frame(frames.HEADERS, frames.END_HEADERS, number, again + again[-1:] * 16_000)


def _late_data() -> Iterator[bytes]:
    yield frame(frames.HEADERS, frames.END_HEADERS, 1, _BLOCK) + frames.reset(1, 0)
    yield from _endless(frame(frames.DATA, 0, 1, b"x"))


ATTACKS = {
    "rapid reset": (_rapid_reset, frames.ENHANCE_YOUR_CALM),
    "continuation flood": (_continuations, frames.ENHANCE_YOUR_CALM),
    "an endless header block": (_long_block, frames.ENHANCE_YOUR_CALM),
    "a header bomb": (_header_bomb, frames.COMPRESSION_ERROR),
    "pings": (lambda: _endless(frame(frames.PING, 0, 0, bytes(8))), frames.ENHANCE_YOUR_CALM),
    "settings": (lambda: _endless(frames.settings({})), frames.ENHANCE_YOUR_CALM),
    "priorities": (lambda: _endless(frame(frames.PRIORITY, 0, 1, bytes(5))), frames.ENHANCE_YOUR_CALM),
    "windows": (lambda: _endless(frames.window_update(0, 1)), frames.ENHANCE_YOUR_CALM),
    "empty data": (lambda: _endless(frame(frames.DATA, 0, 1)), frames.ENHANCE_YOUR_CALM),
    "data of a stream that is reset": (_late_data, frames.ENHANCE_YOUR_CALM),
}


@asynccontextmanager
async def _attacked(port: int, attack: str) -> AsyncIterator[RawPeer]:
    """A connection with a running attack, until it is closed."""
    async with raw_peer(port) as client:
        if attack == "empty data":
            await client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, _BLOCK))

        async def go_on() -> None:
            for data in ATTACKS[attack][0]():
                if client.writer.is_closing():
                    return
                await client.send(data)
                await asyncio.sleep(0)

        attacking = asyncio.create_task(go_on())
        try:
            yield client
        finally:
            attacking.cancel()
            await asyncio.gather(attacking, return_exceptions=True)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_attack_ends_only_its_own_connection(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_TICK", 5.0)  # on a busy machine, the other one is silent for 15 s
    async with grpc_server() as (calls, port), peer(port) as other:
        begun = other.open(ECHO, b"before")
        await other.flush()
        await other.until(h2.events.DataReceived, begun)
        async with _attacked(port, attack) as client:
            # What is unread when a connection is closed may take its last words with it.
            assert await client.code() in (ATTACKS[attack][1], None)
        other.h2.send_data(begun, message(b"after"), end_stream=True)
        await other.flush()
        data, headers = await other.answer(begun)
        assert data.endswith(message(b"after"))
        assert headers["grpc-status"] == "0"
        await calls.until_empty()


async def _is_answered(port: int, sent: bytes) -> bool:
    """Return whether a peer that first sends these bytes still receives the answer to a ping."""
    async with raw_peer(port) as client:
        await client.send(sent, frame(frames.PING, 0, 0, b"the last"))
        while (found := await client.frame()) is not None:
            if found[0] == frames.PING and found[3] == b"the last":
                return True
    return False


@pytest.mark.parametrize(("attack", "many", "few"), [("rapid reset", 200, 1), ("pings", 20, 0)])
async def test_attacker_gains_little_by_a_new_connection(attack: str, many: int, few: int) -> None:
    sent = ATTACKS[attack][0]
    async with grpc_server() as (_, port), peer(port) as open_before:
        assert await _is_answered(port, b"".join(islice(sent(), many)))
        for _ in range(5):
            async with _attacked(port, attack) as client:
                assert await client.code() in (ATTACKS[attack][1], None)
        assert not await _is_answered(port, b"".join(islice(sent(), many)))
        assert await _is_answered(port, b"".join(islice(sent(), few)))
        async with peer(port) as open_after:
            for each in (open_before, open_after):
                number = each.open(ECHO, b"x", ends=True)
                await each.flush()
                assert (await each.answer(number))[0] == message(b"x")


async def test_others_have_their_turn_during_a_flood_of_calls() -> None:
    """Calls of one connection are not all taken before another's."""
    async with grpc_server() as (calls, port), peer(port) as other, raw_peer(port) as flood:
        block = hpack.Encoder().encode(request(SILENT))
        flooded = b"".join(frame(frames.HEADERS, frames.END_HEADERS, n, block) for n in range(1, 4001, 2))
        flood.writer.write(flooded)
        number = other.open(ECHO, b"x", ends=True)
        await other.flush()
        await other.answer(number)
        assert calls.ever < 2000


@pytest.fixture
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_TICK", 0.01)


@pytest.mark.usefixtures("quick_ticks")
async def test_closed_window_resets_only_its_stream() -> None:
    async with grpc_server() as (_, port), peer(port) as client:
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        await client.flush()
        shut = client.open(MANY, b"x" * 1000, ends=True)
        await client.flush()
        reset = await client.until(h2.events.StreamReset, shut)
        assert reset.error_code == frames.ENHANCE_YOUR_CALM
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 65_535})
        number = client.open(ECHO, b"x", ends=True)
        await client.flush()
        assert (await client.answer(number))[0] == message(b"x")


@pytest.mark.usefixtures("quick_ticks")
async def test_connection_is_closed_if_peer_does_not_read() -> None:
    async with grpc_server() as (calls, port), raw_peer(port) as client:
        await client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31 - 1}), frames.window_update(0, 2**30))
        block = hpack.Encoder().encode(request(MANY))
        numbers = range(1, 401, 2)
        await client.send(*(frame(frames.HEADERS, frames.END_HEADERS, number, block) for number in numbers))
        for number in numbers:
            await client.send(frame(frames.DATA, 0, number, message(b"x" * 16_000)))
        await calls.until(lambda: calls.ever == 200 and not calls.open)


@pytest.mark.usefixtures("quick_ticks")
@pytest.mark.parametrize("sent", [b"", frames.PREFACE[:5], frames.PREFACE])
async def test_connection_without_preface_is_closed(sent: bytes) -> None:
    async with grpc_server() as (_, port), raw_peer(port, greet=False) as client:
        await client.send(sent)
        while await client.frame() is not None:
            pass


@pytest.mark.usefixtures("quick_ticks")
async def test_stream_without_data_is_reset() -> None:
    async with grpc_server() as (calls, port), peer(port) as client:
        number = client.open(SILENT)
        await client.flush()
        assert (await client.until(h2.events.StreamReset, number)).error_code == frames.CANCEL
        assert not calls.open


@pytest.mark.usefixtures("quick_ticks")
async def test_silent_peer_is_pinged_then_disconnected() -> None:
    async with grpc_server() as (calls, port), raw_peer(port) as client:
        block = hpack.Encoder().encode(request(ECHO))
        await client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, block), frame(frames.DATA, 0, 1, message(b"x")))
        kinds = []
        while (found := await client.frame()) is not None:
            kinds.append(found[0])
        assert frames.PING in kinds
        assert not calls.open


def _left(allowance: Allowance) -> int:
    """Take all tokens, and return their number."""
    return sum(1 for _ in takewhile(lambda _: allowance.take(), count()))


def test_tokens_of_a_connection_are_capped() -> None:
    allowances = Allowances(3, 0, 0.0)
    for _ in range(4):
        last = allowances.connected("a")
    assert _left(last) == 3
    last.earn(100)
    assert _left(last) == 3


def test_connections_of_an_address_share_tokens_of_four() -> None:
    now = [0.0]
    allowances = Allowances(10, 2, 1.0, lambda: now[0])
    four = [allowances.connected("a") for _ in range(4)]
    fifth = allowances.connected("a")
    assert _left(fifth) == 2
    assert all(four[0].take() for _ in range(4))
    four[0].close()
    assert _left(allowances.connected("a")) == 6
    assert [_left(each) for each in four[1:]] == [10, 10, 10]
    now[0] = 5.0
    assert [_left(each) for each in four[1:]] == [5, 0, 0]
    assert _left(allowances.connected("b")) == 40


def test_number_of_kept_addresses_is_bounded() -> None:
    allowances = Allowances(10, 2, 0.0)
    spent = allowances.connected("a")
    assert _left(spent) == 40
    for number in range(1024):
        allowances.connected(str(number))
    assert _left(spent) == 0
    assert _left(allowances.connected("a")) == 40


_BLOCK_NAMES = st.sampled_from(
    [":path", ":method", "a", "te", "content-type", "x-long-name", "cookie", "authorization"]
)
_BLOCK_HEADERS = st.lists(st.tuples(_BLOCK_NAMES, st.text("ab0é", max_size=200), st.booleans()), max_size=8)


@given(st.lists(st.tuples(_BLOCK_HEADERS, st.booleans(), st.sampled_from([None, None, 0, 64, 4096])), max_size=20))
def test_decoded_blocks_equal_those_of_hpack(blocks: list) -> None:
    encoder, other, ours = hpack.Encoder(), hpack.Decoder(), HeaderDecoder()
    for headers, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        sensitive = [
            hpack.NeverIndexedHeaderTuple(name, value) if secret else (name, value) for name, value, secret in headers
        ]
        for _ in range(2):
            block = encoder.encode(sensitive, huffman=huffman)
            assert ours.decode(block).headers == [(bytes(n), bytes(v)) for n, v in other.decode(block, raw=True)]


@given(_BLOCK_HEADERS)
def test_block_without_table_change_is_cached(headers: list) -> None:
    decoder = hpack.Decoder()
    encoder = hpack.Encoder()
    for _ in range(2):
        block = encoder.encode([(name, value) for name, value, _ in headers])
        before = list(decoder.header_table.dynamic_entries)
        decoder.decode(block)
        if leaves_table(block):
            assert list(decoder.header_table.dynamic_entries) == before


@given(st.binary(min_size=1, max_size=126), st.binary(max_size=126))
def test_literals_are_decoded_unchanged(name: bytes, value: bytes) -> None:
    [found] = hpack.Decoder().decode(literal(name, value), raw=True)
    assert (bytes(found[0]), bytes(found[1])) == (name, value)
