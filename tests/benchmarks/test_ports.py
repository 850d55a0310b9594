"""Ports for tests and benchmarks."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from benchmarks import ports


def test_ports_are_free_consecutive_and_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port()
    monkeypatch.setattr(ports, "_FIRST", first)
    monkeypatch.setattr(ports, "_COUNT", 200)
    with ExitStack() as stack:
        taken = {first}
        for _ in range(100):
            port = ports.free_port()
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
            assert port not in taken
            taken.add(port)
        monkeypatch.setattr(ports, "_given", set())
        row = ports.free_ports(2)
    assert row == range(row[0], row[0] + 2)
    assert taken.isdisjoint(set(row) - {first})
