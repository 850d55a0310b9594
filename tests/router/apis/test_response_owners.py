"""The workers that made stored responses."""

from __future__ import annotations

import pytest

from router.apis.response_owners import SEARCHED_BYTES, ResponseOwners


@pytest.mark.parametrize(
    "beginning",
    [
        b'{"id":"resp_1","object":"response"}',
        b'{\n  "id" : "resp_1"}',
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"',
        b'{"object": "response", "id": "resp_1"}',
    ],
)
def test_a_response_is_known_by_how_its_answer_begins(beginning: bytes) -> None:
    owners = ResponseOwners()
    assert owners.learn(beginning, "http://a")
    assert owners.get("resp_1") == "http://a"
    assert owners.get("resp_2") is None


@pytest.mark.parametrize(
    "beginning", [b"", b'{"id":"msg_1"}', b'{"id":"resp_1', b" " * SEARCHED_BYTES + b'"id":"resp_1"']
)
def test_responses_without_ids_register_no_owner(beginning: bytes) -> None:
    owners = ResponseOwners()
    assert not owners.learn(beginning, "http://a")
    assert len(owners) == 0


def test_the_oldest_are_forgotten() -> None:
    owners = ResponseOwners(most=2)
    for number in (1, 2, 1, 3):
        owners.learn(b'{"id":"resp_%d"}' % number, f"http://{number}")
    assert [owners.get(f"resp_{number}") for number in (1, 2, 3)] == ["http://1", None, "http://3"]
