"""Publishers that connect to a socket of the index, each with its own topic, sequence and replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_publisher import Publisher
from index_client import served
from test_streams import block, matched
from waiting import eventually

from benchmarks.ports import free_port, free_ports
from indexer import Indexer, Registration, Target
from indexer.streams.bound import BindSettings
from indexer.streams.sequence import SequenceSettings, StreamState
from kvevents import EventBatch, EventSource, encode_batch
from kvevents.curve import KeyPair, be_client, create_key_pair, load_key_pair, temporary_key_pair

A, B = Target("pod-a", 0, "m"), Target("pod-b", 0, "m")


@contextmanager
def indexing(**bindings: Any) -> Iterator[Indexer]:
    indexer = Indexer(sequence=SequenceSettings(replay_timeout=0.3, idle_check=1.0), bindings=BindSettings(**bindings))
    try:
        indexer.start()
        yield indexer
    finally:
        indexer.stop()


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def bound(endpoint: str) -> Iterator[Indexer]:
    """Started indexer with a bound socket."""
    with indexing(endpoints=(endpoint,)) as indexer:
        yield indexer


Connect = Callable[..., Publisher]


@pytest.fixture
def connected(publishers: Callable[..., Publisher], endpoint: str) -> Connect:
    """Function that makes a publisher with a topic, and connects it."""

    def connect(topic: str) -> Publisher:
        publisher = publishers(topic.encode())
        publisher._live.connect(endpoint)
        publisher.wait_for_subscriber()
        return publisher

    return connect


def register(indexer: Indexer, target: Target, source: EventSource | None = None, **fields: Any) -> None:
    indexer.register(Registration(target, source, **fields))


def problems(indexer: Indexer) -> dict[str, str | None]:
    return {publisher.topic: publisher.problem for publisher in indexer.publishers()}


def test_publishers_are_told_apart_by_their_topics(bound: Indexer, connected: Connect) -> None:
    register(bound, A)
    register(bound, B)
    first, second = connected("kv@pod-a@m"), connected("kv@pod-b@m")
    for number in range(3):
        first.publish(block(number))
    second.publish(block(0))
    eventually(lambda: (matched(bound, A), matched(bound, B)) == (3, 1))
    assert problems(bound) == {"kv@pod-a@m": None, "kv@pod-b@m": None}

    def stream() -> tuple[StreamState, int | None] | None:
        report = bound.report(A)
        return None if report is None or report.stream is None else (report.stream.state, report.stream.last_seq)

    eventually(lambda: stream() == (StreamState.LIVE, 2))  # blocks are matched before their batch is counted


def test_pod_may_be_another_name_of_a_worker(bound: Indexer, connected: Connect) -> None:
    register(bound, Target("http://10.0.0.1:8000", 0, "base"))
    bound.pods = {"10.0.0.1": "http://10.0.0.1:8000"}
    connected("kv@10.0.0.1@served-name").publish(block(0))
    eventually(lambda: matched(bound, Target("http://10.0.0.1:8000", 0, "base")) == 1)


def test_gap_is_filled_by_the_replay_that_the_registration_names(
    bound: Indexer, connected: Connect, endpoint: str
) -> None:
    publisher = connected("kv@pod-a@m")
    register(bound, A, EventSource(0, endpoint, publisher.replay_endpoint))
    for number in range(6):
        publisher.publish(block(number), lost=number in (0, 3))
    eventually(lambda: matched(bound, A) == 6)
    assert publisher.requests


def test_gap_without_replay_is_lost(bound: Indexer, connected: Connect) -> None:
    register(bound, A)
    publisher = connected("kv@pod-a@m")
    publisher.publish(block(0))
    publisher.publish(block(1), lost=True)
    publisher.publish(block(2))
    eventually(lambda: (report := bound.report(A)) and report.stream and report.stream.state is StreamState.LOST)


def test_restarted_publisher_holds_only_what_it_publishes_again(bound: Indexer, connected: Connect) -> None:
    register(bound, A)
    publisher = connected("kv@pod-a@m")
    for number in range(4):
        publisher.publish(block(number))
    eventually(lambda: matched(bound, A) == 4)
    publisher.batches = []
    publisher.publish(block(0))
    eventually(lambda: matched(bound, A) == 1)


def test_unknown_publisher_is_listed_and_credited_with_nothing(bound: Indexer, connected: Connect) -> None:
    register(bound, A)
    connected("kv@stranger@m").publish(block(0))
    eventually(lambda: "stranger" in (problems(bound).get("kv@stranger@m") or ""))
    assert matched(bound, A) == 0


def test_early_messages_are_kept_until_the_worker_is_known(bound: Indexer, connected: Connect) -> None:
    publisher = connected("kv@pod-a@m")
    for number in range(5):
        publisher.publish(block(number))
    eventually(lambda: problems(bound).get("kv@pod-a@m"))
    register(bound, A)
    eventually(lambda: matched(bound, A) == 5)  # although it sends no other message


def test_ranks_are_told_apart_by_their_batches(bound: Indexer, connected: Connect) -> None:
    ranks = [Target("pod-a", rank, "m") for rank in (0, 1)]
    for target in ranks:
        register(bound, target)
    publisher = connected("kv@pod-a@m")
    publisher.send(0, encode_batch(EventBatch(1.0, [block(0)], 0)))
    publisher.send(0, encode_batch(EventBatch(1.0, [block(0), block(1)], 1)))
    eventually(lambda: [matched(bound, target) for target in ranks] == [1, 2])


def test_stream_of_the_worker_itself_wins(
    bound: Indexer, connected: Connect, publishers: Callable[..., Publisher]
) -> None:
    own = publishers()
    register(bound, A, EventSource(0, own.endpoint))
    own.wait_for_subscriber()
    own.publish(block(0))
    eventually(lambda: matched(bound, A) == 1)
    publisher = connected("kv@pod-a@m")
    for number in range(3):
        publisher.publish(block(number))
    eventually(lambda: "of its own" in (problems(bound).get("kv@pod-a@m") or ""))
    assert matched(bound, A) == 1


def test_second_publisher_of_a_target_is_refused(bound: Indexer, connected: Connect) -> None:
    register(bound, A)
    bound.pods = {"alias": "pod-a"}
    connected("kv@pod-a@m").publish(block(0))
    eventually(lambda: matched(bound, A) == 1)
    connected("kv@alias@m").publish(block(0), block(1))
    eventually(lambda: "sends the stream" in (problems(bound).get("kv@alias@m") or ""))
    assert matched(bound, A) == 1


def test_unreadable_messages_are_skipped(bound: Indexer, connected: Connect) -> None:
    register(bound, A)
    publisher = connected("kv@pod-a@m")
    empty = encode_batch(EventBatch(1.0, []))
    for message in ([b"kv@pod-a@m"], [b"\xff", bytes(8), empty], [b"x" * 300, bytes(8), empty]):
        publisher.send_raw(message)
    publisher.publish(block(0))
    eventually(lambda: matched(bound, A) == 1)
    assert list(problems(bound)) == ["kv@pod-a@m"]


def test_all_addresses_are_bound_only_with_a_token_or_keys() -> None:
    sources = [EventSource(0, f"tcp://*:{port}") for port in free_ports(3)]
    with indexing() as indexer, pytest.raises(ValueError, match=r"endpoint: .*server\.token"):
        register(indexer, A, sources[0])
    with indexing(guarded=True) as indexer:
        register(indexer, A, sources[1])
    with indexing(keys=temporary_key_pair()) as indexer:
        register(indexer, A, sources[2])


def test_registered_wildcard_binds_until_it_is_unregistered(publishers: Callable[..., Publisher]) -> None:
    port = free_port()
    with indexing(guarded=True) as indexer, served(indexer) as client:
        body = {"instance_id": "pod-a", "modelname": "m", "endpoint": f"tcp://*:{port}"}
        assert client.post("/register", body)[0] == 201
        publisher = publishers(b"any")
        publisher._live.connect(f"tcp://127.0.0.1:{port}")
        publisher.wait_for_subscriber()
        publisher.publish(block(0))
        eventually(lambda: matched(indexer, A) == 1)
        listed = client.get("/workers")[1]["publishers"]
        assert [(each["topic"], each["worker"], each["problem"]) for each in listed] == [("any", "pod-a", None)]
        assert client.post("/unregister", {"instance_id": "pod-a"})[0] == 200
        with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.SUB) as socket:

            def can_bind() -> bool:
                try:
                    socket.bind(f"tcp://*:{port}")
                except zmq.ZMQError:
                    return False
                return True

            eventually(can_bind)


@contextmanager
def encrypted(endpoint: str, server: KeyPair, own: KeyPair) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.XPUB) as socket:
        be_client(socket, server.public.decode(), own)
        socket.connect(endpoint)
        yield socket
        socket.close(0)


def test_encrypted_publishers_are_told_apart_by_their_keys(endpoint: str) -> None:
    server, right, wrong = temporary_key_pair(), temporary_key_pair(), temporary_key_pair()
    batch = [b"kv@pod-a@m", bytes(8), encode_batch(EventBatch(1.0, [block(0)], 0))]
    with (
        indexing(endpoints=(endpoint,), keys=server) as indexer,
        encrypted(endpoint, server, wrong) as impostor,
        encrypted(endpoint, server, right) as publisher,
    ):
        register(indexer, A, EventSource(0, endpoint, curve_server_key=right.public.decode()))
        assert impostor.poll(60_000)
        impostor.send_multipart(batch)
        eventually(lambda: "key" in (problems(indexer).get("kv@pod-a@m") or ""))
        assert matched(indexer, A) == 0
        assert publisher.poll(60_000)
        publisher.send_multipart(batch)
        eventually(lambda: matched(indexer, A) == 1)
        keys = {each.identity: each.problem for each in indexer.publishers()}
        assert keys[right.public.decode()] is None
        assert keys[wrong.public.decode()] is not None


def test_only_listed_keys_connect(endpoint: str, tmp_path: Path) -> None:
    server = temporary_key_pair()
    _, secret = create_key_pair(tmp_path, "listed")
    with (
        indexing(endpoints=(endpoint,), keys=server, publisher_keys=tmp_path),
        encrypted(endpoint, server, temporary_key_pair()) as stranger,
        encrypted(endpoint, server, load_key_pair(secret, "x")) as listed,
    ):
        assert listed.poll(60_000)  # the subscription arrived
        assert not stranger.poll(300)
