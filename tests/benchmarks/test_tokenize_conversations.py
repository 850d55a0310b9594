"""The conversations that tokenizing is measured with."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from benchmarks.tokenize.measure import bodies


def test_every_turn_extends_the_previous_one() -> None:
    turns = [msgspec.json.decode(body)["messages"] for body in bodies(1, 20_000)]
    assert len(turns) > 3
    for before, after in pairwise(turns):
        assert after[: len(before)] == before
        assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]
    assert len(msgspec.json.encode(turns[-1])) > 19_000


def test_conversations_share_no_messages() -> None:
    one, other = (
        {message["content"] for body in bodies(seed, 9_000) for message in _messages(body)} for seed in (1, 2)
    )
    assert not one & other
    assert bodies(1, 9_000) == bodies(1, 9_000)


def _messages(body: bytes) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = msgspec.json.decode(body)["messages"]
    return messages
