"""Settings of the server itself: where it listens, what it accepts, its tenants, logs and traces."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import AnyHttpUrl, Field, PositiveFloat, PositiveInt, field_validator

from router.settings.fields import CorsOrigin, ListeningPort, NonNegative, Port, RootPath, Section


class ServerSettings(Section):
    """The listening sockets, and which requests they accept."""

    host: str = "127.0.0.1"
    port: ListeningPort = 8080
    max_body_bytes: PositiveInt = 64 * 2**20
    body_timeout: PositiveFloat = 60.0
    processes: PositiveInt = 1
    drain_seconds: NonNegative = 0.0
    shutdown_timeout: NonNegative = 30.0
    token: str = ""
    allowed_hosts: list[str] = []
    admin_port: Port | None = None
    root_path: RootPath = ""
    cors_origins: list[CorsOrigin] = []
    certificate: Path | None = None
    key: Path | None = None


class LimitSettings(Section):
    """Limits of one request, and of all request bodies that are being received."""

    prompts: PositiveInt = 512
    messages: PositiveInt = 16_384
    values: PositiveInt = 1_000_000
    characters: PositiveInt = 8 * 2**20
    arriving_bytes: PositiveInt = 256 * 2**20


class TenantSettings(Section):
    """A tenant: its API keys, hashed by `kvrouter hash-key`, and its limits. `null` is no limit."""

    keys: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(min_length=1)
    models: list[str] | None = None
    requests_per_second: PositiveFloat | None = None
    tokens_per_minute: PositiveFloat | None = None
    priority: int = 0
    service_level: str | None = None


class TenantsSettings(Section):
    """The tenants that may send requests."""

    isolate: bool = False
    salted_messages: bool = False
    named: dict[str, TenantSettings] = {}

    @field_validator("named")
    @classmethod
    def _keys_are_unique(cls, named: dict[str, TenantSettings]) -> dict[str, TenantSettings]:
        keys = [key for tenant in named.values() for key in tenant.keys]
        if len(set(keys)) < len(keys):
            raise ValueError("Duplicate API key: each tenant needs its own.")
        return named


class LogSettings(Section):
    """Optional log lines."""

    access: bool = False


class OtelSettings(Section):
    """The destination of traces."""

    endpoint: AnyHttpUrl | None = None

    @field_validator("endpoint")
    @classmethod
    def _is_installed(cls, endpoint: AnyHttpUrl | None) -> AnyHttpUrl | None:
        if endpoint is not None and not find_spec("opentelemetry.exporter"):
            raise ValueError("tracing needs more packages: pip install 'kvrouter[otel]'")
        return endpoint
