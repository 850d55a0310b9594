"""gRPC's health service: `liveness` while this runs; all else once requests can be placed."""

from __future__ import annotations

import asyncio
from typing import Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from router.app.readiness import Readiness
from router.picker.grpc_server import INTERNAL, NOT_FOUND, Call, CallHandler, Methods

_PATH: Final = "/grpc.health.v1.Health/"
_LOOK_SECONDS: Final = 0.5
_Status = health_pb2.HealthCheckResponse


class Health:
    """Says how the services are. `service`: the one that is served beside."""

    def __init__(self, readiness: Readiness, service: str) -> None:
        self._readiness = readiness
        self._services = ("", "readiness", service)

    @property
    def methods(self) -> Methods:
        """Check, and Watch."""
        return {f"{_PATH}Check": self._check, f"{_PATH}Watch": self._watch}

    def status(self, service: str) -> int:
        """How a service is now, as `HealthCheckResponse` counts."""
        if service == "liveness":
            return int(_Status.SERVING)
        if service not in self._services:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.NOT_SERVING if self._readiness.problem() else _Status.SERVING)

    def _check(self, call: Call) -> CallHandler:
        return _Check(self, call)

    def _watch(self, call: Call) -> CallHandler:
        return _Watch(self, call)


class _Check:
    """How a service is now."""

    def __init__(self, health: Health, call: Call) -> None:
        self._health = health
        self._call = call

    def received(self, message: bytes) -> None:
        """The question."""
        service = _service(message)
        if service is None:
            self._call.end(INTERNAL, "no HealthCheckRequest")
            return
        status = self._health.status(service)
        if status == _Status.SERVICE_UNKNOWN:
            self._call.end(NOT_FOUND, f"no service {service!r}")
            return
        self._call.send(_Status(status=status).SerializeToString())
        self._call.end()

    def peer_ended(self) -> None:
        """It has asked."""

    def closed(self) -> None:
        """It has been answered."""


class _Watch:
    """How a service is, and whenever that changes."""

    def __init__(self, health: Health, call: Call) -> None:
        self._health = health
        self._call = call
        self._service = ""
        self._sent: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def received(self, message: bytes) -> None:
        """The question."""
        service = _service(message)
        if service is None or self._timer is not None:
            self._call.end(INTERNAL, "not one HealthCheckRequest")
            return
        self._service = service
        self._look()

    def _look(self) -> None:
        status = self._health.status(self._service)
        if status != self._sent:
            self._sent = status
            self._call.send(_Status(status=status).SerializeToString())
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def peer_ended(self) -> None:
        """It has asked, and goes on listening."""

    def closed(self) -> None:
        """It listens no more."""
        if self._timer is not None:
            self._timer.cancel()


def _service(message: bytes) -> str | None:
    try:
        return str(health_pb2.HealthCheckRequest.FromString(message).service)
    except DecodeError:
        return None
