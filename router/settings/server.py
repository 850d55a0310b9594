"""Settings of the server and of a request's path: sockets, limits, tenants, logs, proxy, queue, TLS, Envoy's picker."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, AnyHttpUrl, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from router.settings.fields import (
    CREDENTIAL_HEADERS,
    HEADER_NAME,
    KEY_HASH,
    ROUTE,
    CorsOrigin,
    ListeningPort,
    NonNegative,
    Port,
    RootPath,
    Section,
)
from router.settings.own_code import HOOKS, NAME, check_function

# The API groups of objects about requests: that of the Inference Extension, and that of llm-d.
_Group = Literal["inference.networking.x-k8s.io", "llm-d.ai"]


def _no_credential(name: str) -> str:
    """Refuse headers whose values must not be shown, as those of sessions are."""
    if name.lower() in CREDENTIAL_HEADERS | {"api-key"}:
        raise ValueError(f"{name} is a credential, which /explain would show as a session: name another header")
    return name


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
    """Limits of one request, and of all bodies and messages that are being received."""

    prompts: PositiveInt = 512
    messages: PositiveInt = 16_384
    media_items: PositiveInt = 256
    values: PositiveInt = 1_000_000
    characters: PositiveInt = 8 * 2**20
    arriving_bytes: PositiveInt = 256 * 2**20


class TenantSettings(Section):
    """A tenant: its API keys, hashed by `kvrouter hash-key`, and its limits. `null` is no limit."""

    keys: list[Annotated[str, Field(pattern=KEY_HASH)]]
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


class WhenFailed(StrEnum):
    """The treatment of a request for which a hook fails: refused (closed), or routed without the hook (open)."""

    CLOSED = "closed"
    OPEN = "open"


def _hook(name: str) -> str:
    return check_function(name, [], HOOKS)


_Hook = Annotated[str, Field(pattern=NAME), AfterValidator(_hook)]


class JwtSettings(Section):
    """JSON Web Tokens as API keys."""

    jwks_url: AnyHttpUrl
    issuer: str = Field(min_length=1)
    audience: str = Field(min_length=1)
    algorithms: list[
        Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
    ] = Field(["RS256", "ES256"], min_length=1)
    tenant_claim: str = "tenant"
    leeway: NonNegative = 30.0

    @model_validator(mode="after")
    def _is_installed(self) -> JwtSettings:
        if not (find_spec("jwt") and find_spec("cryptography")):
            raise ValueError("tokens need more packages: pip install 'kvrouter[jwt]'")
        return self


class HookSettings(Section):
    """Functions before a request is routed and after its answer, and a check of API keys at a URL or of tokens."""

    before: list[_Hook] = []
    after: list[_Hook] = []
    deadline: PositiveFloat = 1.0
    on_error: WhenFailed = WhenFailed.CLOSED
    key_url: AnyHttpUrl | None = None
    key_seconds: NonNegative = 60.0
    jwt: JwtSettings | None = None

    @property
    def checks_keys(self) -> bool:
        """True if keys that the settings lack are checked."""
        return self.key_url is not None or self.jwt is not None

    @model_validator(mode="after")
    def _one_check_of_keys(self) -> HookSettings:
        if self.key_url is not None and self.jwt is not None:
            raise ValueError("hooks: set key_url or jwt, not both")
        return self


class LogSettings(Section):
    """Optional log lines."""

    access: bool = False
    prompt_text: bool = False


class OtelSettings(Section):
    """The destination of traces."""

    endpoint: AnyHttpUrl | None = None

    @field_validator("endpoint")
    @classmethod
    def _is_installed(cls, endpoint: AnyHttpUrl | None) -> AnyHttpUrl | None:
        if endpoint is not None and not find_spec("opentelemetry.exporter"):
            raise ValueError("tracing needs more packages: pip install 'kvrouter[otel]'")
        return endpoint


class EngineFields(StrEnum):
    """The treatment of engine control fields and headers of clients. AUTO: refuse a tenant's, strip others'."""

    AUTO = "auto"
    REFUSE = "refuse"
    STRIP = "strip"
    PASS = "pass"


class ForwardTokens(StrEnum):
    """The choice to send token ids with prompts. AUTO: to engines whose trial allows it."""

    AUTO = "auto"
    OFF = "off"


class BillingLine(StrEnum):
    """The treatment of the billing line of Claude Code's prompts. AUTO: strip it for engines that keep it."""

    AUTO = "auto"
    STRIP = "strip"
    KEEP = "keep"


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
    retry_statuses: list[Literal[408, 500, 504]] = []
    stream_failovers: Annotated[int, Field(ge=0)] = 0
    keepalive_interval: PositiveFloat | Literal["off"] = "off"
    ask_usage: bool = False
    forward_unknown_models: bool = False
    client_routing: bool = False
    session_headers: list[Annotated[str, Field(pattern=HEADER_NAME), AfterValidator(_no_credential)]] = []
    worker_keys: WorkerKeys = WorkerKeys.AUTO
    engine_fields: EngineFields = EngineFields.AUTO
    forward_tokens: ForwardTokens = ForwardTokens.OFF
    billing_line: BillingLine = BillingLine.AUTO
    more_routes: list[Annotated[str, Field(pattern=ROUTE)]] = []

    @field_validator("forward_tokens", "keepalive_interval", mode="before")
    @classmethod
    def _off_in_yaml(cls, value: object) -> object:
        """Return "off" for `off`, which YAML reads as false."""
        return "off" if value is False else value


class UpstreamSettings(Section):
    """TLS to workers whose URL is https."""

    ca: Path | None = None
    verify: bool = True
    certificate: Path | None = None
    key: Path | None = None


class AdmissionSettings(Section):
    """When requests wait in the router, and how many may wait. Times are in seconds."""

    requests: PositiveInt | Literal["auto"] | None = "auto"
    tokens: PositiveInt | None = None
    late_binding: bool = True
    programs: Literal["auto", "off"] = "auto"
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
    emit_scores: bool = False
    llm_d_metrics: bool = False
    objectives: dict[str, int] = {}
    follow_objectives: _Group | None = None
    follow_rewrites: _Group | None = None
    pool: str = ""

    @model_validator(mode="after")
    def _certificate_and_key(self) -> PickerSettings:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: set both or neither")
        return self
