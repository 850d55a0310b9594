"""Random frames and dumps."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing, suppress
from random import Random
from typing import Any

import msgspec
import pytest
from budget import damaged, examples
from xxhash import xxh3_64

from indexer import Indexer, MatchQuery, Registration, Target
from indexer.dump import DumpedStream, DumpError, TargetDump, read_dump, write_dump
from indexer.index import UnknownModelError
from indexer.native import CORE_VARIABLE, CORES
from kvevents import BlockStored, EventBatch, EventSource, encode_batch
from worker.kv_transfer.frames import Done, Failure, FrameCodec, FrameError, Hello, RoomRequest
from worker.kv_transfer.layout import Buffer, Layout
from worker.kv_transfer.transfer import GrantKey, Ranges, Region, Writes, open_engine
from worker.kv_transfer.transfer.channel import Channel, Kind
from worker.kv_transfer.transfer.sessions import greet
from worker.kv_transfer.transfer.writing import encode_runs

np = pytest.importorskip("numpy")


FEW_FRAMES, FEW_SESSIONS = 5000, 150
SIZE = 1 << 16
GRANTED = SIZE // 2
KEY = GrantKey(1, 1)
LAYOUT = Layout(
    page_size=16,
    kv_cache_dtype="float16",
    kv_layout="NHD",
    total_heads=8,
    tp_size=2,
    tp_rank=1,
    start_layer=0,
    kv=[Buffer(4096, 65536, 4096)],
    aux=[Buffer(1 << 21, 64, 8)],
)
MESSAGES: list[Any] = [
    Hello(sender="a", to="b", reply_to="tcp://10.0.0.7:5000", engine="tcp", engine_address=b"\0\1", layout=LAYOUT),
    RoomRequest(
        sender="a",
        to="b",
        reply_to="tcp://10.0.0.7:5000",
        room=1,
        generation=7,
        pages=bytes(16),
        prefix_pages=0,
        aux_index=None,
        dummy=False,
        destinations=1,
        time_left=2.5,
    ),
    Done(sender="a", to="b", room=1, generation=2),
]


@pytest.mark.parametrize("secret", ["", "shared"])
def test_damaged_message_decodes_or_raises_frame_error(secret: str) -> None:
    codec = FrameCodec(secret)
    frames = [codec.encode(message) for message in MESSAGES]
    for random in examples(FEW_FRAMES, 0.5):
        data = damaged(random, random.choice(frames))
        try:
            message = codec.decode(data)
        except FrameError:
            continue
        assert not secret or data in frames  # it is signed
        assert isinstance(message, Hello | RoomRequest | Done | Failure)
        codec.encode(message)


def test_damaged_write_stays_within_its_grant() -> None:
    receiver, sender = open_engine("tcp", "127.0.0.1", None), open_engine("tcp", "127.0.0.1", None)
    try:
        arena, source = receiver.allocate(SIZE), sender.allocate(SIZE)
        receiver.register([Region.of(arena)])
        sender.register([Region.of(source)])
        start = arena.ctypes.data
        receiver.grant(KEY, Ranges(_u8(start), _u8(GRANTED)))
        address = json.loads(receiver.address())
        for random in examples(FEW_SESSIONS):
            runs = [(start + random.randrange(GRANTED), random.randrange(1, 64)) for _ in range(random.randrange(1, 4))]
            _send_damaged(random, (address["host"], address["port"]), runs)
            assert not arena[GRANTED:].any()
        arena[:] = 0
        source[:] = 1
        with closing(sender.connect(receiver.address(), time.monotonic() + 60)) as session:
            session.write(KEY, Writes(_u8(source.ctypes.data), _u8(start), _u8(64)), time.monotonic() + 60)
        assert arena[:64].all()
    finally:
        sender.close()
        receiver.close()


def _send_damaged(random: Random, address: tuple[str, int], runs: list[tuple[int, int]]) -> None:
    """A session whose greeting is right, and whose write is not."""
    channel = Channel(socket.create_connection(address, timeout=60))
    with closing(channel), suppress(OSError):  # it may be cut at any byte
        greet(channel, "tcp", None, time.monotonic() + 60)
        recorder, recorded = socket.socketpair()
        with recorder, recorded:
            connection, channel.socket = channel.socket, recorder
            body = encode_runs(KEY, _u8(*(to for to, _ in runs)), _u8(*(length for _, length in runs)))
            channel.send(Kind.WRITE, body, time.monotonic() + 60)
            frame = recorded.recv(65536)
            channel.socket = connection
        connection.setblocking(True)
        connection.settimeout(60)
        connection.sendall(damaged(random, frame) + b"\7" * sum(length for _, length in runs))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def _u8(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)


FEW = 150
NOWHERE = EventSource(0, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
PROMPT = list(range(1, 33))


def dumped() -> list[bytes]:
    """A dump of three streams that share prefixes."""
    indexer = Indexer()
    targets = [Target(f"w{number}", 0, "m", "acme" if number == 2 else "default") for number in range(3)]
    try:
        for number, target in enumerate(targets):
            indexer.register(Registration(target, NOWHERE, "vLLM", 2))
            stored = [
                BlockStored([1, 2, 3], None, PROMPT[:6], 2, medium="GPU"),
                BlockStored([4 + number], 3, PROMPT[6:8], 2, group_idx=number or None),
                BlockStored([b"x" * 32], 4, PROMPT[8:10], 2, medium="CPU", lora_name="sql"),
            ]
            indexer.index.apply_payload(target, encode_batch(EventBatch(1.0, list(stored), 0)))
        return list(write_dump([dump_of(indexer, target) for target in targets], ""))
    finally:
        indexer.stop()


def dump_of(indexer: Indexer, target: Target) -> TargetDump:
    return TargetDump(
        *(target.worker, target.dp_rank, target.model, target.tenant, "vLLM"),
        *(NOWHERE.endpoint, NOWHERE.replay_endpoint, "", 2, None, None, [2], DumpedStream(3, 1.0)),
        *indexer.index.dump(target),
    )


def changed(random: Random, lines: list[bytes]) -> list[bytes]:
    """Return the dump with damage, half of the time with a matching checksum, as an attacker would write it."""
    lines = list(lines)
    for _ in range(random.choice([1, 1, 2])):
        place = random.randrange(len(lines))
        line = lines[place]
        match random.randrange(6):
            case 0:
                lines[place] = damaged(random, line)
            case 1:
                del lines[place]
            case 2:
                lines.insert(place, line)
            case 3:
                number = random.choice([b"-1", b"0", b"1e400", b"NaN", b"18446744073709551616", b"null", b'"x"', b"[]"])
                digits = [at for at, byte in enumerate(line) if chr(byte).isdigit()]
                at = random.choice(digits) if digits else 0
                lines[place] = line[:at] + number + line[at + 1 :]
            case 4:
                lines[place] = line.replace(b"[", b"[[", 1).replace(b"]", b"]]", 1)
            case _:
                lines[place] = line.replace(b"tcp://127.0.0.1:9", random.choice([b"tcp://a:0;b:1", b"nonsense", b""]))
        if not lines:
            return lines
    if random.random() < 0.5:
        whole = [line.rstrip(b"\n") + b"\n" for line in lines[:-1]]
        end = {"kind": "end", "targets": len(whole) - 1, "checksum": xxh3_64(b"".join(whole)).hexdigest()}
        return [*whole, msgspec.json.encode(end) + b"\n"]
    return lines


@pytest.mark.parametrize("core", CORES)
def test_damaged_dump_leaves_consistent_index(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORE_VARIABLE, core)
    lines, read = dumped(), 0
    assert len(read_dump(lines, "")) == 3
    for random in examples(FEW, 1 / len(CORES)):
        given = changed(random, lines)
        try:
            saved = read_dump(given, "")
        except DumpError:
            continue
        read += 1
        indexer = Indexer()
        try:
            indexer.use_dump(saved)
            indexer.register_saved()
            with suppress(UnknownModelError):
                indexer.match(MatchQuery("m", PROMPT))
                indexer.longest(MatchQuery("m", PROMPT))
            indexer.index.check_integrity()
            for known in indexer.registered():
                indexer.report(known.target)
                again = [dump_of(indexer, known.target)]
                assert [each.whole() for each in read_dump(write_dump(again, ""), "")] == again, given
        finally:
            indexer.stop()
    assert read
