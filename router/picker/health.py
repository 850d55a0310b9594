"""gRPC's health service: `liveness` always serves, all other services once requests can be placed."""

from __future__ import annotations

import asyncio
from typing import Final

from google.protobuf.message import DecodeError

from router.app.readiness import Readiness
from router.picker.grpc_health_pb2 import HealthCheckRequest, HealthCheckResponse
from router.picker.grpc_server import INTERNAL, NOT_FOUND, Call, CallHandler, Methods

_PATH: Final = "/grpc.health.v1.Health/"
_LOOK_SECONDS: Final = 0.5
_Status = HealthCheckResponse


class Health:
    """Reports the state of services. `service`: the name of the picker's own service."""

    def __init__(self, readiness: Readiness, service: str) -> None:
        self._readiness = readiness
        self._services = ("", "readiness", service)

    @property
    def methods(self) -> Methods:
        """The methods Check and Watch."""
        return {f"{_PATH}Check": self._check, f"{_PATH}Watch": self._watch}

    def status(self, service: str) -> int:
        """Return the state of a service, as a number of `HealthCheckResponse`."""
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
    def __init__(self, health: Health, call: Call) -> None:
        self._health = health
        self._call = call

    def received(self, message: bytes) -> None:
        """Receive the request."""
        service = _service(message)
        if service is None:
            self._call.end(INTERNAL, "no HealthCheckRequest")
            return
        status = self._health.status(service)
        if status == _Status.SERVICE_UNKNOWN:
            self._call.end(NOT_FOUND, f"no service {service!r}")
            return
        self._call.send(_Status(status=_Status.ServingStatus.Name(status)).SerializeToString())
        self._call.end()

    def peer_ended(self) -> None:
        """Ignore the end of the requests."""

    def closed(self) -> None:
        """Ignore the end of the call."""


class _Watch:
    """A call that receives a service's state, and every change of it."""

    def __init__(self, health: Health, call: Call) -> None:
        self._health = health
        self._call = call
        self._service = ""
        self._sent: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def received(self, message: bytes) -> None:
        """Receive the request."""
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
            self._call.send(_Status(status=_Status.ServingStatus.Name(status)).SerializeToString())
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def peer_ended(self) -> None:
        """Ignore the end of the requests: the call stays open."""

    def closed(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()


def _service(message: bytes) -> str | None:
    try:
        return str(HealthCheckRequest.FromString(message).service)
    except DecodeError:
        return None
