"""Restarts with a dump, a snapshot file or a peer, and the rejection of invalid ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from engine_publisher import Publisher
from hypothesis import given, settings
from hypothesis import strategies as st
from index_client import Client
from structlog.testing import capture_logs
from waiting import eventually
from xxhash import xxh3_64

from indexer import Index, Indexer, MatchQuery, Registration, Target, make_index
from indexer.dump import DumpedStream, DumpError, SavedTarget, TargetDump, read_dump, write_dump
from indexer.hashing import Namespace, PackedPrompt, pack_tokens
from indexer.reference.tree import RUN_BLOCKS
from indexer.snapshot import SnapshotWriter, load_from_peer, load_snapshot, save_snapshot
from indexer.streams.sequence import SequenceSettings, StreamState
from kvevents import BlockRemoved, BlockStored, Event, EventBatch, EventSource, encode_batch

TARGET = Target("w", 0, "m")
PROMPT = list(range(1, 9))


def new_indexer(secret: str = "") -> Indexer:
    return Indexer(secret, sequence=SequenceSettings(replay_timeout=0.3, idle_check=1.0))


@pytest.fixture
def indexers() -> Iterator[Callable[[], Indexer]]:
    """Function that creates running indexers, which are stopped after the test."""
    running: list[Indexer] = []

    def make(*dump: SavedTarget, secret: str = "") -> Indexer:
        indexer = new_indexer(secret)
        indexer.use_dump(dump)
        indexer.start()
        running.append(indexer)
        return indexer

    yield make
    for indexer in running:
        indexer.stop()


def follow(indexer: Indexer, publisher: Publisher) -> None:
    source = EventSource(0, publisher.endpoint, publisher.replay_endpoint)
    indexer.register(Registration(TARGET, source, "vLLM", 2))


def matched(indexer: Indexer, tokens: list[int] = PROMPT) -> int:
    return max((match.matched_tokens for match in indexer.longest(MatchQuery("m", tokens))), default=0)


def caught_up(indexer: Indexer, seq: int) -> None:
    def reached() -> bool:
        report = indexer.report(TARGET)
        return bool(report and report.stream and report.stream.last_seq == seq)

    eventually(reached)


def stored(hashes: list[int | bytes], tokens: list[int], parent: int | bytes | None = None) -> BlockStored:
    return BlockStored(hashes, parent, tokens, 2, medium="GPU")


def test_restart_resumes_from_the_snapshot(
    indexers: Callable[..., Indexer], publisher: Publisher, tmp_path: Path
) -> None:
    first = indexers()
    follow(first, publisher)
    publisher.publish(stored([1, b"\xab" * 32], PROMPT[:4]))
    caught_up(first, 0)
    save_snapshot(tmp_path / "index", first.dump())

    publisher.publish(stored([3], PROMPT[4:6], b"\xab" * 32))  # while no indexer reads the stream
    second = indexers(*load_snapshot(tmp_path / "index", ""))
    before = len(publisher.requests)
    follow(second, publisher)
    assert matched(second) >= 4, "the snapshot's blocks match at once"
    eventually(lambda: matched(second) == 6)
    assert publisher.requests[before] == 0, "the replay begins with the last batch, to detect a restart"
    publisher.publish(BlockRemoved([3], "GPU"))
    eventually(lambda: matched(second) == 4)


def test_engine_restarted_meanwhile_starts_empty(indexers: Callable[..., Indexer], publisher: Publisher) -> None:
    first = indexers()
    follow(first, publisher)
    publisher.publish(stored([1, 2], PROMPT[:4]))
    caught_up(first, 0)
    dump = read_dump(first.dump(), "")
    publisher.restart()
    publisher.publish(stored([9], [7, 7]))
    publisher.publish(stored([8], [8, 8]))
    second = indexers(*dump)
    follow(second, publisher)
    eventually(lambda: matched(second) == 0)
    eventually(lambda: matched(second, [8, 8]) == 2)


def test_indexer_registers_saved_targets(indexers: Callable[..., Indexer], publisher: Publisher) -> None:
    first = indexers()
    follow(first, publisher)
    publisher.publish(stored([1, 2], PROMPT[:4]))
    caught_up(first, 0)
    second = indexers(*read_dump(first.dump(), ""))
    second.register_saved()
    assert matched(second) == 4
    assert second.registered() == first.registered()


def test_stream_at_another_endpoint_starts_empty(
    indexers: Callable[..., Indexer], publishers: Callable[..., Publisher]
) -> None:
    old, new = publishers(), publishers()
    first = indexers()
    follow(first, old)
    old.publish(stored([1, 2], PROMPT[:4]))
    caught_up(first, 0)
    second = indexers(*read_dump(first.dump(), ""))
    follow(second, new)
    assert matched(second) == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-40], "not a dump|cut off"),
        (lambda data: data[: data.index(b"\n") + 1], "cut off"),
        (lambda data: data.replace(b'"w"', b'"v"'), "damaged"),
        (lambda data: data.replace(b'"format":2', b'"format":99'), "format 2"),
        (lambda _: b"\x00\x01 something else\n", "not a dump"),
        (lambda _: b"", "empty"),
    ],
)
def test_damaged_or_foreign_dump_is_rejected(
    indexers: Callable[..., Indexer],
    publisher: Publisher,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[bytes], bytes],
    said: str,
) -> None:
    indexer = indexers()
    follow(indexer, publisher)
    publisher.publish(stored([1, 2], PROMPT[:4]))
    caught_up(indexer, 0)
    data = damage(b"".join(indexer.dump()))
    with pytest.raises(DumpError, match=said):
        read_dump(data.splitlines(keepends=True), "")
    path = tmp_path / "index"
    path.write_bytes(data)
    assert load_snapshot(path, "") == []
    assert "starting cold" in capsys.readouterr().out


def test_dump_with_another_secret_is_rejected(indexers: Callable[..., Indexer]) -> None:
    indexer = indexers(secret="one")
    assert read_dump(indexer.dump(), "one") == []
    with pytest.raises(DumpError, match=r"index\.secret"):
        read_dump(indexer.dump(), "other")


def test_missing_snapshot_starts_empty_without_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_snapshot(tmp_path / "none", "") == []
    assert capsys.readouterr().out == ""


def test_snapshot_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "index"
    save_snapshot(path, [b"first"])

    def torn() -> Iterator[bytes]:
        yield b"sec"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_snapshot(path, torn())
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_snapshots_are_written_periodically_and_on_stop(
    indexers: Callable[..., Indexer], publisher: Publisher, tmp_path: Path
) -> None:
    path = tmp_path / "index"
    indexer = indexers()
    follow(indexer, publisher)
    publisher.publish(stored([1], PROMPT[:2]))
    caught_up(indexer, 0)
    writer = SnapshotWriter(indexer, path, interval=0.05)
    writer.start()
    eventually(lambda: len(load_snapshot(path, "")) == 1 if path.exists() else False)
    publisher.publish(stored([2], PROMPT[2:4], 1))
    caught_up(indexer, 1)
    writer.stop()
    assert load_snapshot(path, "")[0].about.stream.last_seq == 1


def test_indexer_starts_from_a_peer(
    client: Client, indexer: Indexer, indexers: Callable[..., Indexer], publisher: Publisher
) -> None:
    follow(indexer, publisher)
    publisher.publish(stored([1, 2], PROMPT[:4]))
    caught_up(indexer, 0)
    second = indexers(*load_from_peer(client.url, ""))
    follow(second, publisher)
    assert matched(second) == 4
    report = second.report(TARGET)
    assert report is not None
    eventually(lambda: (r := second.report(TARGET)) and r.stream and r.stream.state is StreamState.LIVE)


def test_peer_gets_the_token_and_slow_peer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    class Peer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["authorization"])
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                self.wfile.writelines(write_dump([], ""))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Peer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with capture_logs() as logs:
            load_from_peer(url, "", "admin")
            monkeypatch.setattr("indexer.snapshot._PEER_SECONDS", 0.0)
            load_from_peer(url, "")
        server.shutdown()
    assert asked == ["Bearer admin", None]
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [
        ("info", "peer's index loaded"),
        ("warning", "peer's index not used, starting cold"),
    ]


def test_unreachable_peer_starts_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_from_peer("http://127.0.0.1:1", "") == []
    assert "starting cold" in capsys.readouterr().out


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(stores=st.lists(st.tuples(paths, st.sampled_from(["GPU", "CPU"])), max_size=8), removals=st.data())
def test_restored_blocks_equal_the_dumped_ones(stores: list[tuple[list[int], str]], removals: st.DataObject) -> None:
    events: list[Event] = []
    names: set[tuple[int, str]] = set()
    for path, medium in stores:
        hashes = [hash(tuple(path[: end + 1])) & (2**63 - 1) for end in range(len(path))]
        names |= {(name, medium) for name in hashes}
        tokens = [token for symbol in path for token in (symbol, symbol)]
        events.append(BlockStored(list(hashes), None, tokens, 2, medium=medium))
    for name, medium in removals.draw(st.lists(st.sampled_from(sorted(names)), max_size=6)) if names else []:
        events.append(BlockRemoved([name], medium))
    index, again = make_index(), make_index()
    for each in (index, again):
        each.add(TARGET)
    index.apply(TARGET, EventBatch(0.0, events))
    again.restore(TARGET, SavedTarget(dump_of(index)).whole())
    again.check_integrity()
    assert again.runs <= index.runs
    namespace = Namespace("m", "default", None, None, 2)
    for path, _ in stores:
        packed = pack_tokens([token for symbol in path for token in (symbol, symbol)])
        assert again.match(namespace, PackedPrompt(packed)) == index.match(namespace, PackedPrompt(packed))
    everything = [BlockRemoved([name], medium) for name, medium in sorted(names)] * 20
    again.apply(TARGET, EventBatch(0.0, list(everything)))
    assert again.runs == 0


def test_long_prompts_are_restored() -> None:
    index, again = make_index(), make_index()
    for each in (index, again):
        each.add(TARGET)
    tokens = [number % 7 for number in range(3 * RUN_BLOCKS)]
    index.apply(TARGET, EventBatch(0.0, [BlockStored(list(range(len(tokens))), None, tokens, 1)]))
    again.restore(TARGET, dump_of(index))
    again.check_integrity()
    namespace = Namespace("m", "default", None, None, 1)
    assert again.match(namespace, PackedPrompt.of(tokens))[0].matched_tokens == len(tokens)


def test_invalid_dump_leaves_no_blocks() -> None:
    index = make_index()
    index.add(TARGET)
    index.apply(TARGET, EventBatch(0.0, [stored([1, 2], PROMPT[:4])]))
    dump = dump_of(index)
    dump.holders[0].blocks.append((3, 0, 99))
    again = make_index()
    again.add(TARGET)
    with pytest.raises(DumpError, match="outside its runs"):
        again.restore(TARGET, dump)
    again.check_integrity()
    assert again.runs == 0


def dump_of(index: Index) -> TargetDump:
    runs, holders = index.dump(TARGET)
    return TargetDump(
        worker="w",
        dp_rank=0,
        model="m",
        tenant="default",
        engine="vLLM",
        endpoint="",
        replay_endpoint="",
        topic="",
        block_size=None,
        adapter=None,
        capacity=None,
        block_sizes=[],
        stream=DumpedStream(0, 0.0),
        runs=runs,
        holders=holders,
    )


numbers = st.one_of(st.integers(-3, 40), st.sampled_from([10**12, 2**31, 2**63 - 1, 2**64 - 1, 2**64, 10**30]))
engine_hashes = st.one_of(st.integers(0, 6), st.sampled_from(["hex:" + "ab" * 32, "hex:zz", "", "hex:"]))
TARGET_LINE = {
    "kind": "target",
    "worker": "w",
    "dp_rank": 0,
    "model": "m",
    "tenant": "default",
    "engine": "vLLM",
    "endpoint": "tcp://127.0.0.1:9",
    "replay_endpoint": "tcp://127.0.0.1:9",
    "topic": "",
    "block_size": 2,
    "adapter": None,
    "capacity": None,
    "block_sizes": [2],
    "stream": {"last_seq": 3, "last_time": 1.0, "complete": True},
    "runs": [[-1, -1, [11, 12, 13]]],
    "holders": [],
}
# Invalid values of a line's fields.
lines = st.fixed_dictionaries(
    TARGET_LINE
    | {
        "worker": st.just("bad"),
        "dp_rank": st.one_of(st.just(0), numbers),
        "endpoint": st.one_of(st.just("tcp://127.0.0.1:9"), st.text(max_size=9)),
        "block_size": st.one_of(st.just(2), numbers, st.none()),
        "block_sizes": st.lists(st.one_of(st.just(2), numbers), max_size=2),
        "capacity": st.one_of(st.none(), numbers),
        "stream": st.fixed_dictionaries(
            {"last_seq": numbers, "last_time": st.one_of(st.floats(0, 1e9), st.none(), numbers)}
        ),
        "runs": st.lists(st.tuples(numbers, numbers, st.lists(numbers, max_size=4)), max_size=4),
        "holders": st.lists(
            st.fixed_dictionaries(
                {
                    "group": numbers,
                    "medium": st.sampled_from(["GPU", "CPU", ""]),
                    "window": st.one_of(st.none(), numbers),
                    "blocks": st.lists(st.tuples(engine_hashes, numbers, numbers), max_size=4),
                    "copies": st.lists(st.tuples(engine_hashes, numbers), max_size=2),
                }
            ),
            max_size=3,
        ),
    }
    | {name: st.just(value) for name, value in TARGET_LINE.items() if name in ("kind", "model", "tenant", "engine")}
    | {name: st.just(TARGET_LINE[name]) for name in ("replay_endpoint", "topic", "adapter")}
)


def dump_with(*written: bytes) -> list[bytes]:
    """Return a dump with these lines between its header and its end, and a valid checksum."""
    header, *_, _ = list(write_dump([], ""))
    whole = [header, *(line + b"\n" for line in written)]
    end = {"kind": "end", "targets": len(written), "checksum": xxh3_64(b"".join(whole)).hexdigest()}
    return [*whole, msgspec.json.encode(end) + b"\n"]


GOOD = msgspec.json.encode(
    TARGET_LINE | {"holders": [{"group": 0, "medium": "GPU", "window": None, "blocks": [[1, 0, 0]], "copies": []}]}
)


@settings(max_examples=300, deadline=None)
@given(lines)
def test_invalid_line_of_a_dump_skips_one_target(line: dict[str, object]) -> None:
    saved = read_dump(dump_with(GOOD, msgspec.json.encode(line), GOOD.replace(b'"w"', b'"x"')), "")
    assert {"w", "x"} <= {target.about.worker for target in saved}
    indexer = Indexer()
    indexer.use_dump(saved)
    indexer.register_saved()
    try:
        assert {"w", "x"} <= {known.target.worker for known in indexer.registered()}
        indexer.match(MatchQuery("m", PROMPT))
        indexer.longest(MatchQuery("m", PROMPT))
        list(map(indexer.report, [known.target for known in indexer.registered()]))
        indexer.index.check_integrity()
    finally:
        indexer.stop()


@pytest.mark.parametrize(
    "change",
    [
        {"block_sizes": [0]},
        {"block_size": 0},
        {"block_size": 10**30},
        {"endpoint": "nonsense"},
        {"endpoint": "tcp://127.0.0.1:0;127.0.0.2:9"},
        {"stream": {"last_seq": -1, "last_time": 1.0}},
        {"stream": {"last_seq": 2**64, "last_time": 1.0}},
        {"stream": {"last_seq": 1, "last_time": 1e308}},
        {"dp_rank": -1},
        {"runs": 5},
        {"runs": [[7, 0, [1]]]},
        {"runs": [[-1, 0, [2**64]]]},
    ],
)
def test_invalid_target_of_a_snapshot_is_skipped_alone(tmp_path: Path, change: dict[str, object]) -> None:
    good = msgspec.json.decode(GOOD)
    bad = msgspec.json.encode(good | {"worker": "bad"} | change)
    (tmp_path / "index").write_bytes(b"".join(dump_with(bad, GOOD)))
    indexer = Indexer()
    with capture_logs() as logs:
        indexer.use_dump(load_snapshot(tmp_path / "index", ""))
        indexer.register_saved()
    try:
        assert "w" in {known.target.worker for known in indexer.registered()}
        assert len(logs) == 1
        assert indexer.match(MatchQuery("m", PROMPT)) is not None
    finally:
        indexer.stop()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "null"])
def test_invalid_time_skips_one_target(tmp_path: Path, number: str) -> None:
    bad = GOOD.replace(b'"w"', b'"bad"').replace(b'"last_time":1.0', b'"last_time":' + number.encode())
    (tmp_path / "index").write_bytes(b"".join(dump_with(bad, GOOD)))
    assert [saved.about.worker for saved in load_snapshot(tmp_path / "index", "")] == ["w"]


def test_redirect_of_a_peer_is_not_followed() -> None:
    asked: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(307)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write no log."""

    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            assert load_from_peer(f"http://127.0.0.1:{server.server_port}", "", "token") == []
        finally:
            server.shutdown()
            thread.join()
    assert asked == ["/dump"]


@pytest.mark.parametrize("engine_time", [math.nan, math.inf, -math.inf, 1e308, -1.0])
def test_batch_with_invalid_time_is_applied_dumped_and_reported(
    running: Indexer, publisher: Publisher, engine_time: float
) -> None:
    running.register(Registration(TARGET, EventSource(0, publisher.endpoint, publisher.replay_endpoint), "vLLM", 2))
    publisher.send(0, encode_batch(EventBatch(engine_time, [BlockStored([1, 2], None, PROMPT[:4], 2)], 0)))
    eventually(lambda: [match.matched_tokens for match in running.longest(MatchQuery("m", PROMPT))] == [4])
    report = running.report(TARGET)
    assert report is not None
    assert report.stream is not None
    assert report.stream.lag is None
    assert len(read_dump(running.dump(), "")) == 1
