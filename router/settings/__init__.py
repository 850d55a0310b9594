"""Every setting, with its default and its checks."""

from __future__ import annotations

from router.settings.fields import LONGEST_NAME, PULL_HOST, WORKER_NAME
from router.settings.fleet import (
    AuditSettings,
    EventSettings,
    FleetSettings,
    KeySettings,
    KubernetesSettings,
    ReplicasSettings,
    Role,
    StreamSettings,
    TokenizerSettings,
    WorkerSettings,
)
from router.settings.load import ConfigError, SettingsFile, load_settings, shown
from router.settings.pools import PoolSettings, PoolType, PullProtocol, PullSettings
from router.settings.routing import (
    Backend,
    DisaggregationSettings,
    EncodingSettings,
    ModelSettings,
    PolicyName,
    PolicySettings,
    ServiceLevelSettings,
    WhenLate,
)
from router.settings.server import (
    AdmissionSettings,
    BillingLine,
    EngineFields,
    ForwardTokens,
    LimitSettings,
    PickerSettings,
    ProxySettings,
    ServerSettings,
    TenantSettings,
    TenantsSettings,
    UpstreamSettings,
    WorkerKeys,
)
from router.settings.settings import Settings

__all__ = [
    "LONGEST_NAME",
    "PULL_HOST",
    "WORKER_NAME",
    "AdmissionSettings",
    "AuditSettings",
    "Backend",
    "BillingLine",
    "ConfigError",
    "DisaggregationSettings",
    "EncodingSettings",
    "EngineFields",
    "EventSettings",
    "FleetSettings",
    "ForwardTokens",
    "KeySettings",
    "KubernetesSettings",
    "LimitSettings",
    "ModelSettings",
    "PickerSettings",
    "PolicyName",
    "PolicySettings",
    "PoolSettings",
    "PoolType",
    "ProxySettings",
    "PullProtocol",
    "PullSettings",
    "ReplicasSettings",
    "Role",
    "ServerSettings",
    "ServiceLevelSettings",
    "Settings",
    "SettingsFile",
    "StreamSettings",
    "TenantSettings",
    "TenantsSettings",
    "TokenizerSettings",
    "UpstreamSettings",
    "WhenLate",
    "WorkerKeys",
    "WorkerSettings",
    "load_settings",
    "shown",
]
