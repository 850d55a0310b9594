"""Settings of a request's path: proxy, queue, TLS to workers, Envoy's endpoint picker."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from router.settings.fields import ListeningPort, NonNegative, Section


class EngineFields(StrEnum):
    """The treatment of engine control fields and headers in requests of clients.

    AUTO: refuse the request of a tenant, strip the fields of other clients.
    """

    AUTO = "auto"
    REFUSE = "refuse"
    STRIP = "strip"
    PASS = "pass"


class WorkerKeys(StrEnum):
    """Which requests of clients receive the worker's API key. Those of tenants and of the operator always do.

    AUTO: requests without `Authorization`, if the router listens on loopback only.
    ALWAYS: all requests; the key replaces their `Authorization`.
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class ProxySettings(Section):
    """Forwarding of requests to workers. Times are in seconds."""

    connect_timeout: PositiveFloat = 3.0
    idle_timeout: PositiveFloat = 600.0
    client_timeout: PositiveFloat = 60.0
    attempts: PositiveInt = 3
    retry_share: NonNegative = 0.2
    retry_minimum: Annotated[int, Field(ge=0)] = 10
    stream_failovers: Annotated[int, Field(ge=0)] = 0
    speculation_seconds: NonNegative = 2.0
    ask_usage: bool = False
    forward_unknown_models: bool = False
    worker_keys: WorkerKeys = WorkerKeys.AUTO
    engine_fields: EngineFields = EngineFields.AUTO
    more_routes: list[Annotated[str, Field(pattern=r"^(GET|POST|PUT|PATCH|DELETE) /[!-~]*$")]] = []


class UpstreamSettings(Section):
    """TLS to workers whose URL is https."""

    ca: Path | None = None
    verify: bool = True
    certificate: Path | None = None
    key: Path | None = None


class AdmissionSettings(Section):
    """When requests wait in the router, and how many may wait. Times are in seconds."""

    requests: PositiveInt | None = None
    tokens: PositiveInt | None = None
    late_binding: bool = True
    queue: Annotated[int, Field(ge=0)] = 1000
    queue_bytes: PositiveInt = 256 * 2**20
    timeout: PositiveFloat = 30.0
    cold_start_timeout: NonNegative = 0.0


class PickerSettings(Section):
    """Envoy's endpoint picker, `kvrouter picker`."""

    port: ListeningPort = 9002
    certificate: Path | None = None
    key: Path | None = None
    fallbacks: Annotated[int, Field(ge=0)] = 0
    read_usage: Annotated[float, Field(ge=0, le=1)] = 0.1
    objectives: dict[str, int] = {}
    follow_objectives: Literal["inference.networking.x-k8s.io", "llm-d.ai"] | None = None

    @model_validator(mode="after")
    def _certificate_and_key(self) -> PickerSettings:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: set both or neither")
        return self
