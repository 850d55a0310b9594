"""The frames of live messages and replays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.frames import (
    MalformedFrameError,
    StreamFrame,
    encode_seq,
    end_of_replay_frames,
    live_frames,
    parse_live,
    parse_replay,
    parse_replay_request,
    replay_frames,
    replay_request,
)

seqs = st.integers(0, 2**64 - 2)


def test_messages_have_the_documented_frames() -> None:
    assert live_frames(b"kv", 258, b"payload") == [b"kv", b"\0\0\0\0\0\0\1\2", b"payload"]
    assert replay_request(258) == [b"", b"\0\0\0\0\0\0\1\2"]
    assert replay_frames(b"me", b"kv", 258, b"payload") == [b"me", b"", b"kv", b"\0\0\0\0\0\0\1\2", b"payload"]
    assert end_of_replay_frames(b"me", b"kv") == [b"me", b"", b"kv", b"\xff" * 8, b""]


@given(seqs, st.binary(max_size=8), st.binary(max_size=8))
def test_messages_round_trip(seq: int, topic: bytes, payload: bytes) -> None:
    frame = StreamFrame(seq, payload)
    assert parse_live(live_frames(topic, seq, payload)) == frame
    # ZeroMQ adds the client's identity to a request, and removes it from an answer.
    assert parse_replay_request([b"me", *replay_request(seq)]) == (b"me", seq)
    assert parse_replay(replay_frames(b"me", topic, seq, payload)[1:]) == frame
    assert parse_replay([b"", encode_seq(seq), payload]) == frame


def test_end_of_replay_is_read_with_and_without_topic() -> None:
    assert parse_replay(end_of_replay_frames(b"me", b"kv")[1:]) is None
    assert parse_replay([b"", b"\xff" * 8, b""]) is None


SEQ = encode_seq(1)


MALFORMED: dict[Callable[[list[bytes]], object], list[list[bytes]]] = {
    parse_live: [[], [SEQ], [SEQ, b""], [b"", SEQ, b"", b""], [b"", b"", b""], [b"", b"1" * 9, b""]],
    parse_replay: [[], [SEQ, b""], [b""] * 5, [b"", b"12", b""], [b"", b"", b"", b""]],
    parse_replay_request: [[], [b"me", SEQ], [b"me", b"", b"12"], [b"me", b"", SEQ, b""]],
}


@pytest.mark.parametrize(("parse", "parts"), [(parse, parts) for parse, each in MALFORMED.items() for parts in each])
def test_malformed_message_is_rejected(parse: Callable[[list[bytes]], object], parts: list[bytes]) -> None:
    with pytest.raises(MalformedFrameError):
        parse(parts)
