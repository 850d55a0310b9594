"""Errors of engines that say that a worker lacks a model or a route, and those that only look like them."""

from __future__ import annotations

import pytest

from router.forwarding.retries import is_handover_refused, is_model_missing, is_route_missing

# vLLM 0.32.0: `entrypoints/serve/engine/serving.py:76` and `:213`, `entrypoints/openai/models/serving.py:58`; messages
# wrap the text in Anthropic's error.
VLLM = (
    b'{"error":{"message":"The model `x` does not exist. Valid aliases: y.","type":"NotFoundError",'
    b'"param":"model","code":404}}',
    b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":null,"code":404}}',
    b'{"object":"error","message":"The model `x` does not exist.","type":"NotFoundError","code":404}',
    b'{"type":"error","error":{"type":"NotFoundError","message":"The model `x` does not exist."}}',
    b'{"error":{"message":"No such one: x","type":"NotFoundError","param":"model","code":404}}',
)
# SGLang 0.5.23: `srt/entrypoints/openai/serving_responses.py:309` and `srt/entrypoints/http_server.py:2035`. Its chats
# answer for any name.
SGLANG = (
    b'{"error":{"message":"The model \'x\' does not exist","type":"invalid_request_error","param":"model","code":404}}',
    b'{"error":{"message":"The model \'x\' does not exist","type":"invalid_request_error","param":"model",'
    b'"code":"model_not_found"}}',
)
# OpenAI's API, Ollama, and others by OpenAI's code.
OTHERS = (
    b'{"error":{"message":"The model \\"x\\" was deprecated","code": "model_not_found"}}',
    b'{"error":{"message":"model \'x\' not found","type":"not_found_error"}}',
)


@pytest.mark.parametrize("body", [*VLLM, *SGLANG, *OTHERS])
def test_an_error_about_the_model_says_that_it_is_missing(body: bytes) -> None:
    assert is_model_missing(404, body)
    assert not is_route_missing(404, body)


# SGLang 0.5.23: `srt/lora/lora_registry.py:139`; vLLM 0.32.0: `entrypoints/openai/models/serving.py:294`.
def test_an_adapter_that_sglang_has_not_loaded_is_missing() -> None:
    text = b'{"message":"The following requested LoRA adapters are not loaded: x\\nLoaded adapters: dict_keys([])."}'
    assert is_model_missing(400, text)
    assert not is_model_missing(400, b'{"message":"LoRA adapters are too large"}')


# Servers without the route: FastAPI's body of vLLM 0.32.0, SGLang 0.5.23, TensorRT-LLM and `transformers serve`, whose
# own handlers are for FastAPI's HTTPException and not for the router's; llama.cpp `tools/server/server-http.cpp` at
# 00dd0816; Go's router (Ollama); nginx.
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"detail":"Not Found"}',
        b'{"error":{"message":"File Not Found","type":"not_found_error","code":404}}',
        b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}',
        b"404 page not found",
        b"<html>\r\n<head><title>404 Not Found</title></head>\r\n<body><center>nginx</center></body>\r\n</html>\r\n",
    ],
)
def test_a_404_of_a_server_without_the_route_says_that_the_route_is_missing(body: bytes) -> None:
    assert is_route_missing(404, body)
    assert not is_model_missing(404, body)


def test_a_wrong_method_says_that_the_route_is_missing() -> None:
    assert is_route_missing(405, b'{"detail":"Method Not Allowed"}')
    assert not is_route_missing(400, b'{"detail":"Not Found"}')


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"error":{"message":"Response with id \'resp_1\' not found.","type":"NotFoundError","code":404}}',
        b'{"error":{"message":"Path /v1/models/x not found","code":404}}',
    ],
)
def test_a_404_for_an_object_says_nothing_of_model_or_route(body: bytes) -> None:
    assert not is_model_missing(404, body)
    assert not is_route_missing(404, body)


# SGLang 0.5.23: `srt/managers/scheduler.py:3055`.
def test_a_worker_of_a_pair_that_finds_no_room_refuses_the_handover() -> None:
    text = b'{"message":"Invalid request: Disaggregated request received without bootstrap room id. req.rid=\'1\'"}'
    assert is_handover_refused(400, text)
    assert not is_handover_refused(500, text)
    assert not is_handover_refused(400, b'{"message":"Invalid request"}')
