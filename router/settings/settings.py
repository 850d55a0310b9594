"""All settings of `kvrouter serve` in one class, and the checks between sections.

`config.yaml` at the root of the project lists every setting with its default and its purpose.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvevents.endpoints import parse_endpoint
from router.settings.fields import SERVICE_LEVEL_NAME
from router.settings.fleet import (
    EventSettings,
    FleetSettings,
    IndexSettings,
    KubernetesSettings,
    ReplicasSettings,
    TokenizerSettings,
    WorkerSettings,
)
from router.settings.pools import PoolSettings, PullSettings
from router.settings.routing import (
    DisaggregationSettings,
    EncodingSettings,
    ModelSettings,
    PolicySettings,
    ServiceLevelSettings,
)
from router.settings.server import (
    AdmissionSettings,
    HookSettings,
    LimitSettings,
    LogSettings,
    OtelSettings,
    PickerSettings,
    ProxySettings,
    ServerSettings,
    TenantsSettings,
    UpstreamSettings,
)

# The beginning of the environment variables that override settings: `KVROUTER_SERVER__PORT=9000`.
PREFIX = "KVROUTER_"


class Settings(BaseSettings):
    """All settings of `kvrouter serve`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    workers: list[WorkerSettings] = []
    pools: list[PoolSettings] = []
    pulls: PullSettings = PullSettings()
    models: dict[str, ModelSettings] = {}
    policy: PolicySettings = PolicySettings()
    service_levels: dict[Annotated[str, Field(pattern=SERVICE_LEVEL_NAME)], ServiceLevelSettings] = {}
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    encoding: EncodingSettings = EncodingSettings()
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
    hooks: HookSettings = HookSettings()
    logs: LogSettings = LogSettings()
    otel: OtelSettings = OtelSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()

    @property
    def aliases(self) -> dict[str, str]:
        """The model behind each alias."""
        return {alias: name for name, model in self.models.items() for alias in model.aliases}

    @field_validator("models")
    @classmethod
    def _aliases_are_unique(cls, models: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
        names = [*models, *(alias for model in models.values() for alias in model.aliases)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))}: an alias names one model, and differs from every model name")
        return models

    @field_validator("workers")
    @classmethod
    def _names_are_unique(cls, workers: list[WorkerSettings]) -> list[WorkerSettings]:
        places: dict[str, int] = {}
        for place, worker in enumerate(workers):
            if worker.name is not None and (first := places.setdefault(worker.name, place)) != place:
                raise ValueError(f"workers.{place}.name: {worker.name!r} is already the name of workers.{first}")
        return workers

    @field_validator("pools")
    @classmethod
    def _pool_names_are_unique(cls, pools: list[PoolSettings]) -> list[PoolSettings]:
        names = [pool.name for pool in pools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))}: each pool needs its own name")
        return pools

    @field_validator("service_levels")
    @classmethod
    def _service_levels_have_slos(cls, levels: dict[str, ServiceLevelSettings]) -> dict[str, ServiceLevelSettings]:
        for name, level in levels.items():
            if level.ttft is None and level.tpot is None:
                raise ValueError(f"{name}: no SLO. Set ttft, tpot or both, in seconds")
        return levels

    @model_validator(mode="after")
    def _service_levels_are_known(self) -> Settings:
        named = [(f"models.{name}", each.service_level) for name, each in self.models.items()]
        named += [(f"tenants.named.{name}", each.service_level) for name, each in self.tenants.named.items()]
        for place, level in named:
            if level is not None and level not in self.service_levels:
                raise ValueError(f"{place}.service_level: {level!r} is not defined in service_levels")
        return self

    @model_validator(mode="after")
    def _tenants_need_a_token(self) -> Settings:
        if self.tenants.named and not self.server.token:
            raise ValueError("tenants: set server.token too. Without it, any client can query what tenants have cached")
        if self.hooks.checks_keys and not self.server.token:
            setting = "jwt" if self.hooks.jwt is not None else "key_url"
            raise ValueError(f"hooks.{setting}: set server.token too. Other routes than those of inference require it")
        return self

    @model_validator(mode="after")
    def _tenants_have_keys(self) -> Settings:
        if self.hooks.before or self.hooks.checks_keys:
            return self
        for name, tenant in self.tenants.named.items():
            if not tenant.keys:
                raise ValueError(f"tenants.named.{name}.keys: add a key. Only hooks can choose a tenant without keys")
        return self

    @model_validator(mode="after")
    def _publishers_may_connect(self) -> Settings:
        encrypted = self.events.curve_secret_key_file is not None
        for endpoint in self.events.bind:
            if parse_endpoint(endpoint).is_wildcard and not (self.server.token or encrypted):
                raise ValueError(
                    f"events.bind: publishers on all networks could connect to {endpoint}. Set server.token or "
                    "events.curve_secret_key_file, or bind one address"
                )
        if self.events.bind and self.server.processes > 1:
            raise ValueError("events.bind: only one process can be bound to an address. Set server.processes to 1")
        return self

    @model_validator(mode="after")
    def _pulls_name_one_worker(self) -> Settings:
        if self.pulls.protocol is not None and self.picker.fallbacks:
            raise ValueError("picker.fallbacks: with pulls, a request names the peer of one worker. Set it to 0")
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
        """Return the one source: the given values. `load_settings` reads the environment."""
        return (init_settings,)
