"""Requests, answers and errors of the index API."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from engine_publisher import Publisher
from index_client import Client, served
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually

from indexer import Indexer, MatchQuery, Registration, RowMatches, Target
from indexer.hashing import Namespace, extend_prefix_hashes, namespace_hash, pack_tokens
from indexer.index import TargetRows
from kvevents import BlockRemoved, BlockStored, Event

Worker = Callable[..., Publisher]


@pytest.fixture
def worker(client: Client, publishers: Callable[..., Publisher], caught_up: Callable[..., None]) -> Worker:
    """Function that registers a rank, publishes events for it, and waits until they are applied."""

    def worker(instance: str, *events: Event, **fields: Any) -> Publisher:
        publisher = publishers()
        body = {
            "instance_id": instance,
            "modelname": "m",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            **fields,
        }
        if events:
            publisher.publish(*events)
        status, answer = client.post("/register", body)
        assert (status, answer["status"]) == (201, "registered")
        tenant = fields.get("tenant_id", "default")
        target = Target(instance, fields.get("dp_rank") or 0, body["modelname"], tenant)
        caught_up(target, 0 if events else None)
        return publisher

    return worker


def stored(*tokens: int, block_size: int = 2, medium: str | None = "GPU", **fields: Any) -> BlockStored:
    """Return the event of a prompt's first blocks. A block's engine hash is its number."""
    hashes: list[int | bytes] = list(range(1, len(tokens) // block_size + 1))
    return BlockStored(hashes, None, list(tokens), block_size, medium=medium, **fields)


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_match_lists_every_target_best_first(client: Client, worker: Worker) -> None:
    worker("little", stored(1, 2))
    worker("much", stored(1, 2, 3, 4, 5, 6), stored(1, 2, medium="CPU"), BlockRemoved([1], "GPU"))
    worker("nothing")
    worker("ranked", stored(1, 2, 3, 4), dp_rank=3)
    status, answer = client.post("/match", {"model": "m", "token_ids": PROMPT})
    nothing = {"gpu": 0, "cpu": 0, "disk": 0, "unknown": 0}
    assert status == 200
    assert answer == {
        "model": "m",
        "tokens": 9,
        "matches": [
            {"worker": "much", "dp_rank": 0, "matched_tokens": 6, "tiers": {**nothing, "gpu": 4, "cpu": 2}},
            {"worker": "ranked", "dp_rank": 3, "matched_tokens": 4, "tiers": {**nothing, "gpu": 4}},
            {"worker": "little", "dp_rank": 0, "matched_tokens": 2, "tiers": {**nothing, "gpu": 2}},
            {"worker": "nothing", "dp_rank": 0, "matched_tokens": 0, "tiers": nothing},
        ],
    }


@pytest.mark.parametrize(("tokens", "matched"), [(0, 0), (1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (8, 6), (9, 8)])
def test_last_token_of_a_prompt_is_never_matched(client: Client, worker: Worker, tokens: int, matched: int) -> None:
    worker("w", stored(*PROMPT[:8]))
    _, answer = client.post("/match", {"model": "m", "token_ids": PROMPT[:tokens]})
    assert answer["matches"][0]["matched_tokens"] == matched


def test_match_separates_adapters_and_salts(client: Client, worker: Worker) -> None:
    worker("base", stored(1, 2))
    worker("adapter", stored(1, 2, lora_name="sql"))
    worker("salted", stored(1, 2, cache_salt="s"))
    worker("named", stored(1, 2), lora_name="sql")

    def holders(**fields: str) -> set[str]:
        _, answer = client.post("/match", {"model": "m", "token_ids": [1, 2, 3], **fields})
        return {match["worker"] for match in answer["matches"] if match["matched_tokens"]}

    assert holders() == {"base"}
    assert holders(adapter="sql") == {"adapter", "named"}
    assert holders(cache_salt="s") == {"salted"}
    assert holders(adapter="sql", cache_salt="s") == set()


def test_query_answers_by_tenant_instance_and_rank(client: Client, worker: Worker) -> None:
    worker("a", stored(1, 2, 3, 4), dp_rank=0)
    worker("a", stored(1, 2, 3, 4, 5, 6), stored(1, 2, medium="STORAGE"), BlockRemoved([1], "GPU"), dp_rank=1)
    worker("b", stored(9, 9, medium="CPU"))
    status, answer = client.post("/query", {"model": "m", "token_ids": PROMPT[:6]})
    assert status == 200
    assert answer == {
        "default": {
            "a": {"longest_matched": 6, "GPU": 4, "CPU": 0, "DISK": 2, "DP": {"0": 4, "1": 6}},
            "b": {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}},
        }
    }


def test_query_accepts_adapter_and_salt(client: Client, worker: Worker) -> None:
    worker("a", stored(1, 2, lora_name="sql", cache_salt="s"))
    body = {"model": "m", "token_ids": [1, 2]}
    _, plain = client.post("/query", body)
    _, exact = client.post("/query", {**body, "lora_name": "sql", "cache_salt": "s"})
    assert plain["default"]["a"]["longest_matched"] == 0
    assert exact["default"]["a"]["longest_matched"] == 2


def test_tenants_do_not_see_each_other(client: Client, worker: Worker) -> None:
    worker("a", stored(1, 2), tenant_id="red")
    worker("a", stored(3, 4), tenant_id="blue")
    _, red = client.post("/query", {"model": "m", "token_ids": [1, 2], "tenant_id": "red"})
    _, blue = client.post("/query", {"model": "m", "token_ids": [1, 2], "tenant_id": "blue"})
    assert red["red"]["a"]["longest_matched"] == 2
    assert blue["blue"]["a"]["longest_matched"] == 0
    assert client.post("/query", {"model": "m", "token_ids": [1, 2]})[0] == 404
    assert client.post("/unregister", {"instance_id": "a"})[0] == 404


def test_registrations_with_different_additional_salts_never_match_each_other(
    client: Client, indexer: Indexer, worker: Worker
) -> None:
    salted = BlockStored([9], None, [5, 6], 2, medium="GPU", cache_salt="s")
    worker("plain", stored(1, 2, 3, 4))
    worker("salted", stored(1, 2, 3, 4, cache_salt="w8a8"))
    worker("w8a8", stored(1, 2, 3, 4), additionalsalt="w8a8")
    worker("w4a4", stored(1, 2, 3, 4), salted, additional_salt="w4a4")

    def holders(path: str = "/query", **fields: Any) -> set[str]:
        _, answer = client.post(path, {"model": "m", "token_ids": [1, 2, 3, 4], **fields})
        assert len(answer["default"]) == 4
        return {name for name, found in answer["default"].items() if found["longest_matched"]}

    assert holders() == {"plain"}
    assert holders(cache_salt="w8a8") == {"salted", "w8a8"}
    assert holders(cache_salt="w4a4") == {"w4a4"}
    assert holders(additional_salt="w8a8") == {"w8a8"}
    assert holders(additional_salt="w4a4", cache_salt="w8a8") == set()
    assert holders(additional_salt="w4a4", cache_salt="s", token_ids=[5, 6]) == {"w4a4"}
    assert holders(cache_salt="s", token_ids=[5, 6]) == set()
    hashes = prefix_hashes([1, 2, 3, 4])
    assert holders("/query_by_hash", seq_hashes=hashes) == {"plain"}
    assert holders("/query_by_hash", block_hash=hashes, cache_salt="w8a8") == {"w8a8"}
    rows = TargetRows(2, {Target("plain", 0, "m"): 0, Target("w8a8", 0, "m"): 1})
    found = RowMatches(rows)
    indexer.match_rows(MatchQuery("m", [1, 2, 3, 4, 5]), rows, found)
    assert list(found.tokens) == [4, 0]
    _, answer = client.get("/workers")
    assert [each["ranks"][0]["additional_salt"] for each in answer["workers"]] == [None, None, "w8a8", "w4a4"]
    worker("w8a8", stored(1, 2, 3, 4))
    assert holders() == {"plain", "w8a8"}


def prefix_hashes(tokens: list[int]) -> list[int]:
    """Return the prefix hashes of a prompt of model `m` in blocks of two tokens."""
    hashes: array[int] = array("Q")
    seed = namespace_hash(Namespace("m", "default", None, None, 2))
    extend_prefix_hashes(hashes, seed, pack_tokens(tokens), 2, len(tokens) // 2)
    return list(hashes)


@pytest.mark.parametrize("instance", [7, "7"])
def test_instances_may_have_numbers(client: Client, worker: Worker, instance: int | str) -> None:
    worker("7", stored(1, 2), instance_id=instance, dp_rank=None, lora_name="")
    _, answer = client.post("/query", {"model": "m", "token_ids": [1, 2], "instance_id": instance})
    assert answer["default"]["7"]["longest_matched"] == 2
    status, answer = client.post("/unregister", {"instance_id": instance, "modelname": "m", "dp_rank": 0})
    assert (status, answer["removed_instances"]) == (200, ["7|default|0"])


def test_query_for_one_instance_answers_for_that_one(client: Client, indexer: Indexer, worker: Worker) -> None:
    worker("a", stored(1, 2))
    worker("b", stored(1, 2, 3, 4), dp_rank=0)
    worker("b", stored(1, 2), dp_rank=1)
    asked = {"model": "m", "token_ids": PROMPT[:4]}
    found = {"longest_matched": 4, "GPU": 4, "CPU": 0, "DISK": 0, "DP": {"0": 4, "1": 2}}
    assert client.post("/query", {**asked, "instance_id": "b"}) == (200, {"default": {"b": found}})
    hashed = {"model": "m", "seq_hashes": prefix_hashes(PROMPT[:4]), "instance_id": "b"}
    assert client.post("/query_by_hash", hashed) == (200, {"default": {"b": found}})
    nothing = {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}}
    assert client.post("/query", {"model": "m", "token_ids": [9, 9], "instance_id": "a"})[1]["default"] == {
        "a": nothing
    }
    assert client.post("/query", {**asked, "instance_id": "c"}) == (200, {"default": {}})
    assert list(client.post("/query", {**asked, "instance_id": ""})[1]["default"]) == ["b", "a"]
    indexer.names.set("a", "named")
    assert list(client.post("/query", {**asked, "instance_id": "named"})[1]["default"]) == ["named"]


def test_fields_of_dynamo_get_answers_of_dynamo(client: Client, publishers: Callable[..., Publisher]) -> None:
    for tenant in ("default", "red"):
        publisher = publishers()
        publisher.publish(stored(1, 2, 3, 4), stored(1, 2, medium="CPU_PINNED"), BlockRemoved([1], "GPU"))
        body = {"instance_id": 1, "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        assert client.post("/register", {**body, "model_name": "m", "block_size": 2, "tenant_id": tenant})[0] == 201
    asked = {"model_name": "m", "token_ids": PROMPT, "tenant_id": "red"}
    eventually(lambda: client.post("/query", asked)[1]["scores"])
    assert client.post("/query", asked)[1] == {
        "scores": {"1": {"0": 4}},
        "instances": {"1": {"longest_matched": 4, "gpu": 2, "cpu": 4, "disk": 4, "dp": {"0": 4}}},
    }
    assert client.post("/query", {**asked, "token_ids": [9, 9]})[1]["scores"] == {}
    status, answer = client.post("/unregister", {"instance_id": 1, "model_name": "m"})
    assert (status, sorted(answer["removed_instances"])) == (200, ["1|default|0", "1|red|0"])


def test_publisher_of_mooncake_is_followed(client: Client, worker: Worker, indexer: Indexer) -> None:
    """Blocks with tokens in an instance's own memory count for it; blocks of the pool count for no instance."""
    event = {"event_type": "stored", "seq_hashes": [1], "token_ids": [1, 2], "block_size": 2, "backend_id": "daemon-1"}
    publisher = worker("a", type="Mooncake", additionalsalt="")
    publisher.wait_for_subscriber()
    publisher.send(0, msgspec.msgpack.encode([1.0, [{**event, "medium": "gpu"}], 0]))
    pooled = {**event, "seq_hashes": [2], "token_ids": None, "parent_hash": 1, "medium": "cpu", "object_key": "0x2"}
    publisher.send(1, msgspec.msgpack.encode([1.0, [pooled], 0]))
    report = indexer.report
    eventually(lambda: (found := report(Target("a", 0, "m"))) and found.stream and found.stream.last_seq == 1)
    assert client.post("/query", {"model": "m", "token_ids": PROMPT})[1]["default"]["a"]["longest_matched"] == 2
    assert client.get("/workers")[1]["workers"][0]["ranks"][0]["engine"] == "Mooncake"


def test_one_instance_may_serve_two_models(client: Client, worker: Worker) -> None:
    worker("a", stored(1, 2), modelname="llama")
    worker("a", stored(3, 4), modelname="qwen")
    for model, tokens in (("llama", [1, 2]), ("qwen", [3, 4])):
        _, answer = client.post("/query", {"model": model, "token_ids": tokens})
        assert answer["default"]["a"]["longest_matched"] == 2
        _, answer = client.post("/query", {"model": model, "token_ids": [5 - tokens[0], 5 - tokens[1]]})
        assert answer["default"]["a"]["longest_matched"] == 0
    assert client.post("/unregister", {"instance_id": "a", "modelname": "llama"})[1]["targets"] == 1
    assert client.post("/query", {"model": "llama", "token_ids": []})[0] == 404
    assert client.post("/query", {"model": "qwen", "token_ids": []})[0] == 200


def test_one_model_may_have_two_block_sizes(client: Client, worker: Worker) -> None:
    worker("fine", stored(*PROMPT[:6], block_size=2))
    worker("coarse", stored(*PROMPT[:8], block_size=4))
    _, answer = client.post("/match", {"model": "m", "token_ids": PROMPT})
    assert [(match["worker"], match["matched_tokens"]) for match in answer["matches"]] == [("coarse", 8), ("fine", 6)]


def test_registering_again_changes_nothing(client: Client, worker: Worker) -> None:
    publisher = worker("a", stored(1, 2))
    body = {
        "instance_id": "a",
        "modelname": "m",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
    }
    answer = {"status": "registered", "instance_id": "a", "dp_rank": 0}
    assert client.post("/register", body) == (201, answer)
    assert client.post("/query", {"model": "m", "token_ids": [1, 2]})[1]["default"]["a"]["longest_matched"] == 2


def test_answers_follow_registrations_and_renames(client: Client, indexer: Indexer, worker: Worker) -> None:
    def answered() -> tuple[list[Any], list[Any]]:
        asked = {"model": "m", "token_ids": [1, 2, 3]}
        matches = client.post("/match", asked)[1]["matches"]
        instances = client.post("/query", asked)[1]["default"]
        return (
            [(match["worker"], match["dp_rank"], match["matched_tokens"]) for match in matches],
            [(name, instance["DP"]) for name, instance in instances.items()],
        )

    worker("a", dp_rank=0)
    assert answered() == ([("a", 0, 0)], [("a", {"0": 0})])
    worker("a", stored(1, 2), dp_rank=1)
    worker("b")
    assert answered() == ([("a", 1, 2), ("a", 0, 0), ("b", 0, 0)], [("a", {"1": 2, "0": 0}), ("b", {"0": 0})])
    indexer.names.set("b", "named")
    assert answered() == ([("a", 1, 2), ("a", 0, 0), ("named", 0, 0)], [("a", {"1": 2, "0": 0}), ("named", {"0": 0})])
    client.post("/unregister", {"instance_id": "a", "dp_rank": 1})
    assert answered() == ([("a", 0, 0), ("named", 0, 0)], [("a", {"0": 0}), ("named", {"0": 0})])


def test_unregister_removes_one_rank_or_a_whole_instance(client: Client, worker: Worker) -> None:
    for rank in range(3):
        worker("a", stored(1, 2), dp_rank=rank)
    worker("b")
    assert client.post("/unregister", {"instance_id": "a", "dp_rank": 1}) == (
        200,
        {"status": "unregistered", "instance_id": "a", "targets": 1, "removed_instances": ["a|default|1"]},
    )
    _, answer = client.post("/query", {"model": "m", "token_ids": [1, 2]})
    assert answer["default"]["a"]["DP"] == {"0": 2, "2": 2}
    assert client.post("/unregister", {"instance_id": "a"})[1]["targets"] == 2
    _, answer = client.post("/query", {"model": "m", "token_ids": [1, 2]})
    assert list(answer["default"]) == ["b"]
    status, answer = client.post("/unregister", {"instance_id": "a"})
    assert (status, answer["error"]["param"]) == (404, "instance_id")


@pytest.fixture(scope="module")
def unchanged() -> Iterator[Client]:
    """Client of an index with one worker, which no test changes."""
    indexer = Indexer()
    indexer.register(Registration(Target("known", 0, "m"), None))
    with served(indexer) as client:
        yield client
    indexer.stop()


REGISTRATION = {"endpoint": "tcp://127.0.0.1:5557", "modelname": "m", "instance_id": "a"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *[
            ("/register", {name: value for name, value in REGISTRATION.items() if name != missing}, missing)
            for missing in REGISTRATION
        ],
        *[("/register", {**REGISTRATION, name: ""}, name) for name in REGISTRATION],
        *[("/register", {**REGISTRATION, name: 5}, name) for name in ("endpoint", "modelname")],
        ("/register", {**REGISTRATION, "instance_id": 1.5}, "instance_id"),
        ("/register", {**REGISTRATION, "tenant_id": ""}, "tenant_id"),
        ("/register", {**REGISTRATION, "dp_rank": -1}, "dp_rank"),
        ("/register", {**REGISTRATION, "dp_rank": "0"}, "dp_rank"),
        ("/register", {**REGISTRATION, "block_size": 0}, "block_size"),
        ("/register", {**REGISTRATION, "type": "Other"}, "type"),
        ("/register", {**REGISTRATION, "endpoint": "not an endpoint"}, "endpoint"),
        ("/register", {**REGISTRATION, "replay_endpoint": "tcp://127.0.0.1"}, "replay_endpoint"),
        ("/unregister", {}, "instance_id"),
        ("/unregister", {"instance_id": "a", "dp_rank": 1.5}, "dp_rank"),
        ("/query", {"token_ids": []}, "model"),
        ("/query", {"model": "m"}, "token_ids"),
        ("/query", {"model": "m", "token_ids": "1 2"}, "token_ids"),
        ("/query", {"model": "m", "token_ids": [1, "2"]}, "token_ids"),
        ("/query", {"model": "m", "token_ids": [1, -2]}, "token_ids"),
        ("/query", {"model": "m", "token_ids": [2**32]}, "token_ids"),
        ("/match", {"model": "m", "token_ids": [2**32]}, "token_ids"),
    ],
)
def test_error_names_the_invalid_field(unchanged: Client, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = unchanged.post(path, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert param in answer["error"]["message"]
    assert len(unchanged.get("/workers")[1]["workers"]) == 1, "nothing was registered"


@pytest.mark.parametrize("path", ["/register", "/unregister", "/query"])
@pytest.mark.parametrize("body", [b"", b"{", b"not json", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_body_without_json_object_is_rejected(unchanged: Client, path: str, body: bytes) -> None:
    status, answer = unchanged.post(path, body)
    assert status == 400
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["param"] is None


@pytest.mark.parametrize("path", ["/query", "/match"])
def test_unknown_model_returns_404(unchanged: Client, path: str) -> None:
    status, answer = unchanged.post(path, {"model": "other", "token_ids": [1]})
    assert status == 404
    assert answer["error"]["type"] == "not_found_error"
    assert answer["error"]["param"] == "model"
    assert "'other'" in answer["error"]["message"]


def test_unknown_fields_of_the_rfc_are_ignored(client: Client, worker: Worker) -> None:
    worker("a", backend_id="x", type="SGLang")
    assert client.post("/query", {"model": "m", "token_ids": [], "block_size": 16})[0] == 200


def test_workers_reports_stream_and_blocks_of_each_rank(client: Client, worker: Worker) -> None:
    publisher = worker("a", stored(1, 2, 3, 4), stored(1, 2, medium="CPU"), BlockStored([9], 8, [1, 2], 2))
    worker("a", dp_rank=1, block_size=16, topic="kv", lora_name="sql", type="SGLang")
    eventually(lambda: client.get("/workers")[1]["workers"][0]["ranks"][0]["state"] == "live")
    _, answer = client.get("/workers")
    (found,) = answer["workers"]
    assert (found["worker"], found["model"], found["tenant"]) == ("a", "m", "default")
    first, second = found["ranks"]
    expected = {
        "dp_rank": 0,
        "engine": "vLLM",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "topic": "",
        "adapter": None,
        "block_sizes": [2],
        "state": "live",
        "last_seq": 0,
        "unreadable": {"bad_frames": 0, "bad_events": 0},
        "blocks": {"gpu": 2, "cpu": 1, "disk": 0, "unknown": 0},
        "orphans": 1,
    }
    assert {name: first[name] for name in expected} == expected
    assert first["batches"]["batches"] == 1
    assert first["counters"]["stored"] == 3
    assert (second["dp_rank"], second["block_sizes"], second["engine"]) == (1, [16], "SGLang")
    assert (second["topic"], second["adapter"], second["last_seq"]) == ("kv", "sql", None)
    assert second["seconds_since_event"] is None


def test_workers_reports_seconds_since_the_last_event(client: Client, worker: Worker) -> None:
    publisher = worker("a", stored(1, 2))
    publisher.publish(stored(1, 2))

    def silence() -> float | None:
        silent: float | None = client.get("/workers")[1]["workers"][0]["ranks"][0]["seconds_since_event"]
        return silent

    eventually(lambda: silence() is not None)
    assert 0 <= (silence() or 0) < 10


def test_workers_reports_seconds_since_the_index_was_confirmed(client: Client, worker: Worker) -> None:
    publisher = worker("a", stored(1, 2))
    publisher.wait_for_subscriber()
    publisher.publish(stored(1, 2))

    def rank() -> Any:
        return client.get("/workers")[1]["workers"][0]["ranks"][0]

    eventually(lambda: rank()["lag_seconds"] is not None)
    assert 0 <= rank()["lag_seconds"] < 10
    assert 0 <= rank()["seconds_since_confirmed"] < 10


def test_health_reports_versions_and_core(client: Client) -> None:
    status, answer = client.get("/health")
    assert (status, answer["status"]) == (200, "ok")
    assert {"version", "core", "python"} < answer.keys()


def test_metrics_are_prometheus(client: Client, worker: Worker) -> None:
    worker("a", stored(1, 2, 3, 4), BlockStored([9], 8, [1, 2], 2), BlockStored([5, 5], None, [1, 2], 1), dp_rank=1)
    eventually(lambda: client.get("/workers")[1]["workers"][0]["ranks"][0]["state"] == "live")
    status, body = client.request("GET", "/metrics")
    assert status == 200
    samples = {
        (sample.name, sample.labels.get("tier") or sample.labels.get("state") or sample.labels.get("what")): sample
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    labels = {"worker": "a", "dp_rank": "1", "model": "m", "tenant": "default"}
    for name, detail, value in (
        ("kvrouter_index_blocks", "gpu", 2),
        ("kvrouter_index_blocks", "unknown", 0),
        ("kvrouter_index_orphan_blocks", None, 1),
        ("kvrouter_stream_state", "live", 1),
        ("kvrouter_stream_state", "lost", 0),
        ("kvrouter_stream_batches_total", None, 1),
        ("kvrouter_stream_gaps_total", None, 0),
        ("kvrouter_stream_lost_batches_total", None, 0),
        ("kvrouter_stream_restarts_total", None, 0),
        ("kvrouter_stream_unreadable_total", "frame", 0),
        ("kvrouter_stream_unreadable_total", "event", 1),
    ):
        sample = samples[name, detail]
        assert sample.value == value
        assert sample.labels.items() >= labels.items()


def test_error_bodies_are_json(client: Client) -> None:
    status, body = client.request("POST", "/unregister", json.dumps({"instance_id": "nobody"}).encode())
    assert status == 404
    assert json.loads(body)["error"]["message"]
