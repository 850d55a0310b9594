"""CurveZMQ between a publisher and the indexer: allowed and refused subscribers, and the warnings."""

from __future__ import annotations

import json
import logging
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import zmq
from structlog.testing import capture_logs
from typer.testing import CliRunner
from waiting import eventually

import indexer.streams.session
from indexer import Indexer, MatchQuery, Registration, Target
from indexer.dump import read_dump
from indexer.sockets import HandshakeFailed
from indexer.streams.sequence import SequenceSettings, StreamState
from kvevents import BlockStored, EventBatch, EventSource
from kvevents.curve import KeyPair, create_key_pair, load_key_pair, load_public_key
from kvrouter.cli import app
from kvrouter.processes import KvrouterProcess
from worker import EventPublisherFactory, PublisherConfig, ZmqEventPublisher

DEADLINE_S = 60.0
LOOPBACK = "tcp://127.0.0.1:0"
# The events of a plain socket that meets an encrypting one: a mismatch, or no detail if the peer closed first.
DISAGREED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
TARGET = Target("w", 0, "m")

Publish = Callable[..., ZmqEventPublisher]
Read = Callable[..., Indexer]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with key pairs named worker, router and stranger."""
    for name in ("worker", "router", "stranger"):
        create_key_pair(tmp_path / "keys", name)
    return tmp_path / "keys"


@pytest.fixture
def publisher() -> Iterator[Publish]:
    made: list[ZmqEventPublisher] = []

    def make(**fields: Any) -> ZmqEventPublisher:
        made.append(ZmqEventPublisher(0, LOOPBACK, LOOPBACK, topic="kv", bind=True, **fields))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


@pytest.fixture
def reader() -> Iterator[Read]:
    made: list[Indexer] = []

    def read(published: ZmqEventPublisher | EventSource, key: str | None, own: KeyPair | None = None) -> Indexer:
        made.append(Indexer(sequence=SequenceSettings(replay_timeout=0.3), keys=own))
        made[-1].start()
        source = EventSource(0, published.endpoint, published.replay_endpoint, "kv", key)
        made[-1].register(Registration(TARGET, source))
        return made[-1]

    yield read
    for each in made:
        each.stop()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[HandshakeFailed]:
    """The failed handshakes between publishers and the reader."""
    seen: list[HandshakeFailed] = []
    read = indexer.streams.session.read_monitor

    def watch(monitor: zmq.Socket[bytes]) -> Any:
        happened = read(monitor)
        if isinstance(happened, HandshakeFailed):
            seen.append(happened)
        return happened

    monkeypatch.setattr(indexer.streams.session, "read_monitor", watch)
    return seen


def block(number: int) -> EventBatch:
    """The block after `number` others of one prompt, whose tokens are all alike."""
    return EventBatch(float(number), [BlockStored([number + 1], number or None, [7], 1)])


def matched(reading: Indexer) -> int:
    return sum(match.matched_tokens for match in reading.match(MatchQuery("m", [7] * 1000)))


def state(reading: Indexer) -> StreamState | None:
    report = reading.report(TARGET)
    return report.stream.state if report and report.stream else None


def in_place_of(gone: ZmqEventPublisher | EventSource, **fields: Any) -> ZmqEventPublisher:
    """A publisher on the same ports, which may be busy for a moment."""
    made: list[ZmqEventPublisher] = []

    def bound() -> bool:
        with suppress(OSError):
            made.append(ZmqEventPublisher(0, gone.endpoint, gone.replay_endpoint, topic="kv", bind=True, **fields))
        return bool(made)

    eventually(bound, "bound")
    return made[0]


def assert_read_once_it_encrypts(plain: ZmqEventPublisher | EventSource, reading: Indexer, keys: Path) -> None:
    """A publisher takes the place of one that did not encrypt."""
    encrypted = in_place_of(plain, curve_secret_key_file=str(keys / "worker.key_secret"))
    try:
        for number in range(5):
            encrypted.publish(block(number))
        assert_replayed_and_read_live(encrypted, reading)
    finally:
        encrypted.shutdown()


def assert_replayed_and_read_live(published: ZmqEventPublisher, reading: Indexer) -> None:
    """Assert that earlier batches are replayed and later ones are read live."""
    eventually(lambda: matched(reading) == 5 and state(reading) is StreamState.LIVE, "replayed")
    for number in range(5, 10):
        published.publish(block(number))
    eventually(lambda: matched(reading) == 10, "read live")
    assert state(reading) is StreamState.LIVE


def test_encrypted_stream_is_read_live_and_replayed(publisher: Publish, reader: Read, keys: Path) -> None:
    published = publisher(curve_secret_key_file=str(keys / "worker.key_secret"))
    for number in range(5):
        published.publish(block(number))
    assert_replayed_and_read_live(published, reader(published, load_public_key(keys / "worker.key", "key")))


def test_stream_without_keys_is_open(publisher: Publish, reader: Read) -> None:
    published = publisher()
    for number in range(5):
        published.publish(block(number))
    assert_replayed_and_read_live(published, reader(published, None))


def test_only_listed_clients_can_read(
    publisher: Publish, reader: Read, keys: Path, tmp_path: Path, refusals: list[HandshakeFailed], caplog: Any
) -> None:
    caplog.set_level(logging.CRITICAL, "zmq.auth")
    listed_keys = tmp_path / "listed_keys"
    listed_keys.mkdir()
    (listed_keys / "router.key").write_bytes((keys / "router.key").read_bytes())
    secret, public = str(keys / "worker.key_secret"), load_public_key(keys / "worker.key", "key")
    published = publisher(curve_secret_key_file=secret, curve_client_keys=str(listed_keys))
    for number in range(5):
        published.publish(block(number))
    stranger = reader(published, public, load_key_pair(keys / "stranger.key_secret", "key"))
    eventually(lambda: len(refusals) > 0, "refused")
    anonymous = reader(published, public)
    eventually(lambda: len(refusals) > 2, "refused")
    listed = reader(published, public, load_key_pair(keys / "router.key_secret", "key"))
    assert_replayed_and_read_live(published, listed)
    assert {refusal.reason for refusal in refusals} == {"the publisher does not know this subscriber's key"}
    for reading in (stranger, anonymous):
        assert (state(reading), matched(reading)) == (StreamState.CONNECTING, 0)


@pytest.mark.parametrize(
    ("publishers", "readers"),
    [("worker.key_secret", None), (None, "worker.key"), ("worker.key_secret", "stranger.key")],
    ids=["no key", "no encryption", "wrong key"],
)
def test_reader_with_wrong_key_receives_nothing_and_warns_once(
    publishers: str | None,
    readers: str | None,
    publisher: Publish,
    reader: Read,
    keys: Path,
    refusals: list[HandshakeFailed],
) -> None:
    published = publisher(curve_secret_key_file=publishers and str(keys / publishers))
    for number in range(5):
        published.publish(block(number))
    with capture_logs() as logs:
        reading = reader(published, load_public_key(keys / readers, "key") if readers else None)
        eventually(lambda: len(refusals) >= 2, "refused again")
        published.publish(block(5))
        eventually(lambda: len(refusals) >= 3, "refused again and again")
    (entry,) = (entry for entry in logs if entry["event"] == "handshake with the publisher failed")
    assert entry["log_level"] == "warning"
    assert entry["worker"] == "w"
    assert "encrypted" in entry["reason"]
    assert (state(reading), matched(reading)) == (StreamState.CONNECTING, 0)


def test_publisher_that_starts_encrypting_is_read_again(
    publisher: Publish, reader: Read, keys: Path, refusals: list[HandshakeFailed]
) -> None:
    plain = publisher()
    reading = reader(plain, load_public_key(keys / "worker.key", "key"))
    eventually(lambda: len(refusals) > 0, "refused")
    plain.shutdown()
    assert_read_once_it_encrypts(plain, reading, keys)


def test_replay_endpoint_is_retried_after_refusal(reader: Read, keys: Path, refusals: list[HandshakeFailed]) -> None:
    """A socket does not reconnect by itself after a handshake error that says that the peer does not encrypt."""
    with (
        socket.create_server(("127.0.0.1", 0)) as live,
        zmq.Context[zmq.Socket[bytes]]() as context,
        context.socket(zmq.ROUTER) as replay,
        replay.get_monitor_socket(DISAGREED) as refused,
    ):
        plain = EventSource(
            0,
            f"tcp://127.0.0.1:{live.getsockname()[1]}",
            f"tcp://127.0.0.1:{replay.bind_to_random_port('tcp://127.0.0.1')}",
        )
        reading = reader(plain, load_public_key(keys / "worker.key", "key"))
        connection, _ = live.accept()
        live.close()
        connection.close()  # one close alone does not look like a refusal
        assert refused.poll(DEADLINE_S * 1000)
        eventually(lambda: len(refusals) > 0, "hung up on")
        replay.disable_monitor()
    assert [refusal.final for refusal in refusals] == [False]
    assert_read_once_it_encrypts(plain, reading, keys)


def test_restarted_indexer_keeps_keys_of_streams(publisher: Publish, reader: Read, keys: Path) -> None:
    published = publisher(curve_secret_key_file=str(keys / "worker.key_secret"))
    for number in range(5):
        published.publish(block(number))
    before = reader(published, load_public_key(keys / "worker.key", "key"))
    eventually(lambda: matched(before) == 5)
    after = Indexer()
    after.use_dump(read_dump(before.dump(), ""))
    after.start()
    try:
        after.register_saved()
        assert after.registered() == before.registered()
        assert_replayed_and_read_live(published, after)
    finally:
        after.stop()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"curve_secret_key_file": "{keys}/nobody.key_secret"}, "curve_secret_key_file: .*nobody"),
        ({"curve_secret_key_file": "{keys}/worker.key"}, "curve_secret_key_file: .* holds no secret key"),
        ({"curve_client_keys": "{keys}"}, "curve_client_keys: also set curve_secret_key_file"),
        (
            {"curve_secret_key_file": "{keys}/worker.key_secret", "curve_client_keys": "{keys}/worker.key"},
            "curve_client_keys: .*worker.key: the folder does not exist",
        ),
    ],
)
def test_publisher_names_unusable_keys(keys: Path, fields: dict[str, str], message: str) -> None:
    given = {name: value.format(keys=keys) for name, value in fields.items()}
    config = PublisherConfig(publisher="zmq", endpoint=LOOPBACK, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        EventPublisherFactory.create(json.dumps({"publisher": "zmq", "endpoint": config.endpoint, **given}))


def test_simulated_worker_encrypts_streams(keys: Path) -> None:
    events = {
        "publisher": "zmq",
        "endpoint": LOOPBACK,
        "replay_endpoint": LOOPBACK,
        "curve_secret_key_file": str(keys / "worker.key_secret"),
    }
    with KvrouterProcess(
        ["simulate", "--block-size", "1", "--max-model-len", "4096", "--kv-events", json.dumps(events)]
    ) as process:
        url = process.wait_until_listening()
        body = json.dumps({"model": "simulated", "prompt": [7] * 20, "max_tokens": 1}).encode()
        with urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"}), timeout=60):
            pass
        with urlopen(f"{url}/kv_event_sources", timeout=60) as answer:
            stream = json.load(answer)["0"]
        reading = Indexer()
        reading.start()
        try:
            key = load_public_key(keys / "worker.key", "key")
            source = EventSource(0, stream["endpoint"], stream["replay_endpoint"], stream["topic"], key)
            reading.register(Registration(TARGET, source))
            eventually(lambda: matched(reading) >= 20)
        finally:
            reading.stop()


def test_keygen_writes_pair_and_never_overwrites(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["keygen", str(tmp_path / "new"), "--name", "gpu-1"])
    assert made.exit_code == 0, made.output
    public, secret = tmp_path / "new" / "gpu-1.key", tmp_path / "new" / "gpu-1.key_secret"
    assert made.output == f"public key: {public}\nsecret key: {secret}\n"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert load_key_pair(secret, "key").public.decode() == load_public_key(public, "key")
    before = secret.read_bytes()
    again = CliRunner().invoke(app, ["keygen", str(tmp_path / "new"), "--name", "gpu-1"])
    assert again.exit_code == 1
    assert "exists already" in again.output
    assert secret.read_bytes() == before
