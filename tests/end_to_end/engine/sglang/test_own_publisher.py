"""The publisher of this project beside SGLang's: the same events, frames, replays and ports."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from benchmarks.ports import free_ports
from engine.sglang.installation import SglangInstallation
from engine.sglang.table import Table
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from worker import EventPublisherFactory

pytestmark = pytest.mark.engine_sglang

SCRIPT = Path(__file__).with_name("engine_events.py")
RANKS = (0, 1)
STORED = {"block_hashes": [5, -7], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2}
BATCHES: list[tuple[float, list[tuple[str, dict[str, Any]]]]] = [
    (1.5, [("AllBlocksCleared", {})]),
    (2.5, [("BlockStored", STORED | {"lora_id": None, "medium": "GPU"})]),
    (3.5, [("BlockStored", STORED | {"parent_block_hash": 5, "lora_id": None, "medium": "GPU", "cache_salt": "s"})]),
    (4.5, [("BlockStored", STORED | {"lora_id": None, "medium": "CPU_PINNED", "lora_name": "poet"})]),
    (5.5, [("BlockRemoved", {"block_hashes": [5], "medium": "GPU"}), ("AllBlocksCleared", {})]),
]
KINDS = {"AllBlocksCleared": AllBlocksCleared, "BlockRemoved": BlockRemoved, "BlockStored": BlockStored}


@contextmanager
def script(installation: SglangInstallation, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run the engine's side until it is ready; end it at the end."""
    command = [str(installation.python), str(SCRIPT), *words]
    environment = {**os.environ, **installation.environment}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            while (line := process.stdout.readline()).strip() != "ready":
                assert line, "the engine's environment ended"
            yield process
        finally:
            process.kill()


def frames(sockets: list[zmq.Socket[bytes]], publish: Any) -> list[list[list[bytes]]]:
    """Return what each subscriber receives of the batches; the first batch is sent until it arrives."""
    publish()
    received: list[list[list[bytes]]] = []
    for socket in sockets:
        socket.rcvtimeo = 20_000
        received.append([socket.recv_multipart() for _ in BATCHES])
    return received


def replayed(context: zmq.Context[zmq.Socket[bytes]], port: int) -> list[list[bytes]]:
    """Return the messages of a replay from the second batch on."""
    with context.socket(zmq.DEALER) as socket:
        socket.linger, socket.rcvtimeo = 0, 20_000
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart([b"", (1).to_bytes(8, "big")])
        return [socket.recv_multipart() for _ in BATCHES]


def config(events: int, replays: int, **more: str) -> str:
    endpoints = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replays}"}
    return json.dumps({"publisher": "zmq", "topic": "kv", "bind": True, "format": "default"} | endpoints | more)


def subscribed(context: zmq.Context[zmq.Socket[bytes]], port: int, stack: ExitStack) -> zmq.Socket[bytes]:
    """Return a subscriber that is connected, as its monitor says."""
    socket = stack.enter_context(context.socket(zmq.XSUB))
    monitor = stack.enter_context(socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED))
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send(b"\x01kv")
    assert monitor.poll(20_000), "no publisher listens"
    return socket


def test_frames_replays_and_ports_are_those_of_sglang(installation: SglangInstallation, table: Table) -> None:
    lines = "".join(f"{json.dumps(batch)}\n" for batch in BATCHES)
    found = []
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for engine in (True, False):
            events, replays = ports_in_a_row()
            if engine:
                words = ("publish", config(events, replays), *map(str, RANKS))
                process = stack.enter_context(script(installation, *words))
                sockets = [subscribed(context, events + rank, stack) for rank in RANKS]
                assert process.stdin is not None
                stdin = process.stdin

                def publish(stdin: Any = stdin) -> None:
                    stdin.write(lines)
                    stdin.flush()

            else:
                form = {"wire_form": "sglang"}
                ours = [EventPublisherFactory.create(config(events, replays, **form), rank) for rank in RANKS]
                for publisher in ours:
                    stack.callback(publisher.shutdown)
                sockets = [subscribed(context, events + rank, stack) for rank in RANKS]

                def publish(ours: Any = tuple(ours)) -> None:
                    for ts, batch in BATCHES:
                        for publisher in ours:
                            publisher.publish(EventBatch(ts, [KINDS[kind](**fields) for kind, fields in batch]))

            live = frames(sockets, publish)
            found.append((live, [replayed(context, replays + rank) for rank in RANKS]))
    (of_sglang, its_replays), (of_ours, our_replays) = found
    for theirs, own in zip([*of_sglang, *its_replays], [*of_ours, *our_replays], strict=True):
        assert [message[:-1] for message in own] == [message[:-1] for message in theirs]
        assert [decoded(message[-1]) for message in own] == [decoded(message[-1]) for message in theirs]
    table.add("this project's publisher beside SGLang's", "equal events, frames, replays and ports of two ranks")


def test_subscriber_with_the_classes_of_sglang_reads_our_events(installation: SglangInstallation) -> None:
    events, replays = ports_in_a_row()
    publisher = EventPublisherFactory.create(config(events, replays, wire_form="sglang"))
    try:
        with script(installation, "read", f"tcp://127.0.0.1:{events}", "kv", str(len(BATCHES))) as process:
            assert process.stdout is not None
            with zmq.Context() as context, ExitStack() as stack:
                subscribed(context, events, stack)  # the other one connected before
                for ts, batch in BATCHES:
                    publisher.publish(EventBatch(ts, [KINDS[kind](**fields) for kind, fields in batch]))
                read = [json.loads(process.stdout.readline()) for _ in BATCHES]
    finally:
        publisher.shutdown()
    assert [number for number, _ in read] == list(range(len(BATCHES)))
    for (_, (ts, events_read, rank)), (sent_at, sent) in zip(read, BATCHES, strict=True):
        assert (ts, rank) == (sent_at, 0)
        for event, (kind, fields) in zip(events_read, sent, strict=True):
            assert event == {"type": kind} | {name: value for name, value in fields.items() if name in event}


def decoded(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload) if payload else payload


def ports_in_a_row() -> tuple[int, int]:
    """Return the ports of rank 0's events and replays. Those of the other ranks follow."""
    first, *_ = free_ports(2 * len(RANKS))
    return first, first + len(RANKS)
