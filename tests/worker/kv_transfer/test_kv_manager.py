"""A rank's manager in one process: what it refuses, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from worker.kv_transfer import (
    DisaggregationMode,
    DisaggregationSettings,
    KVArgs,
    KVManager,
    KVPoll,
    KVReceiver,
    KVSender,
    KVTransferError,
    Rank,
)
from worker.kv_transfer.bootstrap import KVBootstrapServer
from worker.kv_transfer.transfer import open_engine

BUFFERS = [np.zeros(1024, np.uint8) for _ in range(2)]


def manager(mode: DisaggregationMode, rank: Rank | None = None, **settings: Any) -> KVManager:
    args = KVArgs(
        kv_data_ptrs=[buffer.ctypes.data for buffer in BUFFERS],
        kv_data_lens=[buffer.nbytes for buffer in BUFFERS],
        kv_item_lens=[64, 64],
        page_size=4,
        kv_cache_dtype="float16",
    )
    engine = open_engine("tcp")
    try:
        return KVManager(args, mode, engine, DisaggregationSettings(**settings), rank=rank)
    finally:
        ENGINES.append(engine)


ENGINES: list[Any] = []


@pytest.fixture(autouse=True)
def _engines_end() -> Iterator[None]:
    before = threading.active_count()
    yield
    while ENGINES:
        ENGINES.pop().close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("settings", "rank", "reason"),
    [
        ({}, None, "bootstrap_addr ''"),
        ({"bootstrap_addr": "host"}, None, "must be host:port"),
        ({"bootstrap_addr": "host:1", "host": "0.0.0.0"}, None, "give one address of this machine"),
        ({"bootstrap_addr": "host:1"}, Rank(tp=1), r"rank.tp 1 does not exist: topology.tp is 1"),
    ],
)
def test_invalid_manager_settings_are_rejected(settings: dict[str, Any], rank: Rank | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        manager(DisaggregationMode.PREFILL, rank, **settings)


def test_senders_and_receivers_need_matching_mode() -> None:
    prefill = manager(DisaggregationMode.PREFILL, bootstrap_addr="127.0.0.1:1")
    decode = manager(DisaggregationMode.DECODE)
    with pytest.raises(ValueError, match="KVReceiver needs the manager of a decode rank"):
        KVReceiver(prefill, "127.0.0.1:1", 1)
    with pytest.raises(ValueError, match="KVSender needs the manager of a prefill rank"):
        KVSender(decode, "127.0.0.1:1", 1)
    prefill.close()
    decode.close()


def test_close_fails_open_rooms_and_rejects_new_ones() -> None:
    """Also while a bootstrap service is asked that is not there."""
    server = KVBootstrapServer(port=0)
    prefill = manager(DisaggregationMode.PREFILL, bootstrap_addr=server.address)
    decode = manager(DisaggregationMode.DECODE)
    assert prefill.wait_registered(5)
    sender, receiver, lonely = (
        KVSender(prefill, server.address, 1),
        KVReceiver(decode, server.address, 1),
        KVReceiver(decode, "127.0.0.1:1", 2),
    )
    receiver.init([1, 2])
    decode.close()
    for handle, reason in ((receiver, "decode rank was closed"), (lonely, "decode rank was closed")):
        assert handle.poll() is KVPoll.Failed
        assert handle.pages_reusable()
        with pytest.raises(KVTransferError, match=f"room {handle.bootstrap_room}: the {reason}"):
            handle.failure_exception()
    prefill.close()
    assert sender.poll() is KVPoll.Failed
    assert sender.pages_reusable()
    for close in (prefill.close, decode.close, server.close):
        close()
    with pytest.raises(RuntimeError, match="the manager was closed"):
        KVSender(prefill, server.address, 3)


def test_address_in_use_is_error_without_leftovers() -> None:
    first = manager(DisaggregationMode.DECODE)
    with pytest.raises(OSError, match="cannot bind"):
        manager(DisaggregationMode.DECODE, port=int(first.endpoint.rpartition(":")[2]))
    first.close()
