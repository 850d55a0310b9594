"""Invalid dumps and batches, from a foreign snapshot file or a peer's answer."""

from __future__ import annotations

import math
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest
from engine_publisher import Publisher, eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from xxhash import xxh3_64

from indexer import Indexer, MatchQuery, Registration, Target
from indexer.dump import read_dump, write_dump
from indexer.snapshot import load_from_peer, load_snapshot
from kvevents import BlockStored, EventBatch, EventSource, encode_batch

TARGET = Target("w", 0, "m")
PROMPT = list(range(1, 9))
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
