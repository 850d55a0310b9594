"""The bootstrap service of a prefill instance, which gives decode ranks the addresses of prefill ranks.

    python -m worker.kv_transfer.bootstrap --host 10.0.0.7 --port 8998

    PUT    /route    register a rank; each repetition is a heartbeat
    GET    /route    the address of one rank, or the sizes; queries of both generations of engines
    DELETE /route    deregister a rank
    GET    /ranks    all ranks at once, as our decode ranks ask
    GET    /health   the number of registered ranks

If a token is set, every request except /health needs `Authorization: Bearer <token>`. Without a token, ranks can
register from this machine only: a registered rank receives prompts of other users as KV pages.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import socket
import threading
import time
from ipaddress import IPv6Address, ip_address
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from kvevents.endpoints import join_host_port
from worker.kv_transfer.ranks import Rank
from worker.kv_transfer.registry import RankRegistry, Registration, RegistryError, read_registration

DEFAULT_PORT = 8998
MAX_BODY = 64 << 10
BODY_TIMEOUT_S = 5.0
START_TIMEOUT_S = 10.0

_FIRST_QUERY = ("engine_rank", "target_dp_group")
_LATER_QUERY = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
_PLACE_QUERY = ("dp_rank", "cp_rank", "tp_rank", "pp_rank")


def bootstrap_app(token: str = "") -> FastAPI:
    """Create the application. Its table is in memory; heartbeats fill it again after a restart."""
    app = FastAPI(title="kvrouter bootstrap")
    registry = RankRegistry()

    @app.exception_handler(RegistryError)
    async def answer_error(request: Request, error: RegistryError) -> JSONResponse:  # noqa: ARG001
        headers = {"retry-after": "1"} if error.status == 503 else None
        return JSONResponse({"error": {"message": str(error), "param": error.field}}, error.status, headers)

    @app.put("/route")
    async def register(request: Request) -> str:
        _authenticate(request, token, changes=True)
        registry.register(read_registration(await _body(request)), time.monotonic())
        return "OK"

    @app.get("/route")
    async def route(request: Request) -> dict[str, Any]:
        _authenticate(request, token)
        if any(name in request.query_params for name in _LATER_QUERY):
            dp, cp, tp, pp = _numbers(request, _LATER_QUERY)
            if (dp, cp, tp, pp) == (-1, -1, -1, -1):
                return _later_sizes(registry.complete(time.monotonic()))
        else:
            tp, dp = _numbers(request, _FIRST_QUERY)
            cp = pp = 0
            if (tp, dp) == (-1, -1):
                return _first_sizes(registry.complete(time.monotonic()))
        entry = registry.rank(Rank(dp, cp, tp, pp), time.monotonic())
        return {"rank_ip": entry.host, "rank_port": entry.port}

    @app.delete("/route")
    async def deregister(request: Request) -> str:
        _authenticate(request, token, changes=True)
        rank = Rank(*_numbers(request, _PLACE_QUERY))
        registry.deregister(rank, request.query_params.get("instance", ""), time.monotonic())
        return "OK"

    @app.get("/ranks")
    async def ranks(request: Request) -> Response:
        _authenticate(request, token)
        return Response(msgspec.json.encode(registry.ranks(time.monotonic())), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        registered, expected = registry.counts(time.monotonic())
        return {"status": "ok", "registered": registered, "expected": expected}

    return app


def _authenticate(request: Request, token: str, changes: bool = False) -> None:
    if not token and changes and not _is_local(request):
        reason = "ranks on other machines need a token: start the service with KVROUTER_BOOTSTRAP_TOKEN set"
        raise RegistryError(401, reason, "authorization")
    given = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise RegistryError(401, "wrong or missing token: send `Authorization: Bearer <token>`", "authorization")


def _is_local(request: Request) -> bool:
    """Return whether a request was sent over the loopback interface."""
    try:
        address = ip_address(request.client.host if request.client else "")
    except ValueError:
        return False
    return ((isinstance(address, IPv6Address) and address.ipv4_mapped) or address).is_loopback


async def _body(request: Request) -> bytes:
    data = b""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY:
                    raise RegistryError(413, f"the body exceeds {MAX_BODY} bytes: a registration is smaller")
    except TimeoutError:
        raise RegistryError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return data


def _numbers(request: Request, names: tuple[str, ...]) -> list[int]:
    numbers = []
    for name in names:
        value = request.query_params.get(name)
        if value is None:
            raise RegistryError(400, f"{name}: missing; the query needs {' and '.join(names)}", name)
        try:
            number = int(value)
        except ValueError:
            number = -2
        if not -1 <= number < 4096:
            raise RegistryError(
                400, f"{name} {value[:40]!r}: must be a rank number, or -1 in every field for the sizes", name
            )
        numbers.append(number)
    return numbers


def _first_sizes(entry: Registration) -> dict[str, Any]:
    return {
        "prefill_dp_size": entry.topology.dp,
        "tp_size_per_dp_rank": entry.topology.tp,
        "page_size": entry.page_size,
        "kv_cache_dtype": entry.kv_cache_dtype,
        "kv_layout": entry.kv_layout,
    }


def _later_sizes(entry: Registration) -> dict[str, Any]:
    return {
        "attn_tp_size": entry.topology.tp,
        "attn_cp_size": entry.topology.cp,
        "dp_size": entry.topology.dp,
        "pp_size": entry.topology.pp,
        "page_size": entry.page_size,
        "kv_cache_dtype": entry.kv_cache_dtype,
        "kv_layout": entry.kv_layout,
        "follow_bootstrap_room": True,
    }


class KVBootstrapServer:
    """The bootstrap service in its own thread, at `address` (`host:port`). Port 0 binds a free one. Raises OSError."""

    def __init__(self, host: str = "127.0.0.1", port: int = DEFAULT_PORT, token: str = "") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.address = join_host_port(host, self._socket.getsockname()[1])
        config = uvicorn.Config(bootstrap_app(token), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._server = _Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="kv-bootstrap", daemon=True
        )
        self._thread.start()
        if not self._server.running.wait(START_TIMEOUT_S):
            self.close()
            raise RuntimeError(f"the bootstrap service at {self.address} did not start within {START_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Finish open requests for at most one second, and end the thread. Repeated calls have no effect."""
        self._server.should_exit = True
        self._thread.join(START_TIMEOUT_S)
        self._socket.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.running = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.running.set()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.kv_transfer.bootstrap", description="Bootstrap service.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port ({DEFAULT_PORT})")
    options = parser.parse_args()
    token = os.environ.get("KVROUTER_BOOTSTRAP_TOKEN", "")  # an argument would be visible in the process list
    uvicorn.run(bootstrap_app(token), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
