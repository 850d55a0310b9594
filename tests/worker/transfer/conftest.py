"""Processes that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transfer_peer import PeerProcess


@pytest.fixture
def start_peer() -> Iterator[Callable[..., PeerProcess]]:
    """Start a process that ends with the test."""
    peers: list[PeerProcess] = []

    def start(*arguments: Any, **named: Any) -> PeerProcess:
        peers.append(PeerProcess(*arguments, **named))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()
