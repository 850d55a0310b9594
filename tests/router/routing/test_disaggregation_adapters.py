"""Bodies for the prefill and decode workers, for each disaggregation adapter."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from router.routing.disaggregation.adapters import (
    Adapter,
    AnsweredError,
    Mooncake,
    Nixl,
    PreparedRequest,
    Sglang,
    Sidecar,
    TensorRtLlm,
    WorkerEndpoint,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
P, D = WorkerEndpoint("10.0.0.1", 8000), WorkerEndpoint("10.0.0.2", 8001)
BODY = (
    b'{"model": "m",  "prompt": "x", "seed": 1.0e2, "stream": true, "stream_options": {"include_usage": true}, "n":1}'
)


def made(
    kind: type[Adapter], body: bytes = BODY, path: str = TEXT, prefill: WorkerEndpoint = P, decode: WorkerEndpoint = D
) -> Any:
    return kind(path, body, prefill, decode)


def sent(body: bytes) -> dict[str, Any]:
    return dict(json.loads(body))


def test_sglang_uses_one_room_for_both_workers_and_keeps_the_clients_request_id() -> None:
    adapter = made(Sglang)
    prefill, decode = sent(adapter.prefill().body), sent(adapter.decode(b"").body)
    assert prefill == decode
    assert 0 <= prefill["bootstrap_room"] < 2**63
    meeting = {name: prefill.pop(name) for name in ("bootstrap_room", "rid")}
    assert prefill == sent(BODY) | {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998}
    assert sent(adapter.abort.body) == {"rid": meeting["rid"]}
    assert b'"seed": 1.0e2' in adapter.prefill().body  # all else stays as it was sent
    assert sent(made(Sglang).prefill().body)["bootstrap_room"] != meeting["bootstrap_room"]
    adapter = made(Sglang, b'{"text": "x", "rid": "mine"}', "/generate")
    assert sent(adapter.prefill().body)["rid"] == "mine"
    assert sent(adapter.abort.body) == {"rid": "mine"}


@given(st.integers(1, 64), st.data())
def test_sglang_rooms_map_to_the_dp_rank(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    prompts = data.draw(st.integers(1, 3))
    body = json.dumps({"prompt": ["x"] * prompts}).encode()
    adapter = made(Sglang, body, prefill=WorkerEndpoint("p", 1, rank, size, 9000), decode=WorkerEndpoint("d", 1, 3, 4))
    prefill, decode = sent(adapter.prefill().body), sent(adapter.decode(b"").body)
    assert len(prefill["bootstrap_room"]) == len(set(prefill["bootstrap_room"])) == prompts
    assert all(0 <= room < 2**63 and room % size == rank for room in prefill["bootstrap_room"])
    assert prefill.get("routed_dp_rank") == decode.get("disagg_prefill_dp_rank") == (rank if size > 1 else None)
    assert decode["routed_dp_rank"] == 3


@pytest.mark.parametrize(("prompt", "rooms"), [("x", None), ([1, 2], None), (["x"], 1), ([[1], [2]], 2), ([], None)])
def test_batch_has_a_room_for_each_prompt(prompt: Any, rooms: int | None) -> None:
    room = sent(made(Sglang, json.dumps({"prompt": prompt}).encode()).prefill().body)["bootstrap_room"]
    assert (len(room) if isinstance(room, list) else None) == rooms


def test_nixl_prefills_one_token_and_forwards_its_transfer_parameters() -> None:
    body = BODY.replace(b'"n":1', b'"min_tokens": 5, "max_tokens": 100')
    adapter = made(Nixl, body)
    prefill = sent(adapter.prefill().body)
    transfer = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    transfer |= dict.fromkeys(("remote_block_ids", "remote_host", "remote_port"))
    limited = {"stream": False, "max_tokens": 1, "kv_transfer_params": transfer}
    assert prefill == {"model": "m", "prompt": "x", "seed": 100.0} | limited
    opaque = b'{"remote_block_ids":[1, 2.0],"new": {"deep":  1}}'
    decode = adapter.decode(b'{"id": 1, "kv_transfer_params": %b}' % opaque)
    assert decode.body == body[:-1] + b',"kv_transfer_params":' + opaque + b"}"
    prefill = sent(made(Nixl, b'{"messages": [], "max_completion_tokens": 9}', CHAT).prefill().body)
    assert (prefill["max_tokens"], prefill["max_completion_tokens"]) == (1, 1)


@pytest.mark.parametrize("answer", [b"{}", b'{"kv_transfer_params": null}'])
def test_nixl_decodes_without_transfer_parameters(answer: bytes) -> None:
    assert made(Nixl).decode(answer).body == BODY
    with pytest.raises(ValueError, match="Expected `object`"):
        made(Nixl).decode(b"[]")


@pytest.mark.parametrize("value", [b'"\xff"', b'{"\xc3": 1}', b'{"a": 1, "a": 2}', b"[" * 300 + b"]" * 300])
def test_field_of_an_answer_that_parsers_read_differently_becomes_no_field_of_a_request(value: bytes) -> None:
    with pytest.raises(ValueError, match="line 1 column"):
        made(Nixl).decode(b'{"kv_transfer_params": {"remote_host": %b}}' % value)


def test_mooncake_asks_for_the_engine_and_names_the_transfer_to_both() -> None:
    adapter = made(Mooncake, prefill=WorkerEndpoint("10.0.0.1", 8000, 1, 2))
    assert adapter.query_url == "http://10.0.0.1:8998/query"
    adapter.read_query(b'{"0": {"engine_id": "a"}, "1": {"engine_id": "b", "worker_addr": {}}}')
    prefill, decode = adapter.prefill(), sent(adapter.decode(b"").body)
    transfer = sent(prefill.body)["kv_transfer_params"]["transfer_id"]
    assert sent(prefill.body)["kv_transfer_params"] == {"do_remote_decode": True, "transfer_id": transfer}
    assert (sent(prefill.body)["max_tokens"], sent(prefill.body)["stream"]) == (1, False)
    assert prefill.headers == [(b"x-data-parallel-rank", b"1")]
    assert decode["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "b",
    }


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"0": {}}', b'{"0": {"engine_id": 1}}', b'{"0": 1}'])
def test_mooncake_refuses_an_invalid_prefill_answer(answer: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - in msgspec's words, or ours
        made(Mooncake).read_query(answer)


def test_tensorrt_continues_from_the_context() -> None:
    adapter = made(TensorRtLlm)
    prefill = sent(adapter.prefill().body)
    params = prefill.pop("disaggregated_params")
    assert params.pop("disagg_request_id") >= 0
    assert params == {"request_type": "context_only"}
    assert prefill == {"model": "m", "prompt": "x", "seed": 100.0, "n": 1, "stream": False}
    told = {"request_type": "context_only", "opaque_state": "abc", "first_gen_tokens": [7]}
    choice = {"finish_reason": "length", "disaggregated_params": told}
    decode = sent(adapter.decode(json.dumps({"choices": [choice], "prompt_token_ids": [1, 2]}).encode()).body)
    assert decode == sent(BODY) | {"prompt": [1, 2], "disaggregated_params": told | {"request_type": "generation_only"}}


def test_tensorrt_omits_missing_fields() -> None:
    choice = {"index": 0, "finish_reason": "stop", "text": "!", "disaggregated_params": {}}
    answer = json.dumps({"object": "text_completion", "choices": [choice], "prompt_token_ids": [1]}).encode()
    whole = {"object": "text_completion", "choices": [{"index": 0, "finish_reason": "stop", "text": "!"}]}
    with pytest.raises(AnsweredError) as answered:
        made(TensorRtLlm).decode(answer)
    assert answered.value.content_type == b"text/event-stream"
    assert answered.value.body == b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(whole)
    with pytest.raises(AnsweredError) as answered:
        made(TensorRtLlm, b'{"prompt": "x"}').decode(answer)
    assert json.loads(answered.value.body) == whole


def test_tensorrt_converts_a_whole_chat_to_one_chunk() -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "!"}}
    with pytest.raises(AnsweredError) as answered:
        made(TensorRtLlm, b'{"messages": [], "stream": true}', CHAT).decode(json.dumps({"choices": [choice]}).encode())
    (event, _) = answered.value.body.split(b"\n\n", 1)
    chunk = json.loads(event.removeprefix(b"data: "))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": "!"}


def test_sidecar_receives_the_prefill_worker_in_a_header() -> None:
    adapter = made(Sidecar, prefill=WorkerEndpoint("fd00::1", 8000))
    assert (adapter.decode(b"").body, adapter.prefills) == (BODY, False)
    assert adapter.decode(b"").headers == [(b"x-prefiller-host-port", b"[fd00::1]:8000")]


@pytest.mark.parametrize("kind", [Sglang, Nixl, Mooncake, TensorRtLlm])
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": \xff}'])
def test_body_without_an_object_is_a_client_error(kind: type[Adapter], body: bytes) -> None:
    with pytest.raises(RequestError, match="JSON"):
        made(kind, body).prefill()


@pytest.mark.parametrize("kind", [Nixl, Mooncake, TensorRtLlm])
@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": ["x", "y"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "x", "n": 2},
        {"prompt": "x", "n": "2"},
        {"prompt": "x", "best_of": 3},
        {"prompt": ["x"], "n": 2},
        {"prompt": "x", "use_beam_search": True},
        {"prompt": None, "prompt_embeds": ["AAAA", "BBBB"]},
    ],
)
def test_request_for_several_answers_uses_one_worker(kind: type[Adapter], asked: dict[str, Any]) -> None:
    body = json.dumps({"model": "m"} | asked).encode()
    adapter = kind.of(TEXT, body, P, D)
    assert not adapter.prefills
    assert adapter.concurrent
    assert adapter.query_url is None
    assert adapter.decode(b"") == PreparedRequest(body)


@pytest.mark.parametrize("kind", [Nixl, Mooncake, TensorRtLlm, Sglang, Sidecar])
@pytest.mark.parametrize("asked", [{"prompt": "x"}, {"prompt": ["x"]}, {"prompt": [1, 2], "n": 1, "best_of": None}])
def test_request_for_one_answer_uses_two_workers(kind: type[Adapter], asked: dict[str, Any]) -> None:
    assert type(kind.of(TEXT, json.dumps(asked).encode(), P, D)) is kind


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
AGENT = b'{"model": "m", "max_tokens": 9, "stream": true, "messages": [{"role": "user", "content": "x"}]}'
CODEX = b'{"model": "m", "input": "x", "max_output_tokens": 9, "stream": true, "store": true, "text": {"format": {}}}'
# The fields that each engine reads on the paths of agents, by the sources of its release:
# vLLM 0.32.0: `entrypoints/anthropic/protocol.py` and `entrypoints/openai/responses/protocol.py`, `kv_transfer_params`
# in request and answer (0.28.0 and later have both). The budget of `thinking` is not checked with `do_remote_decode`.
# SGLang 0.5.23: `srt/entrypoints/openai/protocol.py`, `ResponsesRequest(PDRoutingFields)` (0.5.20 and later), and
# `srt/entrypoints/request_headers.py` by `serving_chat.py`, which also converts messages (0.5.18 and later).
# llm-d router: `pkg/sidecar/proxy/proxy_routes_test.go` at 0f25feab.
# TensorRT-LLM: `tensorrt_llm/serve/anthropic_adapter.py` at a9239bda drops other fields.


@pytest.mark.parametrize(
    ("kind", "paths"),
    [(Nixl, True), (Mooncake, True), (Sglang, True), (Sidecar, True), (TensorRtLlm, False)],
)
def test_agents_paths_are_handed_over_by_engines_that_read_the_fields_there(kind: type[Adapter], paths: bool) -> None:
    assert ({MESSAGES, RESPONSES} <= kind.paths) is paths


@pytest.mark.parametrize("kind", [Nixl, Mooncake])
def test_prefill_of_a_message_or_response_is_one_token_that_nobody_stores(kind: type[Adapter]) -> None:
    message, response = (
        sent(made(kind, AGENT, MESSAGES).prefill().body),
        sent(made(kind, CODEX, RESPONSES).prefill().body),
    )
    for prefill in (message, response):
        assert prefill["stream"] is False
        assert prefill.pop("kv_transfer_params")["do_remote_decode"] is True
    assert message == sent(AGENT) | {"max_tokens": 1, "stream": False}
    limited = {"max_output_tokens": 1, "stream": False, "store": False, "background": False}
    assert response == sent(CODEX) | limited


@pytest.mark.parametrize(("path", "body"), [(MESSAGES, AGENT), (RESPONSES, CODEX)])
def test_nixl_decodes_a_message_or_response_from_the_prefills_blocks(path: str, body: bytes) -> None:
    decode = made(Nixl, body, path).decode(b'{"kv_transfer_params": {"remote_port": 1}}')
    assert decode.body == body[:-1] + b',"kv_transfer_params":{"remote_port": 1}}'


def test_sglang_reads_the_room_of_a_message_in_headers() -> None:
    prefill, decode = WorkerEndpoint("::1", 1, 1, 2, 9000), WorkerEndpoint("d", 1, 3, 4)
    adapter = made(Sglang, AGENT[:-1] + b', "rid": "a\\r\\nb"}', MESSAGES, prefill, decode)
    to_prefill, to_decode = adapter.prefill(), adapter.decode(b"")
    assert to_prefill.body == to_decode.body == adapter.body
    first, second = dict(to_prefill.headers), dict(to_decode.headers)
    for headers in (first, second):
        assert headers[b"x-override-bootstrap-host"] == b"::1"
        assert headers[b"x-override-bootstrap-port"] == b"9000"
        assert int(headers[b"x-override-bootstrap-room"]) % 2 == 1
    assert first[b"x-override-bootstrap-room"] == second[b"x-override-bootstrap-room"]
    assert first[b"x-override-rid"] == second[b"x-override-rid"]
    assert sent(adapter.abort.body) == {"rid": first[b"x-override-rid"].decode()}
    assert first[b"x-override-routed-dp-rank"] == second[b"x-override-disagg-prefill-dp-rank"] == b"1"
    assert second[b"x-override-routed-dp-rank"] == b"3"


def test_sglang_stores_a_response_on_the_decode_worker_alone() -> None:
    adapter = made(Sglang, CODEX, RESPONSES)
    prefill, decode = sent(adapter.prefill().body), sent(adapter.decode(b"").body)
    assert prefill == decode | {"store": False, "background": False}
    assert decode["request_id"].startswith("resp_")
    assert sent(adapter.abort.body) == {"rid": decode["request_id"]}
    assert isinstance(decode["bootstrap_room"], int)
