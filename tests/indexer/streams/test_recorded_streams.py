"""The index predicts the cached tokens that real engines reported, from their recorded events over real sockets."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_publisher import Publisher
from index_client import Client

from indexer import Target
from indexer.streams.sequence import StreamState
from kvevents import BlockStored, decode_batch
from kvevents.frames import StreamFrame, parse_live
from kvevents.recording import Channel, read_recording

DATA = Path(__file__).parents[2] / "data"
MODEL = "tiny"


def recorded_requests(name: str) -> list[dict[str, Any]]:
    """Return the requests and admin calls of a recording, in the order of their start."""
    with gzip.open(DATA / f"{name}.requests.jsonl.gz", "rt") as lines:
        return sorted((json.loads(line) for line in lines), key=lambda request: request["t_start"])


def recorded_batches(path: str) -> list[tuple[float, int, StreamFrame]]:
    """Return the time, the source and the frame of each live batch."""
    return [
        (record.received_at, record.source, parse_live(record.frames))
        for record in read_recording(DATA / f"{path}.kvrec")
        if record.channel is Channel.LIVE
    ]


def registration(instance: str, dp_rank: int, publisher: Publisher) -> dict[str, Any]:
    return {
        "instance_id": instance,
        "modelname": MODEL,
        "dp_rank": dp_rank,
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
    }


@pytest.fixture
def follow(client: Client, publishers: Callable[..., Publisher]) -> Callable[[str, int], Publisher]:
    """Function that creates the publisher of a worker's rank and registers it with the indexer."""

    def follow(instance: str, dp_rank: int) -> Publisher:
        publisher = publishers()
        assert client.post("/register", registration(instance, dp_rank, publisher))[0] == 201
        publisher.wait_for_subscriber()
        return publisher

    return follow


def ask(client: Client, request: dict[str, Any]) -> dict[tuple[str, int], int]:
    """Return the predicted cached tokens of a recorded request's prompt, by rank."""
    query = {
        "model": MODEL,
        "token_ids": request["prompt_token_ids"],
        "adapter": None if request["model"] == MODEL else request["model"],
        "cache_salt": request["extra"].get("cache_salt"),
    }
    status, answer = client.post("/match", query)
    assert status == 200
    return {(match["worker"], match["dp_rank"]): match["matched_tokens"] for match in answer["matches"]}


# `kvrouter/test_conformance.py` has the same of the native core.
@pytest.mark.core("python")
@pytest.mark.parametrize(
    ("recording", "requests", "exact", "total"),
    [
        ("a_shared_system_prompt_2workers", "a_shared_system_prompt_2workers", 60, 60),
        ("c_pressure_evictions", "c_pressure_evictions", 90, 90),
        ("d_reset_prefix_cache", "d_reset_prefix_cache", 5, 7),
        ("e_dp2", "e_dp2", 53, 53),
        ("g_lora_salt_block64", "g_lora_salt_block64", 50, 50),
        ("i_restart_seq_reset_and_replay_truncation", "i_restart_seq_reset_and_replay_truncation", 42, 42),
        ("k_report_mode_full_pressure", "k_report_mode_full_pressure", 80, 80),
        ("l_hybrid_swa", "l_hybrid_swa", 40, 40),
        ("s1_sglang_radix_page16_evict", "s1_sglang_radix_page16_evict", 299, 300),
        ("s3_sglang_salt_page32", "s3_sglang_salt_page32", 150, 150),
        ("old_wire/c_pressure_evictions.vllm-0.16.0", "c_pressure_evictions", 90, 90),
        ("old_wire/c_pressure_evictions.vllm-0.22.0", "c_pressure_evictions", 90, 90),
        ("old_wire/c_pressure_evictions.vllm-0.24.0", "c_pressure_evictions", 90, 90),
        ("old_wire/s1_sglang_radix_page16_evict.sglang-0.4.6.post5", "s1_sglang_radix_page16_evict", 299, 300),
        ("old_wire/s1_sglang_radix_page16_evict.sglang-0.5.20", "s1_sglang_radix_page16_evict", 299, 300),
    ],
)
def test_predictions_equal_the_engines_reports(
    recording: str,
    requests: str,
    exact: int,
    total: int,
    client: Client,
    follow: Callable[[str, int], Publisher],
    caught_up: Callable[..., None],
) -> None:
    by_rank = recording == "e_dp2"  # there, a source is a rank; otherwise it is a worker
    batches = recorded_batches(recording)
    targets = {
        source: Target("w0", source, MODEL) if by_rank else Target(f"w{source}", 0, MODEL)
        for source in {source for _, source, _ in batches}
    }
    publishers = {source: follow(target.worker, target.dp_rank) for source, target in targets.items()}
    asked, right = 0, 0
    for request in recorded_requests(requests):
        last: dict[int, int] = {}
        while batches and batches[0][0] < request["t_start"]:
            _, source, frame = batches.pop(0)
            publishers[source].send(frame.seq, frame.payload)
            last[source] = frame.seq
        for source, seq in last.items():
            caught_up(targets[source], seq)
        if request["kind"] == "admin":
            if request["tag"] == "restart":
                publishers[request["worker"]].restart()
                caught_up(targets[request["worker"]], None)
            continue
        found = ask(client, request)
        pinned = request["headers"].get("X-data-parallel-rank")
        if not by_rank:
            predicted = {found[f"w{request['worker']}", 0]}
        elif pinned is not None:
            predicted = {found["w0", int(pinned)]}
        else:  # the engine chose the rank
            predicted = set(found.values())
        asked += 1
        right += request["cached_tokens"] in predicted
    assert asked == total
    assert right >= exact


def test_late_subscriber_predicts_like_an_early_one(
    client: Client, publisher: Publisher, caught_up: Callable[..., None]
) -> None:
    """The prediction for the last request is right after a replay in the framing of older releases."""
    *_, last = recorded_requests("c_pressure_evictions")
    publisher.legacy = True
    for received_at, _, frame in recorded_batches("old_wire/c_pressure_evictions.vllm-0.16.0"):
        if received_at < last["t_start"]:
            publisher.send(frame.seq, frame.payload)
    client.post("/register", registration("w0", 0, publisher))
    caught_up(Target("w0", 0, MODEL), publisher.batches[-1][0])
    assert ask(client, last)["w0", 0] == last["cached_tokens"]


def test_restart_with_a_truncated_replay_removes_all_old_blocks(
    client: Client, publisher: Publisher, caught_up: Callable[..., None]
) -> None:
    """A late subscriber, to which only 20 batches are replayed, is connected when the engine restarts."""
    batches = [frame for _, _, frame in recorded_batches("i_restart_seq_reset_and_replay_truncation")]
    target = Target("w0", 0, MODEL)
    publisher.keep = 20
    for frame in batches[:45]:
        publisher.send(frame.seq, frame.payload)
    client.post("/register", registration("w0", 0, publisher))
    caught_up(target, 44, StreamState.LOST)
    publisher.restart()
    for frame in batches[45:]:
        publisher.send(frame.seq, frame.payload)
    caught_up(target, 18, StreamState.LIVE)
    stored = {
        block
        for frame in batches[45:]
        for event in decode_batch(frame.payload).events
        if isinstance(event, BlockStored)
        for block in event.block_hashes
    }
    _, answer = client.get("/workers")
    assert answer["workers"][0]["ranks"][0]["blocks"]["gpu"] == len(stored)
