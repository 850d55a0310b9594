"""The load balancer of verl, by the calls of verl's client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvrouter.adapters import selector_thread, verl
from kvrouter.adapters.verl import LoadBalancer
from kvrouter.selection import Reservation

PROMPT = list(range(64))


@pytest.fixture
def balancer() -> Iterator[LoadBalancer]:
    servers = {"10.0.0.1:1": "first", "10.0.0.2:1": "second"}
    balancer = LoadBalancer(servers, {"router_class": "kvrouter.adapters.verl.LoadBalancer", "discover": False})
    yield balancer
    balancer.close()


def test_turns_of_a_trajectory_go_where_their_prefix_is(balancer: LoadBalancer) -> None:
    assert balancer.require_acquire_fields() == ["prompt_ids"]
    assert balancer.require_release_fields() == ["request_id"]
    for trajectory in range(4):
        prompt = [trajectory * 1000 + token for token in PROMPT]
        servers = set()
        for turn in range(3):
            server, handle = balancer.acquire_server(request_id=f"t{trajectory}", prompt_ids=prompt + [turn] * 16)
            servers.add(server)
            assert handle == {"10.0.0.1:1": "first", "10.0.0.2:1": "second"}[server]
            assert balancer.get_total_inflight() == balancer.get_inflight_count(server) == 1
            balancer.release_server(server_id=server, request_id=f"t{trajectory}")
        assert len(servers) == 1
    assert balancer.get_total_inflight() == 0
    assert balancer.get_status()["fallbacks"] == 0


def test_session_stays_on_its_server_although_another_is_free(balancer: LoadBalancer) -> None:
    own, _ = balancer.acquire_server("a", PROMPT)
    balancer.release_server(own, "a")
    for number in range(8):
        server, _ = balancer.acquire_server(f"{number}", [number] * 2000)
        if server != own:
            balancer.release_server(server, f"{number}")
    assert balancer.get_total_inflight() == balancer.get_inflight_count(own) > 0
    assert balancer.acquire_server("a", PROMPT)[0] == own
    assert balancer.acquire_server("a")[0] == own  # without a prompt


def test_session_moves_when_its_server_is_full_and_stays_when_all_are() -> None:
    settings = {"admission": {"requests": 1}}
    balancer = LoadBalancer({"one:1": None, "two:1": None}, {"discover": False, "settings": settings})
    first, _ = balancer.acquire_server("a", PROMPT)
    second, _ = balancer.acquire_server("a", PROMPT)
    assert {first, second} == {"one:1", "two:1"}
    assert balancer.get_status()["fallbacks"] == 0
    assert balancer.acquire_server("a", PROMPT)[0] == second
    assert balancer.get_status()["fallbacks"] == 1
    balancer.close()


def test_choice_that_ends_after_its_timeout_holds_nothing(
    balancer: LoadBalancer, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = balancer._thread.selector
    reserve, gate = selector.reserve, threading.Event()

    async def late(*arguments: Any, **options: Any) -> Reservation:
        held = await reserve(*arguments, **options)
        gate.wait(10)
        return held

    monkeypatch.setattr(selector, "reserve", late)
    monkeypatch.setattr(selector_thread, "_SECONDS", 0.05)
    server, _ = balancer.acquire_server("a", PROMPT)
    assert balancer.get_status()["fallbacks"] == 1
    monkeypatch.undo()
    gate.set()
    deadline = time.monotonic() + 10
    while any(load.requests for loads in balancer._thread.call(selector.loads).values() for load in loads):
        assert time.monotonic() < deadline
    balancer.release_server(server, "a")
    assert balancer.get_total_inflight() == 0


def test_number_of_sessions_is_bounded(balancer: LoadBalancer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "_MOST_SESSIONS", 2)
    for session in ("a", "b", "a", "c"):
        balancer.release_server(balancer.acquire_server(session, PROMPT)[0], session)
    assert list(balancer._sessions) == ["a", "c"]


def test_concurrent_requests_are_spread(balancer: LoadBalancer) -> None:
    for number in range(8):
        balancer.acquire_server(request_id=f"{number}", prompt_ids=[number] * 64)
    assert balancer.get_status()["servers"] == {"10.0.0.1:1": 4, "10.0.0.2:1": 4}
    for number in range(8):
        for server in balancer.get_all_servers():
            if (server, f"{number}") in balancer._held:
                balancer.release_server(server, f"{number}")
    assert balancer.get_total_inflight() == 0
    assert not balancer._held


def test_removed_server_has_nothing_in_flight_and_a_late_release_is_no_error(balancer: LoadBalancer) -> None:
    server, _ = balancer.acquire_server(request_id="a", prompt_ids=PROMPT)
    balancer.remove_servers([server])
    assert balancer.get_total_inflight() == 0
    balancer.release_server(server, request_id="a")
    assert len(balancer.get_all_servers()) == 1
    balancer.add_servers({server: "again"})
    assert sorted(balancer.get_all_servers()) == ["10.0.0.1:1", "10.0.0.2:1"]
    balancer.remove_servers(balancer.get_all_servers())
    with pytest.raises(RuntimeError, match="Add servers"):
        balancer.acquire_server(request_id="a", prompt_ids=PROMPT)


def test_update_of_weights_forgets_caches(balancer: LoadBalancer) -> None:
    server, _ = balancer.acquire_server(request_id="a", prompt_ids=PROMPT)
    balancer.release_server(server, "a")
    assert balancer.clear_sticky_cache() == {"cleared_entries": 1, "server_loads": {"10.0.0.1:1": 0, "10.0.0.2:1": 0}}
    thread = balancer._thread
    from kvrouter.selection import Prompt

    selection = thread.run(thread.selector.select(Prompt(model="rollout", token_ids=PROMPT)))
    assert selection.overlap == 0


def test_error_of_the_choice_falls_back_to_the_server_with_the_fewest_requests(balancer: LoadBalancer) -> None:
    balancer.acquire_server(request_id="a")  # without a prompt
    assert balancer.get_status()["fallbacks"] == 0
    balancer.acquire_server(request_id="b", prompt_ids=[-1])
    assert balancer.get_status()["servers"] == {"10.0.0.1:1": 1, "10.0.0.2:1": 1}
    assert balancer.get_status()["fallbacks"] == 1
    for server in balancer.get_all_servers():
        balancer.release_server(server)
    assert balancer.get_total_inflight() == 0


def test_unknown_field_of_the_file_is_named() -> None:
    with pytest.raises(ValueError, match="blok_size: unknown"):
        LoadBalancer({}, {"blok_size": 16})
