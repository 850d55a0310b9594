"""Faults between two processes: both sides end in time, pages are safe before their reuse, and nothing is left.

`Site.close` checks that no room, request, grant, quarantined page or thread is left.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from rank_process import AUX_ITEMS, Model, RankProcess, processes
from site_of_ranks import Site

from worker.kv_transfer.bootstrap import KVBootstrapServer
from worker.kv_transfer.frames import (
    MAX_FRAME,
    AnyMessage,
    Done,
    Failure,
    FrameCodec,
    Hello,
    Refusal,
    RoomRequest,
    Welcome,
)
from worker.kv_transfer.layout import Buffer, Layout

ENGINES = ("tcp", "shm")
LARGE_ENGINES = ("tcp", pytest.param("shm", marks=pytest.mark.transfer))
ROOMS = itertools.count(100)
LARGE = Model(head_bytes=4096, pages=96)  # 24 MiB: more than socket buffers hold
LARGE_PAGES = list(range(1, 95))
REUSED = 0x77


@pytest.fixture(scope="module")
def pair() -> Iterator[list[RankProcess]]:
    with processes(2) as pair:
        yield pair


@pytest.fixture(scope="module")
def tcp_site() -> Iterator[Site]:
    with processes(2) as own:
        site = Site(own, "tcp")
        yield site
        site.close()


@pytest.fixture
def site(tcp_site: Site) -> Iterator[Site]:
    """One that the tests share; each must leave nothing behind."""
    tcp_site.decode.call("wipe", 0)
    yield tcp_site
    tcp_site.decode.call("close", 1, missing_ok=True)
    assert tcp_site.left() == []


@pytest.fixture(scope="module", params=ENGINES)
def standing_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with processes(2) as own:
        site = Site(own, request.param)
        yield site
        site.close()


@pytest.fixture
def any_site(standing_site: Site) -> Iterator[Site]:
    standing_site.decode.call("wipe", 0)
    yield standing_site
    assert standing_site.left() == []


def stall(site: Site, prefill_timeout: float = 20.0, decode_timeout: float = 20.0) -> int:
    """A room in the middle of a write, because decode was stopped; it still is."""
    site.transfer(next(ROOMS), [1], [1])  # so that the engines know each other
    site.decode.call("wipe", 0)
    room = next(ROOMS)
    site.prefill.call("wipe", 0, 0x11)
    site.decode.call("receive", 0, site.address, room, LARGE_PAGES, timeout_s=decode_timeout)
    site.prefill.call("open_sender", 0, site.address, room, timeout_s=prefill_timeout)
    assert site.prefill.call("wait_state", 0, room, "WaitingForInput")
    site.decode.stop()
    assert site.prefill.call("attempt", 0, room, "init", len(LARGE_PAGES), 0) == ""
    assert site.prefill.call("attempt", 0, room, "send", LARGE_PAGES) == ""
    assert site.prefill.call("wait_unread")
    return room


def stall_at_prefill(site: Site, decode_timeout: float = 20.0) -> int:
    """A room in the middle of a write, because prefill is stopped. What it had sent has landed."""
    room = stall(site, decode_timeout=decode_timeout)
    site.prefill.stop()
    site.decode.resume()
    assert site.decode.call("landed", 0, LARGE_PAGES[0])
    return room


def reuse(site: Site) -> None:
    """Reuse the pages of the failed room."""
    site.decode.call("wipe", 0, REUSED, LARGE_PAGES)


def untouched(site: Site) -> bool:
    return bool(site.decode.call("stale_bytes", 0, REUSED, LARGE_PAGES) == 0)


# Killed and suspended processes


@pytest.mark.parametrize("engine", LARGE_ENGINES)
def test_prefill_killed_during_write_fails_room(pair: list[RankProcess], engine: str) -> None:
    site = Site(pair, engine, LARGE)
    room = stall_at_prefill(site)
    site.prefill.kill()
    state, reason, reusable = site.decode.call("wait", 0, room)
    assert (state, reusable) == ("Failed", True)
    assert "prefill" in reason
    reuse(site)
    site.prefill_ranks = []
    assert site.left() == []
    assert untouched(site)
    site.prefill.start()
    site.close()


@pytest.mark.parametrize("engine", LARGE_ENGINES)
def test_decode_killed_during_write_fails_room(pair: list[RankProcess], engine: str) -> None:
    site = Site(pair, engine, LARGE)
    room = stall(site)
    site.decode.kill()
    state, reason, reusable = site.prefill.call("wait", 0, room)
    assert (state, reusable) == ("Failed", True)
    assert reason
    site.decode_ranks = []
    assert site.left() == []
    assert site.prefill.call("wait_peers", 0, 0)
    site.decode.start()
    site.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_suspended_prefill_does_not_write_reused_pages(pair: list[RankProcess], engine: str) -> None:
    site = Site(pair, engine, LARGE)
    room = stall_at_prefill(site, decode_timeout=3.0)
    state, reason, reusable = site.decode.call("wait", 0, room)
    assert (state, reusable) == ("Failed", True)
    assert "timed out" in reason
    reuse(site)
    site.prefill.resume()
    ended = site.prefill.call("wait", 0, room)[0]
    assert ended == "Failed" or (engine, ended) == ("shm", "Success")  # there decode had copied it all, but too late
    assert site.left() == []
    assert untouched(site)
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])  # and both go on
    site.close()


@pytest.mark.parametrize("engine", LARGE_ENGINES)
def test_suspended_decode_fails_room(pair: list[RankProcess], engine: str) -> None:
    site = Site(pair, engine, LARGE)
    room = stall(site, prefill_timeout=3.0)
    state, reason, reusable = site.prefill.call("wait", 0, room)
    assert (state, reusable) == ("Failed", True)
    assert reason
    site.decode.resume()
    assert site.decode.call("wait", 0, room)[::2] == ("Failed", True)
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])
    site.close()


def test_peer_is_lost_after_two_silent_heartbeats(pair: list[RankProcess]) -> None:
    site = Site(pair, "tcp", heartbeat_s=0.2)
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [1, 2])
    assert site.decode.call("wait_state", 0, room, "WaitingForInput")
    site.prefill.stop()
    state, reason, reusable = site.decode.call("wait", 0, room)
    assert (state, reusable) == ("Failed", True)
    assert "lost" in reason
    site.prefill.resume()
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])
    site.close()


def test_slow_decode_does_not_delay_others(pair: list[RankProcess]) -> None:
    """The slow one stops in the middle of a write and leaves its prefill's writer waiting."""
    with processes(1) as (other,):
        site = Site(pair, "tcp", LARGE)
        other.call("open", 0, "decode", "tcp", LARGE, None, None, site.settings)
        slow = stall(site)
        for _ in range(3):
            room = next(ROOMS)
            other.call("receive", 0, site.address, room, [4, 5])
            site.prefill.call("send", 0, site.address, room, [1, 2])
            assert other.call("wait", 0, room, 2.0) == ("Success", "", True)
        assert site.prefill.call("state", 0, slow)[0] == "Transferring"
        site.decode.resume()
        assert site.decode.call("wait", 0, slow) == ("Success", "", True)
        assert other.call("left", 0) == []
        site.close()


# Restarts


def test_restarted_bootstrap_service_relearns_ranks(pair: list[RankProcess]) -> None:
    site = Site(pair, "tcp", heartbeat_s=0.2)
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [1, 2])
    assert site.decode.call("wait_state", 0, room, "WaitingForInput")
    site.server.close()
    site.prefill.call("send", 0, site.address, room, [3, 4])
    assert site.decode.call("wait", 0, room) == ("Success", "", True)  # a connected rank needs no bootstrap service

    site.decode.call("close", 0)
    site.decode.call("open", 0, "decode", "tcp", site.model)  # it knows no prefill
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [1, 2])
    host, port = site.address.split(":")
    site.server = KVBootstrapServer(host, int(port))
    site.prefill.call("send", 0, site.address, room, [3, 4])
    assert site.decode.call("wait", 0, room) == ("Success", "", True)
    site.close()


@pytest.mark.parametrize("same_port", [True, False])
def test_restarted_prefill_is_found_again(pair: list[RankProcess], same_port: bool) -> None:
    site = Site(pair, "tcp", heartbeat_s=0.3)
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])
    settings = dict(site.settings)
    if same_port:
        settings["port"] = int(site.prefill.call("endpoint", 0).rpartition(":")[2])
    site.prefill.kill()
    assert site.decode.call("wait_peers", 0, 0)
    room = next(ROOMS)
    site.decode.call("wipe", 0)
    site.decode.call("receive", 0, site.address, room, [7, 8])  # the registration still names the ended instance
    site.prefill.start()
    site.prefill.call("open", 0, "prefill", "tcp", site.model, None, None, settings)
    site.prefill.call("send", 0, site.address, room, [1, 2])
    assert site.decode.call("wait", 0, room) == ("Success", "", True)
    assert site.decode.call("check", 0, room, [7, 8]) == []
    site.close()


def test_restarted_decode_on_same_port_is_served(pair: list[RankProcess]) -> None:
    site = Site(pair, "tcp")
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [7, 8])
    assert site.prefill.call("wait_requests", 0)
    settings = {**site.settings, "port": int(site.decode.call("endpoint", 0).rpartition(":")[2])}
    site.decode.kill()
    site.decode.start()
    site.decode.call("open", 0, "decode", "tcp", site.model, None, None, settings)
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])
    assert site.prefill.call("wait_peers", 0, 1)
    site.prefill.call("open_sender", 0, site.address, room)  # for the request of the ended instance
    assert "the decode rank was lost" in site.prefill.call("wait", 0, room, 5.0)[1]
    site.close()


def test_prefill_on_port_of_predecessor_refuses_its_frames(pair: list[RankProcess]) -> None:
    """Decode was never connected to the first rank. Only the answer reports that another rank has the address."""
    site = Site(pair, "tcp", heartbeat_s=1.0)
    stale = {"bootstrap_addr": site.address, "port": int(site.prefill.call("endpoint", 0).rpartition(":")[2])}
    room = next(ROOMS)
    site.prefill.kill()  # its registration stays for a while
    site.prefill.start()
    elsewhere = KVBootstrapServer(port=0)
    second = {**stale, "bootstrap_addr": elsewhere.address}
    site.prefill.call("open", 1, "prefill", "tcp", site.model, None, None, second)
    site.decode.call("receive", 0, site.address, room, [7, 8])
    assert not site.decode.call("wait_state", 0, room, "WaitingForInput", 0.3)
    assert site.prefill.call("rejected", 1)["misdirected"] >= 1
    site.prefill.call("open", 0, "prefill", "tcp", site.model, None, None, site.settings)
    site.prefill.call("send", 0, site.address, room, [1, 2])
    assert site.decode.call("wait", 0, room) == ("Success", "", True)
    elsewhere.close()
    site.close()


# Rooms that are never filled, requested or finished


def test_room_that_is_never_sent_times_out(any_site: Site) -> None:
    without_sender, without_chunks = next(ROOMS), next(ROOMS)
    any_site.decode.call("receive", 0, any_site.address, without_sender, [1, 2], timeout_s=0.3)
    any_site.decode.call("receive", 0, any_site.address, without_chunks, [3, 4], timeout_s=0.3)
    any_site.prefill.call("open_sender", 0, any_site.address, without_chunks)
    for room in (without_sender, without_chunks):
        state, reason, reusable = any_site.decode.call("wait", 0, room)
        assert (state, reusable) == ("Failed", True)
        assert "timed out" in reason
    assert any_site.prefill.call("wait", 0, without_chunks)[::2] == ("Failed", True)


def test_room_that_is_never_requested_times_out(any_site: Site) -> None:
    asked_for_nothing, unknown = next(ROOMS), next(ROOMS)
    any_site.decode.call("receive", 0, any_site.address, asked_for_nothing, None, timeout_s=0.6)
    for room in (asked_for_nothing, unknown):
        any_site.prefill.call("send", 0, any_site.address, room, [1, 2], timeout_s=0.3)
        state, reason, reusable = any_site.prefill.call("wait", 0, room)
        assert (state, reusable) == ("Failed", True)
        assert "0 of unknown decode ranks requested it" in reason
    assert any_site.decode.call("wait", 0, asked_for_nothing)[::2] == ("Failed", True)


def test_timed_out_decode_receives_no_late_write(any_site: Site) -> None:
    room = next(ROOMS)
    any_site.decode.call("receive", 0, any_site.address, room, [1, 2], timeout_s=0.3)
    assert any_site.decode.call("wait", 0, room)[::2] == ("Failed", True)
    any_site.prefill.call("send", 0, any_site.address, room, [1, 2], timeout_s=0.5)
    assert any_site.prefill.call("wait", 0, room)[0] == "Failed"
    assert any_site.decode.call("stale_bytes", 0, 0xA5, list(range(64))) == 0


def test_decode_abort_before_request_notifies_prefill(any_site: Site) -> None:
    """Decode may abort without pages for the room. The sender may exist already, or be opened later."""
    for sender_first in (True, False):
        room = next(ROOMS)
        any_site.decode.call("receive", 0, any_site.address, room, None)
        assert any_site.decode.call("wait_state", 0, room, "WaitingForInput")
        if sender_first:
            any_site.prefill.call("open_sender", 0, any_site.address, room)
        any_site.decode.call("abort", 0, room)
        if not sender_first:
            any_site.prefill.call("open_sender", 0, any_site.address, room)
        state, reason, _ = any_site.prefill.call("wait", 0, room, 5.0)
        assert state == "Failed"
        assert "decode aborted: aborted by the decode engine" in reason


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_ends_both_sides(any_site: Site, side: str) -> None:
    room = next(ROOMS)
    any_site.decode.call("receive", 0, any_site.address, room, [1, 2])
    any_site.prefill.call("open_sender", 0, any_site.address, room)
    assert any_site.prefill.call("wait_state", 0, room, "WaitingForInput")
    getattr(any_site, side).call("abort", 0, room)
    for process in (any_site.prefill, any_site.decode):
        state, reason, reusable = process.call("wait", 0, room, 5.0)
        assert (state, reusable) == ("Failed", True)
        assert f"aborted by the {side} engine" in reason


def test_decode_abort_during_write_ends_both_sides(pair: list[RankProcess]) -> None:
    site = Site(pair, "tcp", LARGE)
    room = stall_at_prefill(site)
    site.decode.call("abort", 0, room)
    assert site.decode.call("wait", 0, room)[::2] == ("Failed", True)
    reuse(site)
    site.prefill.resume()
    assert site.prefill.call("wait", 0, room)[::2] == ("Failed", True)
    assert untouched(site)
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])
    site.close()


def test_prefill_abort_during_write_ends_both_sides(pair: list[RankProcess]) -> None:
    """The pages are read until decode ends the write."""
    site = Site(pair, "tcp", LARGE)
    room = stall(site)
    site.prefill.call("abort", 0, room)
    assert site.prefill.call("state", 0, room) == ("Failed", False)
    site.decode.resume()
    assert site.decode.call("wait", 0, room)[::2] == ("Failed", True)
    reuse(site)
    assert site.prefill.call("wait", 0, room)[::2] == ("Failed", True)
    assert untouched(site)
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])
    site.close()


def test_failed_chunk_stops_later_chunks(any_site: Site) -> None:
    """The room would be complete without the chunk that was refused."""
    room = next(ROOMS)
    any_site.decode.call("receive", 0, any_site.address, room, [1, 2, 3])
    any_site.prefill.call("open_sender", 0, any_site.address, room)
    assert any_site.prefill.call("wait_state", 0, room, "WaitingForInput")
    any_site.prefill.call("attempt", 0, room, "init", 3, 0)
    any_site.decode.call("revoke", 0)
    for pages in ([1], [2], [3]):
        assert any_site.prefill.call("attempt", 0, room, "send", pages) == ""
    for process in (any_site.prefill, any_site.decode):
        state, reason, _ = process.call("wait", 0, room)
        assert state == "Failed"
        assert "refused" in reason
    assert any_site.decode.call("stale_bytes", 0, 0xA5, list(range(64))) == 0


def test_room_in_use_is_rejected(site: Site) -> None:
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [1, 2])
    with pytest.raises(RuntimeError, match=f"bootstrap_room {room} is in use on this rank"):
        site.decode.call("receive", 0, site.address, room, [3, 4])
    site.prefill.call("open_sender", 0, site.address, room)
    with pytest.raises(RuntimeError, match=f"bootstrap_room {room} is in use on this rank"):
        site.prefill.call("open_sender", 0, site.address, room)

    site.decode.call("open", 1, "decode", "tcp", site.model, None, None, site.settings)
    assert site.prefill.call("wait_state", 0, room, "WaitingForInput")
    site.decode.call("receive", 1, site.address, room, [3, 4])
    state, reason, reusable = site.decode.call("wait", 1, room)
    assert (state, reusable) == ("Failed", True)
    assert "duplicate room" in reason

    site.prefill.call("attempt", 0, room, "init", 2, 0)
    site.prefill.call("attempt", 0, room, "send", [1, 2])
    assert site.decode.call("wait", 0, room)[0] == "Success"
    assert site.decode.call("left", 1) == []


# Peers that do not fit, and calls that are wrong


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Model(page_size=8), "page_size differs: prefill has 4, decode 8"),
        (Model(dtype="bfloat16"), "kv_cache_dtype differs: prefill has float16, decode bfloat16"),
        (Model(layout="HND"), "kv_layout differs: prefill has NHD, decode HND"),
        (Model(heads=8), "total_heads differs: prefill has 4, decode 8"),
        (Model(layers=1), "layers differs: prefill has layers 0 to 1, decode layers 0 to 0"),
        (Model(head_bytes=32), "bytes of one head in a page differ: prefill has 64, decode 128"),
    ],
)
def test_incompatible_ranks_report_reason(site: Site, model: Model, reason: str) -> None:
    site.decode.call("open", 1, "decode", "tcp", model, None, None, site.settings)
    room = next(ROOMS)
    site.decode.call("receive", 1, site.address, room, [1, 2])
    state, said, reusable = site.decode.call("wait", 1, room)
    assert (state, reusable) == ("Failed", True)
    assert reason.replace("layers differs", "layers differ") in said
    assert site.decode.call("left", 1) == []


def test_different_engines_are_reported(site: Site) -> None:
    site.decode.call("open", 1, "decode", "shm", site.model, None, None, site.settings)
    room = next(ROOMS)
    site.decode.call("receive", 1, site.address, room, [1, 2])
    assert "transfer engine differs: prefill has tcp, decode shm" in site.decode.call("wait", 1, room)[1]


def test_different_page_counts_fail_room(site: Site) -> None:
    pages, aux = next(ROOMS), next(ROOMS)
    site.decode.call("receive", 0, site.address, pages, [1, 2, 3])
    site.prefill.call("send", 0, site.address, pages, [1, 2])
    site.decode.call("receive", 0, site.address, aux, [1, 2], aux=3)
    site.prefill.call("send", 0, site.address, aux, [1, 2], aux=None)
    for process in (site.prefill, site.decode):
        assert "number of pages differs: prefill has 2, decode 3" in process.call("wait", 0, pages)[1]
        assert "init() of the sender had no aux_index" in process.call("wait", 0, aux)[1]


def test_invalid_calls_are_rejected_without_effect(site: Site) -> None:
    room = next(ROOMS)
    site.prefill.call("open_sender", 0, site.address, room)
    site.decode.call("receive", 0, site.address, room, None)

    def sender(call: str, *arguments: Any) -> Any:
        return site.prefill.call("attempt", 0, room, call, *arguments)

    def receiver(*arguments: Any) -> Any:
        return site.decode.call("attempt", 0, room, "init", *arguments)

    assert sender("send", [1]) == "call init() before send()"
    assert "num_kv_indices -1: must be 0 or more" in sender("init", -1)
    assert "aux_index 8 does not exist: there are 8 items" in sender("init", 2, 8)
    assert sender("init", 2, 0) == ""
    assert "only the last chunk may be" in sender("send", [])
    assert "page 64 does not exist: there are 64" in sender("send", [63, 64])
    assert "page -1" in sender("send", [-1, 0])
    assert "must be 0:1" in sender("send", [1], slice(0, 2))
    assert "3 pages are sent with this chunk, but init() announced 2" in sender("send", [1, 2, 3])
    assert "1 pages are sent with this chunk, but init() announced 2" in sender("send", [1], None, True)
    assert "flat array of page indices" in sender("send", np.zeros((2, 2), np.int64))
    assert "page 64 does not exist" in receiver([64])
    assert "has a page twice" in receiver([3, 3])
    assert "must be whole pages of 4 tokens" in receiver([3], None, 3)
    assert receiver([3, 4], 1) == ""
    assert "init() was called before" in receiver([3, 4], 1)
    assert sender("send", [1, 2]) == ""
    assert "the last chunk has been sent" in sender("send", [1])
    assert site.decode.call("wait", 0, room)[0] == "Success"
    for address in ("nowhere", "::1:8998", "host:0", "host:http"):
        with pytest.raises(RuntimeError, match="bootstrap_addr"):
            site.decode.call("receive", 0, address, next(ROOMS), [1])
    for seconds in (0, -1, 1e9, float("nan")):
        with pytest.raises(RuntimeError, match="timeout_s"):
            site.decode.call("receive", 0, site.address, next(ROOMS), [1], timeout_s=seconds)
    for wrong in (-1, 2**63):
        with pytest.raises(RuntimeError, match=r"must be in \[0, 2\^63\)"):
            site.decode.call("receive", 0, site.address, wrong, [1])


# Frames that must be rejected


def test_invalid_frames_are_counted_and_dropped(pair: list[RankProcess]) -> None:
    site = Site(pair, "tcp", secret="shared")
    room = next(ROOMS)
    site.decode.call("receive", 0, site.address, room, [1, 2])
    assert site.decode.call("wait_state", 0, room, "WaitingForInput")
    done = Done(sender=site.prefill.call("instance", 0), to=site.decode.call("instance", 0), room=room, generation=0)
    good = FrameCodec("shared").encode(done)
    frames = [
        [b""],
        [b"garbage"],
        [good, good],
        [b"KVDF" + b"\xff" * 40],
        [good[:-1]],
        [good[:4] + b"\2\0" + good[6:]],
        [FrameCodec("shared").encode(msgspec.structs.replace(done, room=-1))],
        [bytes(MAX_FRAME + 1)],
        [FrameCodec().encode(done)],
        [FrameCodec("other").encode(done)],
    ]
    for process in pair:
        before = process.call("rejected", 0)
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.connect(process.call("endpoint", 0))
            for parts in frames:
                push.send_multipart(parts)
            counted = {"malformed": 7, "oversized": 1, "unsigned": 2, **before}
            deadline = time.monotonic() + 60
            while process.call("rejected", 0) != counted and time.monotonic() < deadline:
                time.sleep(0.01)
        assert process.call("rejected", 0) == counted
    site.prefill.call("send", 0, site.address, room, [3, 4])
    assert site.decode.call("wait", 0, room) == ("Success", "", True)
    site.close()


def test_invalid_room_request_is_rejected(site: Site) -> None:
    """A decode rank made of raw frames: pages and items out of bounds, indices that are no i64, no hello before."""
    item = site.model.page_size * site.model.heads * site.model.head_bytes
    kv = [Buffer(0, item * 64, item)] * 2 * site.model.layers
    aux = [Buffer(0, size * 8, size) for size in AUX_ITEMS]
    layout = Layout(
        page_size=site.model.page_size,
        kv_cache_dtype=site.model.dtype,
        kv_layout="NHD",
        total_heads=site.model.heads,
        tp_size=1,
        tp_rank=0,
        start_layer=0,
        kv=kv,
        aux=aux,
    )
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        pull.setsockopt(zmq.RCVTIMEO, 5000)
        push.connect(site.prefill.call("endpoint", 0))
        names = {"sender": "raw", "to": site.prefill.call("instance", 0), "reply_to": f"tcp://127.0.0.1:{port}"}

        def ask(message: AnyMessage) -> AnyMessage:
            push.send(FrameCodec().encode(message))
            return FrameCodec().decode(pull.recv())

        def room(pages: bytes, aux_index: int | None) -> str:
            request = RoomRequest(
                **names,
                room=next(ROOMS),
                generation=1,
                pages=pages,
                prefix_pages=0,
                aux_index=aux_index,
                dummy=False,
                destinations=1,
                time_left=5.0,
            )
            answer = ask(request)
            assert isinstance(answer, Failure)
            return answer.reason

        assert "send a hello first" in room(b"", None)
        hello = Hello(**names, engine="tcp", engine_address=b"", layout=layout)
        inconsistent = msgspec.structs.replace(layout, kv=[Buffer(0, item * 64, item)])
        refused = ask(msgspec.structs.replace(hello, layout=inconsistent))
        assert isinstance(refused, Refusal)
        assert "needs K and V for each layer" in refused.reason
        assert isinstance(ask(hello), Welcome)
        assert "page 64 does not exist: there are 64" in room(np.array([63, 64], "<i8").tobytes(), None)
        assert "page -1 does not exist" in room(np.array([-1], "<i8").tobytes(), None)
        assert "multiple of element size" in room(b"123", None)
        assert "aux_index 8 does not exist" in room(b"", 8)


def test_ranks_with_different_secrets_do_not_connect(pair: list[RankProcess]) -> None:
    site = Site(pair, "tcp", secret="ours")
    site.decode.call("open", 1, "decode", "tcp", site.model, None, None, {"secret": "theirs"})
    room = next(ROOMS)
    site.decode.call("receive", 1, site.address, room, [1, 2], timeout_s=0.5)
    assert site.decode.call("wait", 1, room)[::2] == ("Failed", True)
    assert site.prefill.call("rejected", 0)["unsigned"] >= 1
    site.close()


def test_wrong_token_fails_room_at_once(pair: list[RankProcess]) -> None:
    site = Site(pair, "tcp")
    guarded = KVBootstrapServer(port=0, token="right")
    room = next(ROOMS)
    site.decode.call("receive", 0, guarded.address, room, [1, 2])
    state, reason, _ = site.decode.call("wait", 0, room, 5.0)
    assert state == "Failed"
    assert "401" in reason
    guarded.close()
    site.close()


def test_silent_bootstrap_service_does_not_delay_others(site: Site) -> None:
    lonely = next(ROOMS)
    site.decode.call("receive", 0, "127.0.0.1:1", lonely, [1, 2], timeout_s=0.5)
    site.transfer(next(ROOMS), [1, 2, 3], [4, 5, 6])
    assert site.decode.call("wait", 0, lonely)[::2] == ("Failed", True)
