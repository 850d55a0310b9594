"""Errors of engines that say that a worker lacks a model, and those that only look like them."""

from __future__ import annotations

import pytest

from router.forwarding.retries import is_model_missing


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":null,"code":404}}',
        b'{"object":"error","message":"The model `x` does not exist.","type":"NotFoundError","code":404}',
        b'{"type":"error","error":{"type":"NotFoundError","message":"The model `x` does not exist."}}',
        b'{"error":{"message":"No such one: x","type":"NotFoundError","param":"model","code":404}}',
        b'{"error":{"message":"The model \\"x\\" was deprecated","code": "model_not_found"}}',
        b'{"error":{"message":"model \'x\' not found","type":"not_found_error"}}',
    ],
)
def test_an_error_about_the_model_says_that_it_is_missing(body: bytes) -> None:
    assert is_model_missing(404, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"404 page not found",
        b'{"detail":"Not Found"}',
        b'{"error":{"message":"File Not Found","type":"not_found_error","code":404}}',
        b'{"error":{"message":"Response with id \'resp_1\' not found.","type":"NotFoundError","code":404}}',
        b'{"error":{"message":"Path /v1/models/x not found","code":404}}',
    ],
)
def test_a_404_for_a_path_or_an_object_says_nothing_of_the_model(body: bytes) -> None:
    assert not is_model_missing(404, body)
