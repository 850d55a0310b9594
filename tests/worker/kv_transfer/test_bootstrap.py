"""The bootstrap service over HTTP: both generations of the field's requests, heartbeats, errors; and our client."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.endpoints import join_host_port, split_host_port, tcp_endpoint
from worker.kv_transfer import Rank, Topology
from worker.kv_transfer.bootstrap import KVBootstrapServer, bootstrap_app
from worker.kv_transfer.bootstrap_client import ATTEMPT_TIMEOUT_S, BootstrapClient, BootstrapError, Registrar
from worker.kv_transfer.registry import Registration, RegistryError, read_registration

NEVER = threading.Event()
SIZES = "/route?engine_rank=-1&target_dp_group=-1"
LATER_SIZES = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


@pytest.fixture
def server() -> Iterator[KVBootstrapServer]:
    server = KVBootstrapServer(port=0)
    yield server
    server.close()


def ask(address: str, method: str, path: str, body: Any = None, token: str = "") -> tuple[int, Any]:
    host, port = split_host_port(address, "address")
    connection = http.client.HTTPConnection(host, port, timeout=60)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body)
    connection.request(method, path, data, {"authorization": f"Bearer {token}"} if token else {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def engine_rank(number: int, **changes: Any) -> dict[str, Any]:
    body = {"role": "Prefill", "tp_size": 4, "dp_size": 2, "rank_ip": "10.0.0.7", "rank_port": 5000 + number}
    return {**body, "engine_rank": number, **changes}


def registration(rank: Rank = Rank(), topology: Topology = Topology(), **changes: Any) -> Registration:  # noqa: B008
    fields = {
        "host": "fd00::7",
        "port": 5000,
        "page_size": 16,
        "kv_cache_dtype": "float16",
        "kv_layout": "NHD",
        "instance": "first",
        "heartbeat_s": 0.1,
    }
    return Registration(topology, rank, **{**fields, **changes})


def test_first_generation_registers_and_queries(server: KVBootstrapServer) -> None:
    """Ranks count over all DP ranks when they register, inside of one when they are asked for."""
    for number in range(3):
        assert ask(server.address, "PUT", "/route", engine_rank(number)) == (200, "OK")
        status, answer = ask(server.address, "GET", SIZES)
        assert status == 503
        assert f"{number + 1} of 4 prefill ranks" in answer["error"]["message"]
    assert ask(server.address, "GET", "/route?engine_rank=0&target_dp_group=0")[0] == 503
    assert ask(server.address, "PUT", "/route", engine_rank(3, page_size=16)) == (200, "OK")
    status, sizes = ask(server.address, "GET", SIZES)
    assert (status, sizes["prefill_dp_size"], sizes["tp_size_per_dp_rank"]) == (200, 2, 2)
    for number in range(4):
        path = f"/route?engine_rank={number % 2}&target_dp_group={number // 2}"
        assert ask(server.address, "GET", path) == (200, {"rank_ip": "10.0.0.7", "rank_port": 5000 + number})
    status, answer = ask(server.address, "GET", "/route?engine_rank=2&target_dp_group=0")
    assert status == 404
    assert "rank DP 0, CP 0, TP 2, PP 0 does not exist: the prefill has DP 2" in answer["error"]["message"]


def test_later_generation_registers_and_queries(server: KVBootstrapServer) -> None:
    body = {
        "attn_tp_size": 1,
        "attn_tp_rank": 0,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "pp_size": 2,
        "system_dp_size": 2,
        "rank_ip": "::1",
        "page_size": 16,
        "kv_cache_dtype": "auto",
        "load_balance_method": "follow_bootstrap_room",
    }
    for dp in range(2):
        for pp in range(2):
            places = {"system_dp_rank": dp, "pp_rank": pp, "rank_port": 5000 + 2 * dp + pp}
            assert ask(server.address, "PUT", "/route", {**body, **places}) == (200, "OK")
    status, sizes = ask(server.address, "GET", LATER_SIZES)
    assert status == 200
    assert sizes == {
        "attn_tp_size": 1,
        "attn_cp_size": 1,
        "dp_size": 2,
        "pp_size": 2,
        "page_size": 16,
        "kv_cache_dtype": "auto",
        "kv_layout": None,
        "follow_bootstrap_room": True,
    }
    path = "/route?prefill_dp_rank=1&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=1"
    assert ask(server.address, "GET", path) == (200, {"rank_ip": "::1", "rank_port": 5003})
    assert ask(server.address, "GET", path.replace("tp_rank=0", "tp_rank=1"))[0] == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"rank_port": 0}, "rank_port"),
        ({"rank_port": "5000"}, "rank_port"),
        ({"rank_ip": None}, "rank_ip"),
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": 3}, "tp_size"),
        ({"engine_rank": -1}, "engine_rank"),
        ({"engine_rank": 4}, "dp_rank"),
        ({"role": "Decode"}, "role"),
        ({"heartbeat_s": 0}, "heartbeat_s"),
    ],
)
def test_invalid_registration_names_field(server: KVBootstrapServer, body: dict[str, Any], field: str) -> None:
    status, answer = ask(server.address, "PUT", "/route", engine_rank(0, **body))
    assert status == 400
    assert answer["error"]["param"] == field
    assert field.removesuffix("_rank") in answer["error"]["message"]


def test_invalid_requests_are_rejected(server: KVBootstrapServer) -> None:
    for body in (b"{", b"[]", b"{}", b"\xff"):
        assert ask(server.address, "PUT", "/route", body)[0] == 400
    assert ask(server.address, "PUT", "/route", bytes(100_000))[0] == 413
    assert ask(server.address, "GET", "/route")[1]["error"]["param"] == "engine_rank"
    assert ask(server.address, "GET", "/route?engine_rank=x&target_dp_group=0")[1]["error"]["param"] == "engine_rank"
    status, answer = ask(server.address, "DELETE", "/route?dp_rank=0&cp_rank=0&tp_rank=0&pp_rank=0&instance=x")
    assert (status, "is not registered" in answer["error"]["message"]) == (404, True)
    assert ask(server.address, "POST", "/route")[0] == 405


objects = st.dictionaries(st.sampled_from(list(engine_rank(0))) | st.text(max_size=10), st.integers() | st.text())


@given(st.binary(max_size=300) | objects.map(lambda fields: json.dumps(fields).encode()))
def test_any_registration_raises_only_registry_error(data: bytes) -> None:
    with pytest.raises(RegistryError) as caught:
        read_registration(data)
    assert caught.value.status == 400
    assert str(caught.value)


def test_ranks_of_other_topology_are_rejected_while_old_ranks_live(server: KVBootstrapServer) -> None:
    client = BootstrapClient(server.address)
    client.register(registration(heartbeat_s=60.0), time.monotonic() + 60, NEVER)
    status, answer = ask(server.address, "PUT", "/route", engine_rank(0))
    assert status == 409
    assert "DP 2, CP 1, TP 2, PP 1, live ranks have DP 1" in answer["error"]["message"]


def test_token_is_required_except_for_health() -> None:
    server = KVBootstrapServer(port=0, token="right")
    for token in ("", "wrong"):
        assert ask(server.address, "PUT", "/route", engine_rank(0), token)[0] == 401
        assert ask(server.address, "GET", SIZES, None, token)[0] == 401
        assert ask(server.address, "GET", "/ranks", None, token)[0] == 401
        assert ask(server.address, "DELETE", "/route", None, token)[0] == 401
        with pytest.raises(BootstrapError, match="401"):
            BootstrapClient(server.address, token).ranks(time.monotonic() + 60, NEVER)
    assert ask(server.address, "GET", "/health") == (200, {"status": "ok", "registered": 0, "expected": 0})
    client = BootstrapClient(server.address, "right")
    client.register(registration(), time.monotonic() + 60, NEVER)
    assert client.ranks(time.monotonic() + 60, NEVER).topology == Topology()
    server.close()


@pytest.mark.parametrize(
    ("client", "status"),
    [("10.0.0.9", 401), ("fd00::9", 401), ("::ffff:10.0.0.9", 401), ("127.0.0.1", 200), ("::1", 200)],
)
async def test_registration_without_token_is_local_only(client: str, status: int) -> None:
    app = bootstrap_app()

    async def asked(method: str, query: str = "", body: bytes = b"") -> tuple[int, bytes]:
        """Return the answer to a request from an address."""
        answered: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            answered.append(message)

        scope = {"type": "http", "method": method, "path": "/route", "query_string": query.encode(), "headers": []}
        await app(scope | {"client": (client, 1)}, receive, send)
        return answered[0]["status"], answered[1]["body"]

    registered, answer = await asked("PUT", body=json.dumps(engine_rank(0)).encode())
    assert registered == status
    assert status == 200 or b"KVROUTER_BOOTSTRAP_TOKEN" in answer
    assert (await asked("DELETE", "dp_rank=0&cp_rank=0&tp_rank=0&pp_rank=0"))[0] == status
    assert (await asked("GET", SIZES.partition("?")[2]))[0] in (200, 503)


def test_rank_expires_after_two_missed_heartbeats_and_deregisters_at_end(server: KVBootstrapServer) -> None:
    client = BootstrapClient(server.address)
    registrar = Registrar(client, registration(heartbeat_s=1.0), 0.1)
    assert registrar.registered.wait(60)
    end = time.monotonic() + 2.2  # longer than two of its announced heartbeats
    while time.monotonic() < end:
        assert len(client.ranks(time.monotonic() + 60, NEVER).ranks) == 1
    registrar.close()
    assert ask(server.address, "GET", "/health")[1]["registered"] == 0

    began = time.monotonic()
    client.register(registration(instance="silent"), began + 60, NEVER)
    while ask(server.address, "GET", "/health")[1]["registered"]:
        assert time.monotonic() - began < 60
        time.sleep(0.01)
    assert time.monotonic() - began > 0.1


def test_registrar_registers_again_after_service_restart() -> None:
    first = KVBootstrapServer(port=0)
    client = BootstrapClient(first.address)
    registrar = Registrar(client, registration(), 0.1)
    assert registrar.registered.wait(60)
    host, port = split_host_port(first.address, "address")
    first.close()
    second = KVBootstrapServer(host, port)
    assert client.ranks(time.monotonic() + 60, NEVER).ranks[0].instance == "first"
    registrar.close()
    assert ask(second.address, "GET", "/health")[1]["registered"] == 0
    second.close()


def test_client_keeps_deadline_and_stops_on_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and says nothing
        client = BootstrapClient(f"127.0.0.1:{mute.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            client.ranks(start + 0.3, NEVER)
        assert time.monotonic() - start < ATTEMPT_TIMEOUT_S
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(TimeoutError):
        BootstrapClient("127.0.0.1:1").ranks(time.monotonic() + 60, stop)
    with pytest.raises(ValueError, match="bootstrap_addr"):
        BootstrapClient("no-port")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_bootstrap_works_over_ipv6() -> None:
    server = KVBootstrapServer("::1", 0)
    assert server.address.startswith("[::1]:")
    client = BootstrapClient(server.address)
    client.register(registration(), time.monotonic() + 60, NEVER)
    assert client.ranks(time.monotonic() + 60, NEVER).ranks[0].endpoint == "tcp://[fd00::7]:5000"
    server.close()


def test_addresses_are_split_and_joined() -> None:
    assert split_host_port("[fd00::7]:8998", "x") == ("fd00::7", 8998)
    assert split_host_port("prefill-1:8998", "x") == ("prefill-1", 8998)
    assert join_host_port("fd00::7", 1) == "[fd00::7]:1"
    assert tcp_endpoint("10.0.0.7", "*") == "tcp://10.0.0.7:*"
    for wrong in ("fd00::7:8998", "host", ":80", "host:99999", "host:-1", "[host:80", "host:\uff18"):
        with pytest.raises(ValueError, match="x "):
            split_host_port(wrong, "x")
