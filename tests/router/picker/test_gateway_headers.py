"""The headers of llm-d and of the Inference Extension in a request to the picker."""

from __future__ import annotations

import pytest

from http_api.errors import RequestError, error_headers
from router.admission.ticket import PRIORITY_HEADER
from router.picker.process_requests import read_gateway_headers
from router.picker.state import Objectives

OBJECTIVES = Objectives({"premium": 10, "batch": -1})
OWN, OLD = "x-llm-d-", "x-gateway-"


@pytest.mark.parametrize("prefixes", [(OWN,), (OLD,), (OLD, OWN), (OWN, OLD)])
def test_canonical_headers_precede_old_ones_and_both_are_removed(prefixes: tuple[str, ...]) -> None:
    values = {OLD: ("batch", "old", "old"), OWN: ("premium", "own", "own")}
    headers = [(b"accept", b"*/*")]
    for prefix in prefixes:
        for name, value in zip(
            ("inference-objective", "inference-fairness-id", "model-name-rewrite"), values[prefix], strict=True
        ):
            headers.append(((prefix + name).encode(), value.encode()))
    if prefixes == (OLD,):
        priority, name, sheddable = b"1", "old", True
    else:
        priority, name, sheddable = b"-10", "own", False
    found = read_gateway_headers(headers, OBJECTIVES)
    assert found.headers == [(b"accept", b"*/*"), (PRIORITY_HEADER, priority)]
    assert found.model == name.encode()
    assert found.flow is not None
    assert (found.flow.name, found.flow.sheddable) == (name, sheddable)


def test_empty_canonical_header_is_no_name() -> None:
    headers = [(b"x-llm-d-inference-fairness-id", b""), (b"x-gateway-inference-fairness-id", b"old")]
    found = read_gateway_headers(headers, OBJECTIVES)
    assert found.flow is not None
    assert found.flow.name == "old"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("queue_full", b"rejected-saturated"),
        ("shed", b"rejected-saturated"),
        ("saturated", b"rejected-saturated"),
        ("slo_not_met", b"rejected-saturated"),
        ("working_set", b"rejected-ttl-expired"),
        ("queue_timeout", b"rejected-ttl-expired"),
        ("deadline_exceeded", b"rejected-ttl-expired"),
        ("no_worker_available", b"rejected-no-endpoints"),
        ("stopping", b"rejected-shutting-down"),
        ("model_not_found", None),
        (None, None),
    ],
)
def test_refusal_names_the_reason_of_llm_d(code: str | None, reason: bytes | None) -> None:
    headers = dict(error_headers(RequestError("no", status=429, code=code), b""))
    assert headers.get(b"x-llm-d-request-dropped-reason") == reason
