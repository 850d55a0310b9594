"""Frames of live messages and replays, and files of CURVE keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.curve import checked_key, create_key_pair, load_key_pair, load_public_key, load_public_keys
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
    assert end_of_replay_frames(b"me") == [b"me", b"", b"", b"\xff" * 8, b""]


@given(seqs, st.binary(max_size=8), st.binary(max_size=8))
def test_messages_round_trip(seq: int, topic: bytes, payload: bytes) -> None:
    frame = StreamFrame(seq, payload)
    assert parse_live(live_frames(topic, seq, payload)) == frame
    # ZeroMQ adds the client's identity to a request, and removes it from an answer.
    assert parse_replay_request([b"me", *replay_request(seq)]) == (b"me", seq)
    assert parse_replay(replay_frames(b"me", topic, seq, payload)[1:]) == frame
    assert parse_replay([b"", encode_seq(seq), payload]) == frame


def test_end_of_replay_is_read_with_and_without_topic() -> None:
    assert parse_replay(end_of_replay_frames(b"me")[1:]) is None
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


KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"  # the example of ZeroMQ's documentation


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return create_key_pair(tmp_path, "some")


def test_key_pair_is_read_as_written(files: tuple[Path, Path]) -> None:
    public, secret = files
    pair = load_key_pair(secret, "key")
    assert load_public_key(public, "key") == load_public_key(secret, "key") == pair.public.decode()
    assert len(pair.public) == len(pair.secret) == 40
    assert load_public_keys(public.parent, "keys") == {pair.public}


def test_key_has_40_characters_of_z85() -> None:
    assert checked_key(KEY, "key") == KEY.encode()
    for wrong in ("", KEY[:-1], KEY + "aaaaa", KEY[:-1] + "~", KEY[:-1] + "é", "#" * 40, "\n" * 40):
        with pytest.raises(ValueError, match="key: not a CURVE key"):
            checked_key(wrong, "key")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it does not exist"),
        ("", "no key of CURVE"),
        ("hello", "no key of CURVE"),
        (f'public-key = "{KEY}"', "holds no secret key"),
        ('public-key = "short"\nsecret-key = "short"', "not a CURVE key"),
        (f'public-key = "{KEY}"\nsecret-key = "short"', "not a CURVE key"),
        (f'public-key = "{KEY}"\nsecret-key = "{KEY}"', "does not belong to"),
    ],
)
def test_error_of_a_key_file_names_its_setting(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "bad.key_secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"^curve_key_file: {path}.*{message}"):
        load_key_pair(path, "curve_key_file")


def test_folder_is_rejected_as_key_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^field: {tmp_path}: Is a directory"):
        load_public_key(tmp_path, "field")


def test_invalid_key_file_rejects_its_folder(files: tuple[Path, Path]) -> None:
    (files[0].parent / "bad.key").write_text("nothing")
    with pytest.raises(ValueError, match=r"^field: .*bad\.key"):
        load_public_keys(files[0].parent, "field")
