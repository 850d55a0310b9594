"""Every setting, with its default. `config.yaml` at the root of the project lists them with a line on why each exists.

One file, because it is one list: a section after the other, as in config.yaml.

Environment variables override the file: `KVROUTER_SERVER__PORT=9000`.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from enum import StrEnum
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    AnyHttpUrl,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvevents.curve import load_key_pair, load_public_key
from kvevents.endpoints import parse_endpoint
from kvevents.sources import HIGHEST_RANK, LONGEST_TOPIC, MOST_BLOCK_SIZE
from router.http.worker_url import (
    canonical_url,
    checked_key,
    key_in_environment,
    key_in_file,
    split_user_info,
    without_user_info,
)
from router.settings.mistakes import mistakes

NonNegative = Annotated[float, Field(ge=0)]
# Of a model or an adapter, in characters.
LONGEST_NAME = 512


def _public_key_file(path: Path) -> Path:
    load_public_key(path, "key file")
    return path


def _key_pair_file(path: Path) -> Path:
    load_key_pair(path, "key file")
    return path


PublicKeyFile = Annotated[Path, AfterValidator(_public_key_file)]
KeyPairFile = Annotated[Path, AfterValidator(_key_pair_file)]


def _network(text: str) -> str:
    ip_network(text)
    return text


def _root_path(path: str) -> str:
    root = path.rstrip("/")
    if root and re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root) is None:
        raise ValueError("expected a path such as /llm")
    return root


def _cors_origin(origin: str) -> str:
    if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin) is None:
        raise ValueError("expected an origin such as https://chat.example.com, without a path, or *")
    return origin


# No URL is such a name, and no header or label needs it to be escaped.
WORKER_NAME = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9._:@-]{0,251}[A-Za-z0-9])?$")


def _api_key(key: SecretStr) -> SecretStr:
    if key.get_secret_value():  # else none is sent
        checked_key(key.get_secret_value(), "api_key")
    return key


def _api_key_file(path: Path) -> Path:
    key_in_file(path)
    return path


def _api_key_env(variable: str) -> str:
    key_in_environment(variable)
    return variable


# A label of metrics, and a header's value.
SERVICE_LEVEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

# They hold passwords, and so does every api_key.
_HIDDEN = frozenset({"replicas.redis", "server.token", "index.secret"})
# Names that only secrets have, wherever they stand.
_SECRETS = frozenset({"api_key", "keys", "password", "secret", "token"})
_PREFIX = "KVROUTER_"


# Settings of earlier versions, which are accepted and have no effect.
WITHOUT_EFFECT = ("server.fast_lane", "picker.fast_lane")


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the file, the field and what is wrong."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicyName(StrEnum):
    """How a worker is chosen."""

    KV_AWARE = "kv_aware"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    SESSION_AFFINITY = "session_affinity"
    CACHE_AWARE = "cache_aware"
    DYNAMO = "dynamo"
    LLM_D = "llm_d"
    LMETRIC = "lmetric"


class ServerSettings(_Section):
    """Where the router listens, and what it takes in."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    max_body_bytes: PositiveInt = 64 * 2**20
    body_timeout: PositiveFloat = 60.0
    processes: PositiveInt = 1
    drain_seconds: NonNegative = 0.0
    shutdown_timeout: NonNegative = 30.0
    token: str = ""
    allowed_hosts: list[str] = []
    admin_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    root_path: Annotated[str, AfterValidator(_root_path)] = ""
    cors_origins: list[Annotated[str, AfterValidator(_cors_origin)]] = []
    certificate: Path | None = None
    key: Path | None = None


def _url(given: Any) -> str:
    return canonical_url(str(given))


def _endpoint(text: str) -> str:
    return str(parse_endpoint(text))


# Pydantic's own would read what others read in other ways.
HttpUrl = Annotated[AnyHttpUrl, BeforeValidator(_url)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
BlockSize = Annotated[int, Field(ge=1, le=MOST_BLOCK_SIZE)]


class LimitSettings(_Section):
    """How much one request may ask for, and how much all that arrive may hold."""

    prompts: PositiveInt = 512
    messages: PositiveInt = 16_384
    values: PositiveInt = 1_000_000
    characters: PositiveInt = 8 * 2**20
    arriving_bytes: PositiveInt = 256 * 2**20


class StreamSettings(_Section):
    """An explicit event stream of one DP rank of a worker."""

    dp_rank: Annotated[int, Field(ge=0, le=HIGHEST_RANK)] = 0
    endpoint: Endpoint
    replay_endpoint: Endpoint | None = None
    topic: Annotated[str, Field(max_length=LONGEST_TOPIC)] = ""
    curve_server_key_file: PublicKeyFile | None = None


class Role(StrEnum):
    """What a worker computes of a request."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Backend(StrEnum):
    """How prefill and decode workers hand over. AUTO: as the engine does that the workers say they are."""

    AUTO = "auto"
    SGLANG = "sglang"
    NIXL = "nixl"
    MOONCAKE = "mooncake"
    TRTLLM = "trtllm"
    SIDECAR = "sidecar"


class DisaggregationSettings(_Section):
    """Prefill and decode on workers of their own, where there are such. Amounts in tokens."""

    backend: Backend = Backend.AUTO
    skip_tokens: Annotated[int, Field(ge=0)] = 2048
    skip_ratio: Annotated[float, Field(ge=0, le=1)] = 0.7
    saturated_tokens: PositiveInt = 65_536


class KeySettings(_Section):
    """An API key that workers want: itself, a file that has it, or the name of an environment variable that does.

    It is sent as `Authorization: Bearer`, unless it says another scheme itself: `Basic …`.
    """

    api_key: Annotated[SecretStr, AfterValidator(_api_key)] | None = None
    api_key_file: Annotated[Path, AfterValidator(_api_key_file)] | None = None
    api_key_env: Annotated[str, AfterValidator(_api_key_env)] | None = None

    @property
    def has_key(self) -> bool:
        """Whether anything is said of a key, if only that there is none."""
        return self.api_key is not None or self.api_key_file is not None or self.api_key_env is not None

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        given = [name for name in KeySettings.model_fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: give one of them, and no user info in the URL beside it")
        return self


class WorkerSettings(KeySettings):
    """A worker. Only the URL is needed: the rest is asked of the worker, and what is given here wins.

    User info in the URL is taken as its API key.
    """

    url: HttpUrl
    name: Annotated[str, Field(pattern=WORKER_NAME.pattern)] | None = None
    model: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)] | None = None
    block_size: BlockSize | None = None
    streams: list[StreamSettings] | None = None
    weight: PositiveFloat = 1.0
    role: Role | None = None
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _user_info_is_the_key(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            return given
        url, key = split_user_info(given["url"])
        if key is None:
            return given
        if given.get("api_key") is not None:
            raise ValueError("api_key: the URL has user info, which is a key too. Give one of them")
        return given | {"url": url, "api_key": key}


class WhenLate(StrEnum):
    """What becomes of a request that cannot keep its promise anywhere."""

    SERVE = "serve"
    REFUSE = "refuse"


class ServiceLevelSettings(_Section):
    """A class of requests, and what they are promised: seconds to the first token, and for each one after it."""

    ttft: PositiveFloat | None = None
    tpot: PositiveFloat | None = None
    when_late: WhenLate = WhenLate.SERVE


class ModelSettings(_Section):
    """What the router cannot ask a worker about a model. `tokenizer` is a folder or a name on the Hugging Face Hub.

    `aliases`: other names under which clients may ask for it. `service_level`: the class of requests that name none.
    """

    tokenizer: str | None = None
    service_level: str | None = None
    aliases: list[Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]] = []


class PolicySettings(_Section):
    """The weights of the cost of sending a prompt to a worker, all in prefill tokens."""

    name: PolicyName = PolicyName.KV_AWARE
    interference: NonNegative = 1.0
    interference_per_request: NonNegative = 0.06
    eviction: NonNegative = 10.0
    context: NonNegative = 0.05
    cpu_token: NonNegative = 0.1
    disk_token: NonNegative = 0.5
    broken_promise: NonNegative = 40_000.0
    near: NonNegative = 0.0


class RateSettings(_Section):
    """What the rates of workers are taken to be until they are learned, in seconds."""

    step: PositiveFloat = 0.01
    token: PositiveFloat = 4e-5
    attention: PositiveFloat = 1e-9
    context_token: PositiveFloat = 3e-8


class IndexSettings(_Section):
    """The prefix index."""

    secret: str = ""
    orphan_blocks: PositiveInt = 65_536
    snapshot: Path | None = None
    snapshot_interval: PositiveFloat = 60.0
    peer: HttpUrl | None = None


class EventSettings(_Section):
    """The reading of event streams. Times in seconds."""

    replay_timeout: PositiveFloat = 1.0
    replay_rounds: PositiveInt = 3
    idle_check: PositiveFloat = 30.0
    pending_batches: PositiveInt = 20_000
    catch_up_timeout: NonNegative = 5.0
    curve_secret_key_file: KeyPairFile | None = None


class FleetSettings(KeySettings):
    """How workers are watched, and when they are left out. Times in seconds."""

    probe_interval: PositiveFloat = 5.0
    retry_interval: PositiveFloat = 1.0
    probe_timeout: PositiveFloat = 5.0
    failed_probes: PositiveInt = 3
    metrics_interval: PositiveFloat = 1.0
    failures: PositiveInt = 3
    backoff: PositiveFloat = 1.0
    longest_backoff: PositiveFloat = 30.0
    stall_seconds: PositiveFloat = 1.0
    stall_factor: Annotated[float, Field(ge=1)] = 3.0
    outlier_factor: Annotated[float, Field(gt=1)] = 5.0
    max_ejected: Annotated[float, Field(ge=0, lt=1)] = 0.3
    slow_start: NonNegative = 10.0
    max_models: PositiveInt = 1000
    max_ranks: PositiveInt = 128
    max_answer_bytes: PositiveInt = 4 * 2**20
    allowed_networks: list[Annotated[str, AfterValidator(_network)]] = [
        "127.0.0.0/8",
        "::1/128",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "fc00::/7",
    ]


class KubernetesSettings(_Section):
    """Workers from the cluster that the router runs in: those of a service, or the pods of a label selector."""

    service: str = ""
    selector: str = ""
    namespace: str = ""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    resync: PositiveFloat = 300.0

    @property
    def used(self) -> bool:
        """Whether anything is looked for."""
        return bool(self.service or self.selector)


class EngineFields(StrEnum):
    """What becomes of a client's fields and headers that steer an engine.

    AUTO: those of tenants are refused, those of others stripped.
    """

    AUTO = "auto"
    REFUSE = "refuse"
    STRIP = "strip"
    PASS = "pass"


class WorkerKeys(StrEnum):
    """Whether requests of clients get the worker's API key. Those of tenants and of the operator do.

    AUTO: where they have no `Authorization`, and the router listens on loopback alone. ALWAYS: whoever sends them, and
    in place of what they have.
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class ProxySettings(_Section):
    """How requests reach workers. Times in seconds."""

    connect_timeout: PositiveFloat = 3.0
    idle_timeout: PositiveFloat = 600.0
    client_timeout: PositiveFloat = 60.0
    attempts: PositiveInt = 3
    retry_share: NonNegative = 0.2
    retry_minimum: Annotated[int, Field(ge=0)] = 10
    stream_failovers: Annotated[int, Field(ge=0)] = 0
    speculation_seconds: NonNegative = 2.0
    ask_usage: bool = False
    worker_keys: WorkerKeys = WorkerKeys.AUTO
    engine_fields: EngineFields = EngineFields.AUTO
    more_routes: list[Annotated[str, Field(pattern=r"^(GET|POST|PUT|PATCH|DELETE) /[!-~]*$")]] = []


class PickerSettings(_Section):
    """How Envoy is told where requests go: `kvrouter picker`."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9002
    certificate: Path | None = None
    key: Path | None = None
    fallbacks: Annotated[int, Field(ge=0)] = 0
    read_usage: Annotated[float, Field(ge=0, le=1)] = 0.1
    objectives: dict[str, int] = {}
    follow_objectives: Literal["inference.networking.x-k8s.io", "llm-d.ai"] | None = None

    @model_validator(mode="after")
    def _certificate_and_key(self) -> PickerSettings:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: give both, or neither")
        return self


class AdmissionSettings(_Section):
    """When requests wait in the router, and how many may. Times in seconds."""

    requests: PositiveInt | None = None
    tokens: PositiveInt | None = None
    late_binding: bool = True
    queue: Annotated[int, Field(ge=0)] = 1000
    queue_bytes: PositiveInt = 256 * 2**20
    timeout: PositiveFloat = 30.0
    cold_start_timeout: NonNegative = 0.0


class TenantSettings(_Section):
    """A tenant: its API keys, hashed by `kvrouter hash-key`, and what they open. None: no limit."""

    keys: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = Field(min_length=1)
    models: list[str] | None = None
    requests_per_second: PositiveFloat | None = None
    tokens_per_minute: PositiveFloat | None = None
    priority: int = 0
    service_level: str | None = None


class TenantsSettings(_Section):
    """Who may send requests."""

    isolate: bool = False
    salted_messages: bool = False
    named: dict[str, TenantSettings] = {}

    @field_validator("named")
    @classmethod
    def _keys_are_ones_own(cls, named: dict[str, TenantSettings]) -> dict[str, TenantSettings]:
        keys = [key for tenant in named.values() for key in tenant.keys]
        if len(set(keys)) < len(keys):
            raise ValueError("a key stands there twice: every tenant needs its own")
        return named


class ReplicasSettings(_Section):
    """Where routers tell each other what they have in flight. Times in seconds."""

    redis: str = ""
    prefix: Annotated[str, Field(min_length=1)] = "kvrouter"
    interval: PositiveFloat = 0.005
    expiry: PositiveFloat = 3.0

    @field_validator("redis")
    @classmethod
    def _usable(cls, redis: str) -> str:
        if redis and not redis.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("expected redis://host:6379/0, rediss:// for TLS, or unix:///path/to/socket")
        if redis and not find_spec("redis"):
            raise ValueError("sharing over Redis wants one more package: pip install 'kvrouter[redis]'")
        if redis:
            from redis.asyncio import ConnectionPool

            ConnectionPool.from_url(redis)  # raises ValueError for a port or an option that is none
        return redis


class UpstreamSettings(_Section):
    """TLS to workers whose URL is https."""

    ca: Path | None = None
    verify: bool = True
    certificate: Path | None = None
    key: Path | None = None


class AuditSettings(_Section):
    """When predictions count as wrong."""

    samples: PositiveInt = 32
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.1


class LogSettings(_Section):
    """What is logged beside what goes wrong."""

    access: bool = False


class OtelSettings(_Section):
    """Where traces go."""

    endpoint: AnyHttpUrl | None = None

    @field_validator("endpoint")
    @classmethod
    def _installed(cls, endpoint: AnyHttpUrl | None) -> AnyHttpUrl | None:
        if endpoint is not None and not find_spec("opentelemetry.exporter"):
            raise ValueError("tracing wants more packages: pip install 'kvrouter[otel]'")
        return endpoint


class TokenizerSettings(_Section):
    """How prompts are turned into token ids. Times in seconds."""

    threads: PositiveInt = 2
    timeout: PositiveFloat = 5.0
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    hub_timeout: Annotated[float, Field(ge=0)] = 10.0
    check_interval: PositiveFloat = 60.0
    media_timeout: Annotated[float, Field(ge=0)] = 1.0


class Settings(BaseSettings):
    """All settings of `kvrouter serve`."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    workers: list[WorkerSettings] = []
    models: dict[str, ModelSettings] = {}
    policy: PolicySettings = PolicySettings()
    rates: RateSettings = RateSettings()
    service_levels: dict[Annotated[str, Field(pattern=SERVICE_LEVEL_NAME)], ServiceLevelSettings] = {}
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    index: IndexSettings = IndexSettings()
    events: EventSettings = EventSettings()
    fleet: FleetSettings = FleetSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    proxy: ProxySettings = ProxySettings()
    picker: PickerSettings = PickerSettings()
    admission: AdmissionSettings = AdmissionSettings()
    replicas: ReplicasSettings = ReplicasSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    tenants: TenantsSettings = TenantsSettings()
    audit: AuditSettings = AuditSettings()
    logs: LogSettings = LogSettings()
    otel: OtelSettings = OtelSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()

    _without_effect: tuple[str, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _drop_without_effect(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        found, given = _split_without_effect(given)
        settings = handler(given)
        settings._without_effect = found
        return settings

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Names of the settings that were given and have no effect: each can be removed."""
        return self._without_effect

    @field_validator("models")
    @classmethod
    def _aliases_are_ones_own(cls, models: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
        names = [*models, *(alias for model in models.values() for alias in model.aliases)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))}: an alias stands for one model, and is no model's name")
        return models

    @property
    def aliases(self) -> dict[str, str]:
        """The models behind the aliases."""
        return {alias: name for name, model in self.models.items() for alias in model.aliases}

    @field_validator("workers")
    @classmethod
    def _names_are_ones_own(cls, workers: list[WorkerSettings]) -> list[WorkerSettings]:
        places: dict[str, int] = {}
        for place, worker in enumerate(workers):
            if worker.name is not None and (first := places.setdefault(worker.name, place)) != place:
                raise ValueError(f"workers.{place}.name: {worker.name!r} is the name of workers.{first} already")
        return workers

    @field_validator("service_levels")
    @classmethod
    def _service_levels_slo(cls, levels: dict[str, ServiceLevelSettings]) -> dict[str, ServiceLevelSettings]:
        for name, level in levels.items():
            if level.ttft is None and level.tpot is None:
                raise ValueError(f"{name}: promises nothing. Give ttft, tpot or both, in seconds")
        return levels

    @model_validator(mode="after")
    def _service_levels_are_known(self) -> Settings:
        named = [(f"models.{name}", each.service_level) for name, each in self.models.items()]
        named += [(f"tenants.named.{name}", each.service_level) for name, each in self.tenants.named.items()]
        for place, level in named:
            if level is not None and level not in self.service_levels:
                raise ValueError(f"{place}.service_level: there is no {level!r} among service_levels")
        return self

    @model_validator(mode="after")
    def _tenants_need_a_token(self) -> Settings:
        if self.tenants.named and not self.server.token:
            raise ValueError("tenants: set server.token too, or else anyone may ask what tenants hold")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what is given: `load_settings` reads the rest."""
        return (init_settings,)


def load_settings(path: Path | None, overrides: dict[str, Any] | None = None) -> Settings:
    """Read a YAML file (None: the defaults). The environment overrides the file, and `overrides`, in the file's shape,
    override both.

    Raises ConfigError, with a line for each mistake.
    """
    fields: dict[str, Any] = {}
    settings = Settings()
    for source, given in (
        (path, _read_file(path) if path else {}),
        ("environment", _read_environment()),
        ("options", overrides or {}),
    ):
        fields = _merged(fields, given)
        try:
            settings = Settings(**fields)
        except ValidationError as error:
            # What sections want of each other may come from a later source.
            found = mistakes(error, Settings, _HIDDEN, between_sections=source == "options")
            if not found:
                continue
            raise ConfigError("\n".join(f"{source}: {mistake}" for mistake in found)) from error
    return settings


def shown(settings: Settings) -> dict[str, Any]:
    """All settings as a file would have them, to be shown: what is secret is masked."""
    masked: dict[str, Any] = _masked(settings.model_dump(mode="json"), "")
    return masked


def _masked(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {name: _masked(each, f"{place}.{name}" if place else str(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_masked(each, place) for each in value]
    if not isinstance(value, str):
        return value
    secret = place in _HIDDEN or place.rpartition(".")[2] in _SECRETS
    return "***" if secret and value else without_user_info(value)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ConfigError(f"{path}: expected sections such as server: and workers:")
    return fields


def _read_environment() -> dict[str, Any]:
    for variable in os.environ:  # a section's name alone may be a service's, which Kubernetes tells by such variables
        section, nested, _ = variable.removeprefix(_PREFIX).lower().partition("__")
        if variable.startswith(_PREFIX) and nested and section not in Settings.model_fields:
            near = get_close_matches(section, Settings.model_fields, 1)
            meant = f"; did you mean {_PREFIX}{near[0].upper()}__…?" if near else ""
            raise ConfigError(f"environment: {variable}: there is no such setting{meant}")
    try:
        return EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from error


def _split_without_effect(given: Any) -> tuple[tuple[str, ...], Any]:
    """Return the names of given settings that have no effect, and the settings without them."""
    found = []
    kept = dict(given)
    for setting in WITHOUT_EFFECT:
        section, _, name = setting.partition(".")
        fields = kept.get(section)
        if isinstance(fields, dict) and name in fields:
            found.append(setting)
            kept[section] = {other: value for other, value in fields.items() if other != name}
    return tuple(found), kept


def _merged(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in overrides.items():
        known = merged.get(name)
        merged[name] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
