"""The publisher: what a subscriber gets, what a replay gives, and what happens when either is slow."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from waiting import eventually

from kvevents import AllBlocksCleared, BlockStored, EventBatch, WireForm, decode_batch
from kvevents.frames import parse_live, parse_replay, replay_request
from worker import EventPublisherFactory, NullEventPublisher, PublisherConfig, ZmqEventPublisher
from worker.zmq_publisher import REPLAY_STALL_S

DEADLINE_S = 60.0
LOOPBACK = "tcp://127.0.0.1:0"


class Sockets:
    """The subscribers' side: opens sockets, and closes them after the test."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.opened: list[zmq.Socket[bytes]] = []

    def open(self, kind: int) -> zmq.Socket[bytes]:
        sock = self.context.socket(kind)
        sock.rcvtimeo = int(DEADLINE_S * 1000)
        self.opened.append(sock)
        return sock

    def close(self) -> None:
        for sock in self.opened:
            sock.close(linger=0)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with zmq.Context() as context:
        sockets = Sockets(context)
        yield sockets
        sockets.close()


@pytest.fixture
def make() -> Iterator[Callable[..., ZmqEventPublisher]]:
    made: list[ZmqEventPublisher] = []

    def publisher(**fields: Any) -> ZmqEventPublisher:
        made.append(ZmqEventPublisher(**{"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, "bind": True, **fields}))
        return made[-1]

    yield publisher
    for each in made:
        each.shutdown()


def stored(number: int) -> EventBatch:
    return EventBatch(float(number), [BlockStored([number], None, [1, 2], 2)])


def subscribe(sockets: Sockets, publisher: ZmqEventPublisher) -> zmq.Socket[bytes]:
    """A SUB socket that is known to be receiving: probes go round until one arrives, then the stream is drained."""
    sub = sockets.open(zmq.SUB)
    sub.subscribe(b"")
    sub.connect(publisher.endpoint)
    deadline = time.monotonic() + DEADLINE_S
    while not sub.poll(20):
        assert time.monotonic() < deadline, "the subscriber never connected"
        publisher.publish(EventBatch(-1.0, []))
    while sub.poll(100):
        sub.recv_multipart()
    return sub


def receive(sub: zmq.Socket[bytes], count: int) -> list[tuple[int, EventBatch]]:
    frames = [parse_live(sub.recv_multipart()) for _ in range(count)]
    return [(frame.seq, decode_batch(frame.payload)) for frame in frames]


def replay(sockets: Sockets, publisher: ZmqEventPublisher, start: int) -> list[tuple[int, bytes]]:
    dealer = sockets.open(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart(replay_request(start))
    batches = []
    while (frame := parse_replay(dealer.recv_multipart())) is not None:
        batches.append((frame.seq, frame.payload))
    dealer.close()
    return batches


def test_live_batches_arrive_in_order_with_numbers_and_rank(sockets, make):
    publisher = make(attn_dp_rank=3, topic="kv")
    sub = subscribe(sockets, publisher)
    for number in range(50):
        publisher.publish(stored(number))
    received = receive(sub, 50)
    sequence = [seq for seq, _ in received]
    assert sequence == list(range(sequence[0], sequence[0] + 50))
    assert [batch.events[0].block_hashes for _, batch in received] == [[number] for number in range(50)]
    assert {batch.dp_rank for _, batch in received} == {3}


def test_topic_is_first_frame(sockets, make):
    publisher = make(topic="kv-events")
    sub = subscribe(sockets, publisher)
    publisher.publish(stored(1))
    assert sub.recv_multipart()[0] == b"kv-events"


def test_batch_keeps_its_rank_and_can_be_changed_after_publish(sockets, make):
    publisher = make(attn_dp_rank=1)
    sub = subscribe(sockets, publisher)
    batch = EventBatch(1.0, [AllBlocksCleared()], dp_rank=7)
    publisher.publish(batch)
    batch.events.clear()
    [(_, received)] = receive(sub, 1)
    assert received.dp_rank == 7
    assert received.events == [AllBlocksCleared()]


@pytest.mark.parametrize("form", list(WireForm))
def test_every_wire_form_is_decoded(sockets, make, form):
    publisher = make(wire_form=form)
    publisher.publish(stored(5))
    [(_, payload)] = replay_until(sockets, publisher, 1)
    assert decode_batch(payload).events[0].block_hashes == [5]


def replay_until(sockets: Sockets, publisher: ZmqEventPublisher, count: int) -> list[tuple[int, bytes]]:
    """Replays from 0 until `count` batches have been sent."""
    batches: list[tuple[int, bytes]] = []
    eventually(
        lambda: bool(batches.clear() or batches.extend(replay(sockets, publisher, 0)) or len(batches) == count), ""
    )
    return batches


def test_batch_is_sent_within_milliseconds(sockets, make):
    publisher = make()
    sub = subscribe(sockets, publisher)
    waits = []
    for number in range(20):
        time.sleep(0.01)  # let the thread fall asleep
        begin = time.perf_counter()
        publisher.publish(stored(number))
        sub.recv_multipart()
        waits.append(time.perf_counter() - begin)
    assert sorted(waits)[10] < 0.05


def test_replay_returns_batches_from_requested_number(sockets, make):
    publisher = make()
    for number in range(100):
        publisher.publish(stored(number))
    assert [seq for seq, _ in replay_until(sockets, publisher, 100)] == list(range(100))
    assert [seq for seq, _ in replay(sockets, publisher, 97)] == [97, 98, 99]
    assert replay(sockets, publisher, 100) == []
    assert replay(sockets, publisher, 2**64 - 1) == []


def test_replay_keeps_last_buffer_steps_batches(sockets, make):
    publisher = make(buffer_steps=10)
    sub = subscribe(sockets, publisher)
    for number in range(25):
        publisher.publish(stored(number))
    last = receive(sub, 25)[-1][0]
    assert [seq for seq, _ in replay(sockets, publisher, 0)] == list(range(last - 9, last + 1))


def test_replay_without_buffer_has_only_end(sockets, make):
    publisher = make(buffer_steps=0)
    publisher.publish(stored(1))
    assert replay(sockets, publisher, 0) == []


def test_replay_has_documented_frames(sockets, make):
    publisher = make(topic="kv")
    publisher.publish(stored(1))
    replay_until(sockets, publisher, 1)
    dealer = sockets.open(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart(replay_request(0))
    assert dealer.recv_multipart()[:3] == [b"", b"kv", bytes(8)]
    assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]  # without a topic, as engines send it


def test_malformed_replay_request_is_counted_and_next_is_answered(sockets, make):
    publisher = make()
    publisher.publish(stored(1))
    dealer = sockets.open(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart([b"", b"", bytes(8)])
    dealer.send_multipart([b"", b"short"])
    dealer.send_multipart([bytes(8)])
    eventually(lambda: publisher.malformed_requests == 3, "malformed requests are counted")
    assert len(replay_until(sockets, publisher, 1)) == 1


def test_slow_client_receives_long_replay_beside_live_batches(sockets, make):
    publisher = make(buffer_steps=20_000)
    sub = subscribe(sockets, publisher)
    first = publisher_end(sockets, publisher)
    payload = EventBatch(0.0, [BlockStored([1], None, list(range(500)), 500)])
    for _ in range(8000):
        publisher.publish(payload)
    receive(sub, 8000)

    slow = sockets.open(zmq.DEALER)
    slow.rcvhwm = 10
    slow.connect(publisher.replay_endpoint)
    slow.send_multipart(replay_request(first))
    assert parse_replay(slow.recv_multipart()).seq == first  # the replay has begun; now read nothing more of it

    publisher.publish(stored(1))
    begin = time.perf_counter()
    receive(sub, 1)
    assert time.perf_counter() - begin < REPLAY_STALL_S / 2
    # another client is served meanwhile
    assert [seq for seq, _ in replay(sockets, publisher, first + 7990)] == list(range(first + 7990, first + 8001))

    rest = []
    while (frame := parse_replay(slow.recv_multipart())) is not None:
        rest.append(frame.seq)
    assert rest == list(range(first + 1, first + 8000))


def publisher_end(sockets: Sockets, publisher: ZmqEventPublisher) -> int:
    """The sequence number that the next batch gets."""
    batches = replay(sockets, publisher, 0)
    return batches[-1][0] + 1 if batches else 0


def test_replay_of_disconnected_client_is_abandoned(sockets, make):
    publisher = make(buffer_steps=20_000)
    payload = EventBatch(0.0, [BlockStored([1], None, list(range(500)), 500)])
    for _ in range(8000):
        publisher.publish(payload)
    # A replay ends with the batches that were sent when it was asked for: this one must be longer than any buffer.
    eventually(lambda: publisher_end(sockets, publisher) == 8000, "all batches are sent")
    gone = sockets.open(zmq.DEALER)
    gone.rcvhwm = 10
    gone.connect(publisher.replay_endpoint)
    gone.send_multipart(replay_request(0))
    assert parse_replay(gone.recv_multipart()) is not None
    gone.close()
    eventually(lambda: publisher.abandoned_replays >= 1, "the replay is given up")
    assert publisher_end(sockets, publisher) == 8000


def test_requests_of_one_client_are_answered_in_order(sockets, make):
    publisher = make()
    for number in range(300):
        publisher.publish(stored(number))
    replay_until(sockets, publisher, 300)
    dealer = sockets.open(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart(replay_request(0))
    dealer.send_multipart(replay_request(200))
    frames = [parse_replay(dealer.recv_multipart()) for _ in range(402)]
    assert [frame and frame.seq for frame in frames] == [*range(300), None, *range(200, 300), None]


def test_full_queue_drops_oldest_batch_and_leaves_gap(sockets, make):
    publisher = make(max_queue_size=4)
    total = 20_000
    for number in range(total):
        publisher.publish(stored(number))
    eventually(lambda: publisher_end(sockets, publisher) == total, "the last batch is always sent")
    assert publisher.dropped > 0
    batches = replay(sockets, publisher, 0)
    assert all(decode_batch(payload).events[0].block_hashes == [seq] for seq, payload in batches)
    everything = {seq for seq, _ in batches}
    assert len(everything) <= total - publisher.dropped


def test_shutdown_sends_queued_batches_and_is_repeatable(sockets, make):
    publisher = make()
    sub = subscribe(sockets, publisher)
    for number in range(2000):
        publisher.publish(stored(number))
    publisher.shutdown()
    publisher.shutdown()
    assert len(receive(sub, 2000)) == 2000
    assert publisher.dropped == 0
    with pytest.raises(RuntimeError, match="shut down"):
        publisher.publish(stored(1))


def test_shutdown_frees_ports_and_thread(make):
    before = threading.active_count()
    publisher = make()
    endpoint = publisher.endpoint
    publisher.shutdown()
    assert threading.active_count() == before
    eventually(lambda: is_free(endpoint), "the port is free again")


def is_free(endpoint: str) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        except OSError:
            return False
    return True


def test_threads_publish_one_consecutive_sequence(sockets, make):
    publisher = make()
    threads = [
        threading.Thread(target=lambda: [publisher.publish(stored(number)) for number in range(200)]) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seq for seq, _ in replay_until(sockets, publisher, 1000)] == list(range(1000))


def test_port_zero_is_resolved(make):
    publisher = make(endpoint="tcp://*:0", replay_endpoint="tcp://*:0", bind=None)
    for endpoint in (publisher.endpoint, publisher.replay_endpoint):
        assert endpoint.startswith("tcp://*:")
        assert int(endpoint.rpartition(":")[2]) > 0


def test_ranks_use_consecutive_ports(make):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = min(probe.getsockname()[1], 65000)
    publisher = make(attn_dp_rank=2, endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None)
    assert publisher.endpoint == f"tcp://127.0.0.1:{port + 2}"
    assert publisher.replay_endpoint is None


def test_endpoint_without_wildcard_is_connected(sockets, make):
    sub = sockets.open(zmq.SUB)
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publisher = make(endpoint=f"tcp://127.0.0.1:{port}", bind=None)
    deadline = time.monotonic() + DEADLINE_S
    while not sub.poll(20):
        assert time.monotonic() < deadline
        publisher.publish(stored(1))
    assert decode_batch(parse_live(sub.recv_multipart()).payload).events[0].block_hashes == [1]


def test_subscriber_in_same_process_can_use_inproc(make):
    publisher = make(attn_dp_rank=1, endpoint="inproc://kv-events-test", replay_endpoint=None, bind=None)
    assert publisher.endpoint == "inproc://kv-events-test_dp1"
    inside = Sockets(zmq.Context.instance())
    sub = subscribe(inside, publisher)
    publisher.publish(stored(1))
    assert len(receive(sub, 1)) == 1
    inside.close()


def test_endpoint_in_use_is_named(make):
    taken = make()
    with pytest.raises(OSError, match=taken.endpoint):
        make(endpoint=taken.endpoint)


def test_port_zero_cannot_be_connected(make):
    with pytest.raises(ValueError, match=r"tcp://127\.0\.0\.1:0"):
        make(bind=False)


@pytest.mark.parametrize("config", [None, "", "{}", '{"publisher": "null"}'])
def test_missing_configuration_publishes_nothing(config):
    publisher = EventPublisherFactory.create(config)
    assert isinstance(publisher, NullEventPublisher)
    publisher.publish(stored(1))
    publisher.shutdown()


def test_sglang_configuration_is_accepted():
    text = (
        '{"publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": null, "buffer_steps": 10000,'
        ' "hwm": 100000, "max_queue_size": 100000, "topic": ""}'
    )
    publisher = EventPublisherFactory.create(text)
    assert isinstance(publisher, ZmqEventPublisher)
    assert publisher.replay_endpoint is None
    publisher.shutdown()


@pytest.mark.parametrize("rank", ["attn_tp_rank", "attn_cp_rank", "pp_rank"])
def test_only_first_rank_with_equal_blocks_publishes(rank):
    publisher = EventPublisherFactory.create('{"publisher": "zmq", "endpoint": "tcp://*:0"}', **{rank: 1})
    assert isinstance(publisher, NullEventPublisher)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "KV events configuration"),
        ("[]", "object"),
        ('{"publisher": "kafka"}', "publisher 'kafka'.*null, zmq"),
        ('{"publisher": "zmq", "buffer_steps": "many"}', "buffer_steps"),
        ('{"publisher": "zmq", "hwm": -1}', "hwm"),
        ('{"publisher": "zmq", "max_queue_size": 0}', "max_queue_size"),
        ('{"publisher": "zmq", "endpoint": 5557}', "endpoint"),
        ('{"publisher": "zmq", "format": "dynamo"}', "format"),
        ('{"publisher": "zmq", "bind": "yes"}', "bind"),
        ('{"publisher": "zmq", "replay_endpont": "tcp://*:1"}', "replay_endpont"),
        ('{"publisher": "zmq", "endpoint": "5557"}', "endpoint '5557'"),
        ('{"publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://host"}', "endpoint 'tcp://host'"),
    ],
)
def test_invalid_configuration_is_rejected_by_field(config, message):
    with pytest.raises(ValueError, match=message):
        EventPublisherFactory.create(config)


def test_custom_publisher_can_be_registered():
    made: list[dict[str, Any]] = []

    class Recording(NullEventPublisher):
        def __init__(self, **fields: Any) -> None:
            made.append(fields)

    EventPublisherFactory.register_publisher("recording", Recording)
    publisher = EventPublisherFactory.create(json.dumps({"publisher": "recording", "topic": "t"}), attn_dp_rank=2)
    assert isinstance(publisher, Recording)
    assert made[0]["attn_dp_rank"] == 2
    assert made[0]["topic"] == "t"
    assert set(made[0]) == {"attn_dp_rank", *PublisherConfig.__struct_fields__} - {"publisher", "bind", "format"}
    with pytest.raises(KeyError, match="recording"):
        EventPublisherFactory.register_publisher("recording", Recording)
    with pytest.raises(KeyError, match="null"):
        EventPublisherFactory.register_publisher("null", Recording)


def test_configuration_of_sglang_can_bind_a_concrete_address() -> None:
    config = {"publisher": "zmq", "endpoint": LOOPBACK, "bind": True, "format": "default"}
    publisher = EventPublisherFactory.create(json.dumps(config))
    publisher.shutdown()
    assert isinstance(publisher, ZmqEventPublisher)
    assert not publisher.endpoint.endswith(":0")


def test_publisher_imports_pyzmq_and_msgspec_only():
    script = """
import sys
import worker
heavy = {"fastapi", "starlette", "uvicorn", "transformers", "tokenizers", "prometheus_client", "pydantic", "xxhash",
         "aiohttp", "numpy", "indexer", "router", "kvrouter"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
