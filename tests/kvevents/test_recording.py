"""Recorded streams of real engines are read completely, in all versions of the event format."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvevents import AllBlocksCleared, BlockStored, EventBatch, decode_batch
from kvevents.frames import parse_live, parse_replay
from kvevents.recording import Channel, Record, RecordingWriter, TornRecordingError, read_recording

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = sorted({*DATA.rglob("*.kvrec")} - {*DATA.glob("pools/*")}, key=str)  # without masters of pools


def batches(path: Path, channel: Channel) -> list[tuple[int, int, EventBatch]]:
    """Return the source, number and batch of each message of a channel, without the ends of replays."""
    parse = parse_live if channel is Channel.LIVE else parse_replay
    found = []
    for record in read_recording(path):
        if record.channel is channel and (frame := parse(record.frames)) is not None:
            found.append((record.source, frame.seq, decode_batch(frame.payload)))
    return found


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_event_of_a_recording_is_read(path: Path) -> None:
    live, replayed = batches(path, Channel.LIVE), batches(path, Channel.REPLAY)
    assert live
    for _, _, batch in live + replayed:
        assert batch.events
        assert batch.rejected == []
        assert batch.ts > 1.7e9
        for event in batch.events:
            if isinstance(event, BlockStored) and event.kv_cache_spec_kind in (None, "full_attention"):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                assert event.medium in (None, "GPU")


def test_recorded_replay_repeats_live_batches_and_ends() -> None:
    path = DATA / "a_shared_system_prompt_2workers.kvrec"
    assert sorted(batches(path, Channel.REPLAY), key=lambda found: found[:2]) == sorted(
        batches(path, Channel.LIVE), key=lambda found: found[:2]
    )
    ends = [r for r in read_recording(path) if r.channel is Channel.REPLAY and parse_replay(r.frames) is None]
    assert [record.source for record in ends] == [0, 1]


@pytest.mark.parametrize("release", ["vllm-0.16.0", "vllm-0.22.0", "vllm-0.24.0"])
def test_older_vllm_recordings_decode_to_the_same_events(release: str) -> None:
    now = batches(DATA / "c_pressure_evictions.kvrec", Channel.LIVE)
    then = batches(DATA / "old_wire" / f"c_pressure_evictions.{release}.kvrec", Channel.LIVE)
    for (_, _, new), (_, _, old) in zip(now, then, strict=True):
        assert [type(event) for event in old.events] == [type(event) for event in new.events]
        for ours, theirs in zip(old.events, new.events, strict=True):
            if isinstance(ours, BlockStored) and isinstance(theirs, BlockStored):
                assert ours.block_hashes == theirs.block_hashes
                assert ours.parent_block_hash == theirs.parent_block_hash
                assert ours.token_ids == theirs.token_ids


def test_replays_of_older_releases_have_no_topic() -> None:
    path = DATA / "old_wire" / "s1_sglang_radix_page16_evict.sglang-0.4.6.post5.kvrec"
    assert len(batches(path, Channel.REPLAY)) == 293


def test_first_sglang_event_clears_all_blocks() -> None:
    _, seq, first = batches(DATA / "s3_sglang_salt_page32.kvrec", Channel.LIVE)[0]
    assert seq == 0
    assert first.events[0] == AllBlocksCleared()


def test_empty_recording_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "empty.kvrec"
    path.write_bytes(b"")
    assert list(read_recording(path)) == []


def test_record_has_the_documented_format(tmp_path: Path) -> None:
    path = tmp_path / "one.kvrec"
    path.write_bytes(struct.pack(">dBBB", 1.5, 1, 7, 2) + struct.pack(">I", 3) + b"abc" + struct.pack(">I", 0))
    assert list(read_recording(path)) == [Record(1.5, Channel.REPLAY, 7, [b"abc", b""])]


def test_torn_recording_yields_whole_records_then_raises(tmp_path: Path) -> None:
    record = struct.pack(">dBBB", 1.5, 0, 0, 1) + struct.pack(">I", 4) + b"abcd"
    path = tmp_path / "torn.kvrec"
    for cut in range(1, len(record)):
        path.write_bytes(record + record[:cut])
        records = read_recording(path)
        assert next(records).frames == [b"abcd"]
        with pytest.raises(TornRecordingError, match=f"at byte {len(record)}"):
            next(records)


def test_file_without_recording_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "text.kvrec"
    path.write_text("this is no recording at all, but a text")
    with pytest.raises(TornRecordingError):
        list(read_recording(path))


RECORDS = [
    Record(1.5, Channel.LIVE, 0, [b"topic", b"12345678", b"payload"]),
    Record(2.5, Channel.REPLAY, 255, []),
    Record(2.25, Channel.LIVE, 7, [b""] * 255),
]


def test_written_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new.kvrec"
    with RecordingWriter(path) as writer:
        for count, record in enumerate(RECORDS, 1):
            writer.write(record)
            assert list(read_recording(path)) == RECORDS[:count]  # before the recording is closed


def test_rewritten_recording_has_identical_bytes(tmp_path: Path) -> None:
    path = DATA / "e_dp2.kvrec"
    with RecordingWriter(tmp_path / "again.kvrec") as writer:
        for record in read_recording(path):
            writer.write(record)
    assert (tmp_path / "again.kvrec").read_bytes() == path.read_bytes()


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there.kvrec"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        RecordingWriter(path)
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("record", [Record(0.0, Channel.LIVE, 256, []), Record(0.0, Channel.LIVE, 0, [b""] * 256)])
def test_record_beyond_the_format_is_rejected_and_not_written(tmp_path: Path, record: Record) -> None:
    path = tmp_path / "new.kvrec"
    with RecordingWriter(path) as writer:
        with pytest.raises(ValueError, match="at most 255 frames"):
            writer.write(record)
        writer.write(RECORDS[0])
    assert list(read_recording(path)) == RECORDS[:1]


def test_torn_end_is_skipped_on_request(tmp_path: Path) -> None:
    record = struct.pack(">dBBB", 1.5, 0, 0, 1) + struct.pack(">I", 4) + b"abcd"
    path = tmp_path / "torn.kvrec"
    for cut in range(1, len(record)):
        path.write_bytes(record + record[:cut])
        assert [found.frames for found in read_recording(path, torn_end=True)] == [[b"abcd"]]


def test_file_without_recording_is_no_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "text.kvrec"
    path.write_text("this is no recording at all, but a text")
    with pytest.raises(TornRecordingError):
        list(read_recording(path, torn_end=True))
