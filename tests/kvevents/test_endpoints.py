"""Where the streams of a worker's ranks are, by rule and by what engines answer."""

from __future__ import annotations

import msgspec
import pytest

from kvevents import EventSource, Tier, rank_endpoint, tier_of
from kvevents.endpoints import connectable, publisher_binds
from kvevents.sources import sglang_sources, vllm_sources


@pytest.mark.parametrize(
    ("endpoint", "rank", "found"),
    [
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", 3, "tcp://127.0.0.1:5560"),
        ("tcp://*:5557", 1, "tcp://*:5558"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:0", 2, "tcp://*:0"),
        ("inproc://kv", 0, "inproc://kv"),
        ("inproc://kv", 2, "inproc://kv_dp2"),
        ("ipc:///run/kv", 1, "ipc:///run/kv_dp1"),
    ],
)
def test_a_ranks_endpoint_is_offset_from_rank_0s(endpoint: str, rank: int, found: str) -> None:
    assert rank_endpoint(endpoint, rank) == found


@pytest.mark.parametrize(
    "endpoint", ["", "5557", "tcp://", "tcp://host", "tcp://host:", "tcp://host:port", "tcp://h:65536"]
)
def test_an_endpoint_without_a_port_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        rank_endpoint(endpoint, 0)


def test_a_rank_beyond_the_last_port_is_refused() -> None:
    with pytest.raises(ValueError, match="65536 of DP rank 1"):
        rank_endpoint("tcp://host:65535", 1)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/kv", True),
        ("inproc://kv", True),
        ("tcp://router:5557", False),
        ("tcp://10.0.0.1:5557", False),
    ],
)
def test_a_publisher_binds_wildcards_and_local_transports(endpoint: str, binds: bool) -> None:
    assert publisher_binds(endpoint) is binds


@pytest.mark.parametrize(
    ("endpoint", "host", "found"),
    [
        ("tcp://*:5557", "worker-1", "tcp://worker-1:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://[::]:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://*:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://*:5557", "[fd00::1]", "tcp://[fd00::1]:5557"),
        ("tcp://other:5557", "worker-1", "tcp://other:5557"),
        ("ipc:///run/kv", "worker-1", "ipc:///run/kv"),
    ],
)
def test_a_subscriber_connects_to_the_workers_host(endpoint: str, host: str, found: str) -> None:
    assert connectable(endpoint, host) == found


def test_vllms_answer_names_every_ranks_stream() -> None:
    body = {
        "1": {"endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:6558", "topic": "kv", "buffer_steps": 10_000},
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": None},
    }
    assert vllm_sources(body, "w") == [
        EventSource(0, "tcp://w:5557"),
        EventSource(1, "tcp://w:5558", "tcp://w:6558", "kv"),
    ]


def test_vllm_without_events_has_no_streams() -> None:
    assert vllm_sources({}, "w") == []
    assert vllm_sources({"0": {"endpoint": "tcp://*:5557", "publisher": "null"}}, "w") == []


def test_sglangs_answer_names_rank_0_and_how_many_there_are() -> None:
    body = {
        "page_size": 1,
        "kv_events": {
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:6557",
            "block_size": 64,
            "dp_size": 2,
            "topic": "kv",
        },
    }
    assert sglang_sources(body, "w") == (
        [
            EventSource(0, "tcp://w:5557", "tcp://w:6557", "kv"),
            EventSource(1, "tcp://w:5558", "tcp://w:6558", "kv"),
        ],
        64,
    )


@pytest.mark.parametrize("events", [None, {"publisher": "null", "endpoint": "tcp://*:5557"}, {"endpoint": None}])
def test_sglang_without_events_still_tells_its_page_size(events: dict[str, str | None] | None) -> None:
    assert sglang_sources({"page_size": 16, "kv_events": events}, "w") == ([], 16)


def test_sglangs_page_size_stands_in_for_the_block_size() -> None:
    assert sglang_sources({"page_size": 16, "kv_events": {"endpoint": "tcp://*:5557"}}, "w")[1] == 16


def test_another_answer_is_refused_with_the_path_to_what_is_wrong() -> None:
    with pytest.raises(msgspec.ValidationError, match="endpoint"):
        vllm_sources({"0": {"topic": ""}}, "w")
    with pytest.raises(msgspec.ValidationError, match="dp_size"):
        sglang_sources({"kv_events": {"endpoint": "tcp://*:5557", "dp_size": "many"}}, "w")


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("CPU", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.DISK),
        ("CXL", Tier.UNKNOWN),
        ("", Tier.UNKNOWN),
    ],
)
def test_a_medium_is_a_tier_and_an_unknown_one_is_never_the_gpu(medium: str | None, tier: Tier) -> None:
    assert tier_of(medium) is tier


def test_tiers_are_ordered_from_the_fastest() -> None:
    assert sorted(Tier) == [Tier.GPU, Tier.CPU, Tier.DISK, Tier.UNKNOWN]
