"""Damaged and invented messages between routers: each is ignored, or counts with valid values."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec
from budget import damaged, examples

from router.load.load_messages import Kind, Message, RankLoad, SentPrompt, decode, encode
from router.load.target_load import LoadTable
from router.sharing import LoadSharing, PeerLoad

FEW = 3000
WORKERS = ["http://a:1", "http://b:1"]
ODD: list[Any] = [-1, 2**63, 2**64 - 1, 1.5, float("nan"), float("inf"), -1e308, "", "x" * 5000, b"x", None, [], {}]


def message(random: Random) -> list[Any]:
    """One that a router may send, as lists."""
    numbers = random.choices(range(30), k=random.randrange(4))
    sent = Message(
        random.choice("abc"),
        random.randrange(10**6),
        random.choice(list(Kind)),
        [
            RankLoad(random.choice(WORKERS), random.randrange(2), *random.choices(range(9), k=5), random.random())
            for _ in range(random.randrange(3))
        ],
        [
            SentPrompt(number, random.choice(WORKERS), 0, "m", random.randbytes(8 * random.randrange(4)))
            for number in numbers
        ],
        random.choices(range(30), k=random.randrange(4)),
        random.choice([0, 0, 5]),
        [("resp_1", random.choice(WORKERS))],
        [("t", random.randrange(5), random.randrange(500))],
        numbers[:1],
        finished=["s"],
    )
    raw: list[Any] = msgspec.msgpack.decode(encode(sent))
    return raw


def with_odd_value(random: Random, raw: list[Any]) -> list[Any]:
    """One value of it, however deep, is another."""
    place = random.randrange(len(raw))
    if isinstance(raw[place], list) and raw[place] and random.random() < 0.7:
        with_odd_value(random, raw[place])
    else:
        raw[place] = random.choice(ODD)
    return raw


def test_malformed_messages_of_peers_count_for_nothing() -> None:
    counted = 0
    sharing = LoadSharing(LoadTable(), PeerLoad(60.0, 1.0), [])
    spent: list[tuple[str, int, int]] = []
    sharing.on_spent.append(lambda *each: spent.append(each))
    for random in examples(FEW):
        raw = message(random)
        if random.random() < 0.5:
            with_odd_value(random, raw)
        data = msgspec.msgpack.encode(raw)
        if random.random() < 0.4:
            data = damaged(random, data)
        sharing.receive(data)
        counted += _is_valid(data)
        for worker in WORKERS:
            for rank in (0, 1):
                load = sharing.peer_load.of(worker, rank)
                assert min(load.requests, load.pending, load.context, load.waiting, load.streamed) >= 0, data
                assert math.isfinite(backlog := sharing.peer_load.backlog(worker, rank)), data
                assert backlog >= 0, data
        assert all(requests >= 0 and tokens >= 0 for _, requests, tokens in spent), data
        spent.clear()
    for router in sharing.peer_load.routers():
        sharing.peer_load.forget(router)
    assert all(sharing.peer_load.of(worker, rank).requests == 0 for worker in WORKERS for rank in (0, 1))
    assert counted > 100


def _is_valid(data: bytes) -> bool:
    try:
        decode(data)
    except ValueError:
        return False
    return True
