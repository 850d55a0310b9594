"""Endpoints of the streams of a worker's ranks, computed or read from engines' answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import EventSource, Tier, rank_endpoint, tier_of
from kvevents.endpoints import connectable, parse_endpoint, publisher_binds
from kvevents.sources import ReportedFields, ReportedStreams, sglang_sources, vllm_sources


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
def test_endpoint_of_a_rank_is_offset_from_rank_0(endpoint: str, rank: int, found: str) -> None:
    assert rank_endpoint(endpoint, rank) == found


@pytest.mark.parametrize(
    "endpoint", ["", "5557", "tcp://", "tcp://host", "tcp://host:", "tcp://host:port", "tcp://h:65536"]
)
def test_endpoint_without_port_is_rejected_by_name(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        rank_endpoint(endpoint, 0)


def test_rank_beyond_the_last_port_is_rejected() -> None:
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
def test_publisher_binds_wildcards_and_local_transports(endpoint: str, binds: bool) -> None:
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
def test_subscriber_connects_to_the_host_of_the_worker(endpoint: str, host: str, found: str) -> None:
    assert connectable(endpoint, host) == found


def vllm(body: Any, host: str = "w") -> tuple[ReportedStreams, list[str]]:
    """Return the streams of vLLM's answer, and the errors."""
    fields = ReportedFields()
    return vllm_sources(msgspec.json.encode(body), host, fields, most_ranks=8), fields.refused


def sglang(body: Any, host: str = "w") -> tuple[ReportedStreams, list[str]]:
    """Return the streams of SGLang's answer, and the errors."""
    fields = ReportedFields()
    return sglang_sources(msgspec.json.encode(body), host, fields, most_ranks=8), fields.refused


def test_vllm_answer_names_the_stream_of_each_rank() -> None:
    body = {
        "1": {"endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:6558", "topic": "kv", "buffer_steps": 10_000},
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": None},
    }
    sources = [EventSource(0, "tcp://w:5557"), EventSource(1, "tcp://w:5558", "tcp://w:6558", "kv")]
    assert vllm(body) == (ReportedStreams(sources, [0, 1]), [])


def test_vllm_without_events_has_no_streams() -> None:
    assert vllm({}) == (ReportedStreams(), [])
    assert vllm({"0": {"endpoint": "tcp://*:5557", "publisher": "null"}}) == (ReportedStreams(), [])


EVENTS = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 64,
    "dp_size": 2,
    "replay_endpoint_port_base": 6557,
}
RANKS = [EventSource(0, "tcp://w:5557", "tcp://w:6557", "kv"), EventSource(1, "tcp://w:5558", "tcp://w:6558", "kv")]


def flag(**fields: Any) -> str:
    """Return the text of SGLang's --kv-events-config."""
    return msgspec.json.encode({"publisher": "zmq", "topic": "kv"} | fields).decode()


def test_sglang_answer_has_rank_0_and_the_number_of_ranks() -> None:
    assert sglang({"page_size": 1, "kv_events": EVENTS}) == (ReportedStreams(RANKS, [0, 1], 64), [])


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "::", "[::]"])
def test_sglang_wildcard_host_becomes_the_workers(host: str) -> None:
    assert sglang({"kv_events": EVENTS | {"endpoint_host": host}})[0].sources == RANKS


@pytest.mark.parametrize(
    ("host", "there"), [("10.0.0.5", "10.0.0.5"), ("[fd00::1]", "[fd00::1]"), ("fd00::1", "[fd00::1]")]
)
def test_sglang_stream_at_another_host_keeps_it_and_replays_are_at_the_workers(host: str, there: str) -> None:
    streams, refused = sglang({"kv_events": EVENTS | {"endpoint_host": host, "dp_size": 1}})
    assert streams.sources == [EventSource(0, f"tcp://{there}:5557", "tcp://w:6557", "kv")]
    assert refused == []


def test_sglang_flag_names_replays_where_the_object_does_not() -> None:
    without = {name: value for name, value in EVENTS.items() if name != "replay_endpoint_port_base"}
    text = flag(endpoint="tcp://*:5557", replay_endpoint="tcp://*:6557")
    assert sglang({"kv_events": without, "kv_events_config": text})[0].sources == RANKS
    streams, refused = sglang({"kv_events": without, "kv_events_config": flag(endpoint="tcp://*:5557")})
    assert [source.replay_endpoint for source in streams.sources] == [None, None]
    assert refused == []


def test_sglang_flag_names_the_host_of_replays() -> None:
    text = flag(endpoint="tcp://10.0.0.5:5557", replay_endpoint="tcp://10.0.0.6:6557")
    streams, _ = sglang({"kv_events": EVENTS | {"endpoint_host": "10.0.0.5"}, "kv_events_config": text})
    assert [source.replay_endpoint for source in streams.sources] == ["tcp://10.0.0.6:6557", "tcp://10.0.0.6:6558"]


@pytest.mark.parametrize("object_", [{}, {"kv_events": None}])
def test_sglang_flag_serves_where_the_object_is_missing(object_: dict[str, Any]) -> None:
    text = flag(endpoint="tcp://*:5557", replay_endpoint="tcp://*:6557")
    answer = object_ | {"page_size": 16, "dcp_size": 4, "dp_size": 2, "kv_events_config": text}
    assert sglang(answer) == (ReportedStreams(RANKS, [0, 1], 64), [])
    assert sglang(object_ | {"kv_events_config": flag()})[0].sources == [EventSource(0, "tcp://w:5557", None, "kv")]


@pytest.mark.parametrize("text", [None, "{}", flag(publisher="null", endpoint="tcp://*:5557")])
def test_sglang_without_events_reports_its_page_size(text: str | None) -> None:
    answer = {"page_size": 16, "kv_events": None, "kv_events_config": text}
    assert sglang(answer) == (ReportedStreams(block_size=16), [])


def test_sglang_page_size_is_the_default_block_size() -> None:
    without = {name: value for name, value in EVENTS.items() if name != "block_size"}
    assert sglang({"page_size": 16, "kv_events": without})[0].block_size == 16


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kv_events": EVENTS | {"endpoint_host": None}}, "kv_events.endpoint_host"),
        ({"kv_events": EVENTS | {"endpoint_host": 5}}, "kv_events.endpoint_host"),
        ({"kv_events": EVENTS | {"endpoint_host": "a:0;b"}}, "the stream of rank 0"),
        ({"kv_events": EVENTS | {"endpoint_port_base": None}}, "kv_events.endpoint_port_base"),
        ({"kv_events": EVENTS | {"endpoint_port_base": 0}}, "kv_events.endpoint_port_base"),
        ({"kv_events": EVENTS | {"endpoint_port_base": 65536}}, "kv_events.endpoint_port_base"),
        ({"kv_events": EVENTS | {"replay_endpoint_port_base": -1}}, "kv_events.replay_endpoint_port_base"),
        ({"kv_events": EVENTS | {"topic": ["kv"]}}, "kv_events.topic"),
        ({"kv_events": [EVENTS]}, "kv_events"),
        ({"kv_events_config": "{"}, "kv_events_config"),
        ({"kv_events_config": {"publisher": "zmq"}}, "kv_events_config"),
        ({"kv_events_config": flag(endpoint="5557")}, "the stream of rank 0"),
        ({"kv_events_config": flag(endpoint=[])}, "endpoint"),
    ],
)
def test_invalid_stream_of_sglang_is_rejected_with_its_field(wrong: dict[str, Any], named: str) -> None:
    streams, refused = sglang({"page_size": 16} | wrong)
    assert streams.sources == []
    assert refused[0].startswith(named)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"endpoint": 5}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"endpoint": "tcp://w:0;other:5557"}, "not a host"),
        ({"endpoint": "tcp://*:0"}, "port 0"),
        ({"endpoint": "tcp://w:5557", "replay_endpoint": "tcp://*"}, "port"),
        ({"endpoint": "tcp://w:5557", "topic": ["kv"]}, "topic"),
        ({"endpoint": "tcp://w:5557", "topic": "k" * 257}, "topic"),
        ("tcp://w:5557", "kv_event_sources[0]"),
    ],
)
def test_invalid_stream_is_skipped_alone(wrong: Any, named: str) -> None:
    streams, refused = vllm({"0": wrong, "1": {"endpoint": "tcp://w:5558"}})
    assert streams.sources == [EventSource(1, "tcp://w:5558")]
    assert len(refused) == 1
    assert named in refused[0]


@pytest.mark.parametrize("dp_size", [0, -1, 9, 10**12, 10**400, "many", [2], 1.5])
def test_invalid_number_of_ranks_is_rejected_with_its_field(dp_size: Any) -> None:
    streams, (refused,) = sglang({"page_size": 16, "kv_events": EVENTS | {"dp_size": dp_size}})
    assert streams == ReportedStreams(block_size=64)
    assert refused.startswith("kv_events.dp_size: ")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://a:0;b:5557",
        "tcp://lo;127.0.0.1:5557",
        "tcp://127.1:5557",
        "tcp://2130706433:5557",
        "tcp://0x7f000001:5557",
        "tcp://127.0.0.1:05557",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:5557 ",
        "tcp://[::1%lo]:5557",
        "tcp://a@b:5557",
        "tcp://a/b:5557",
        "TCP://a:5557",
        "pgm://a:5557",
        "ipc://",
        "ipc:///tmp/a\n",
    ],
)
def test_ambiguous_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        parse_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "canonical"),
    [
        ("tcp://Worker-1.Example:5557", "tcp://worker-1.example:5557"),
        ("tcp://[0:0::1]:5557", "tcp://[::1]:5557"),
        ("tcp://[::ffff:10.0.0.1]:5557", "tcp://10.0.0.1:5557"),
        ("tcp://svc.cluster.local.:5557", "tcp://svc.cluster.local.:5557"),
        ("ipc:///run/kv", "ipc:///run/kv"),
    ],
)
def test_endpoints_have_one_canonical_form(endpoint: str, canonical: str) -> None:
    assert str(parse_endpoint(endpoint)) == canonical
    assert str(parse_endpoint(canonical)) == canonical


@given(st.text(st.sampled_from("tcp:/0123456789.;@[]%*ax-_ \\"), max_size=40).map(lambda text: f"tcp://{text}:5557"))
def test_parsed_endpoint_is_stable_and_without_special_characters(endpoint: str) -> None:
    try:
        read = parse_endpoint(endpoint)
    except ValueError:
        return
    assert str(parse_endpoint(str(read))) == str(read)
    assert not set(read.address) & set(";@/%\\ ")


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("CPU", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
        ("FS", Tier.DISK),
        ("EXTERNAL", Tier.UNKNOWN),
        ("cpu", Tier.UNKNOWN),
        ("CXL", Tier.UNKNOWN),
        ("", Tier.UNKNOWN),
    ],
)
def test_medium_has_a_tier_and_unknown_media_are_never_gpu(medium: str | None, tier: Tier) -> None:
    assert tier_of(medium) is tier


def test_tiers_are_ordered_from_the_fastest() -> None:
    assert sorted(Tier) == [Tier.GPU, Tier.CPU, Tier.DISK, Tier.UNKNOWN]
