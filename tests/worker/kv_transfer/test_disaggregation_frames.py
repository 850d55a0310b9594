"""Frames between ranks: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kv_transfer.frames import (
    MAX_FRAME,
    AnyMessage,
    Done,
    Failure,
    FrameCodec,
    FrameError,
    Hello,
    RoomRequest,
)
from worker.kv_transfer.layout import Buffer, Layout

LAYOUT = Layout(
    page_size=16,
    kv_cache_dtype="float16",
    kv_layout="NHD",
    total_heads=8,
    tp_size=2,
    tp_rank=1,
    start_layer=0,
    kv=[Buffer(4096, 65536, 4096), Buffer(1 << 20, 65536, 4096)],
    aux=[Buffer(1 << 21, 64, 8)],
)
REQUEST = RoomRequest(
    sender="a",
    to="b",
    reply_to="tcp://[fd00::7]:5000",
    room=2**63 - 1,
    generation=7,
    pages=bytes.fromhex("0100000000000000ff00000000000000"),
    prefix_pages=0,
    aux_index=None,
    dummy=False,
    destinations=1,
    time_left=2.5,
)
HELLO = Hello(sender="a", to="b", reply_to="tcp://10.0.0.7:5000", engine="tcp", engine_address=b"\0\1", layout=LAYOUT)
MESSAGES: list[AnyMessage] = [HELLO, REQUEST, Done(sender="a", to="b", room=1, generation=2)]


@pytest.mark.parametrize("secret", ["", "shared"])
@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_decoded_as_encoded(message: AnyMessage, secret: str) -> None:
    frame = FrameCodec(secret).encode(message)
    assert FrameCodec(secret).decode(frame) == message


def test_frame_has_documented_bytes() -> None:
    """Little-endian, whatever the machine; page indices are i64."""
    message = Failure(sender="a", to="b", room=1, generation=2, reason="x")
    payload = msgspec.msgpack.encode(
        {"type": "failure", "sender": "a", "to": "b", "room": 1, "generation": 2, "reason": "x"}
    )
    assert FrameCodec().encode(message) == b"KVDF\x01\x00\x00\x00" + len(payload).to_bytes(4, "little") + payload
    assert REQUEST.page_array().tolist() == [1, 255]
    with pytest.raises(ValueError, match="multiple"):
        msgspec.structs.replace(REQUEST, pages=b"123").page_array()


@pytest.mark.parametrize(
    "change",
    [
        {"room": -1},
        {"room": 2**63},
        {"aux_index": "None"},
        {"aux_index": -1},
        {"destinations": 0},
        {"time_left": float("inf")},
        {"reply_to": "ipc:///etc/passwd"},
        {"reply_to": "tcp://host:1/../x"},
        {"sender": ""},
        {"pages": "text"},
    ],
)
def test_out_of_range_fields_are_malformed(change: dict[str, object]) -> None:
    frame = FrameCodec().encode(msgspec.structs.replace(REQUEST, **change))
    with pytest.raises(FrameError) as caught:
        FrameCodec().decode(frame)
    assert caught.value.kind == "malformed"


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_raise_only_frame_error(data: bytes, with_header: bool) -> None:
    frame = b"KVDF\x01\x00\x00\x00" + len(data).to_bytes(4, "little") + data if with_header else data
    with pytest.raises(FrameError):
        FrameCodec().decode(frame)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_changed_byte_breaks_signature(position: int, change: int) -> None:
    frame = bytearray(FrameCodec("shared").encode(HELLO))
    frame[position % len(frame)] ^= change
    with pytest.raises(FrameError):
        FrameCodec("shared").decode(bytes(frame))


def test_both_sides_need_equal_secrets() -> None:
    for writer, reader in (("", "ours"), ("ours", ""), ("theirs", "ours")):
        with pytest.raises(FrameError) as caught:
            FrameCodec(reader).decode(FrameCodec(writer).encode(HELLO))
        assert caught.value.kind == "unsigned"


def test_frame_size_is_limited_on_both_sides() -> None:
    with pytest.raises(ValueError, match="exceeds the limit"):
        FrameCodec().encode(msgspec.structs.replace(REQUEST, pages=bytes(MAX_FRAME)))
    with pytest.raises(FrameError) as caught:
        FrameCodec().decode(random.randbytes(MAX_FRAME + 1))
    assert caught.value.kind == "oversized"
