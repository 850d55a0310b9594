"""Settings of the workers and their discovery, and of what the router knows of them: index, tokenizers, load."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from kvevents.batches import HIGHEST_RANK
from kvevents.endpoints import parse_endpoint
from kvevents.sources import LONGEST_TOPIC
from router.http.worker_url import split_user_info
from router.settings.fields import (
    PULL_HOST,
    WORKER_NAME,
    ApiKey,
    ApiKeyFile,
    ApiKeyVariable,
    BlockSize,
    Endpoint,
    HttpUrl,
    KeyFolder,
    KeyPairFile,
    ModelName,
    Network,
    NonNegative,
    Port,
    PublicKeyFile,
    Section,
)

# Labels as in Kubernetes: a name may have a prefix, and a value may be empty.
Labels = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=317)], Annotated[str, Field(max_length=253)]],
    Field(max_length=256),
]


class StreamSettings(Section):
    """The event stream of one DP rank of a worker."""

    dp_rank: Annotated[int, Field(ge=0, le=HIGHEST_RANK)] = 0
    endpoint: Endpoint
    replay_endpoint: Endpoint | None = None
    topic: Annotated[str, Field(max_length=LONGEST_TOPIC)] = ""
    curve_server_key_file: PublicKeyFile | None = None


class Role(StrEnum):
    """The part of a request that a worker computes. ENCODE: only the encoding of images, audio and video."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


class KeySettings(Section):
    """The API key of workers: text, file or environment variable; a Bearer token unless it has a scheme: `Basic …`."""

    api_key: ApiKey | None = None
    api_key_file: ApiKeyFile | None = None
    api_key_env: ApiKeyVariable | None = None

    @property
    def has_key(self) -> bool:
        """True if any of the fields is set, also if the key is empty."""
        return self.api_key is not None or self.api_key_file is not None or self.api_key_env is not None

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        given = [name for name in KeySettings.model_fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: set one of them, and no user info in the URL beside it")
        return self


class WorkerSettings(KeySettings):
    """A worker. It reports all but its URL, and settings override its report. User info in the URL is the API key."""

    url: HttpUrl
    name: Annotated[str, Field(pattern=WORKER_NAME.pattern)] | None = None
    model: ModelName | None = None
    block_size: BlockSize | None = None
    streams: list[StreamSettings] | None = None
    weight: PositiveFloat = 1.0
    labels: Labels = {}
    role: Role | None = None
    bootstrap_port: Port | None = None
    pull_host: Annotated[str, Field(pattern=PULL_HOST.pattern)] | None = None
    pull_port: Port | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_user_info(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            return given
        url, key = split_user_info(given["url"])
        if key is None:
            return given
        if given.get("api_key") is not None:
            raise ValueError("api_key: the user info in the URL is a key too. Set one of them")
        return given | {"url": url, "api_key": key}


class FleetSettings(KeySettings):
    """Probes, metrics and ejection of workers. Times are in seconds."""

    probe_interval: PositiveFloat = 5.0
    probe_timeout: PositiveFloat = 5.0
    metrics_interval: PositiveFloat = 1.0
    failures: PositiveInt = 3
    stall_seconds: PositiveFloat = 1.0
    slow_start: NonNegative = 10.0
    allowed_networks: list[Network] = [
        "127.0.0.0/8",
        "::1/128",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "fc00::/7",
    ]

    @property
    def retry_interval(self) -> float:
        """The time between two probes of a worker that does not answer."""
        return min(self.probe_interval, 1.0)


class KubernetesSettings(Section):
    """Workers of the Kubernetes cluster in which the router runs: those of a service, or the pods of a selector."""

    service: str = ""
    selector: str = ""
    namespace: str = ""
    port: Port = 8000

    @property
    def used(self) -> bool:
        """True if a service or a selector is set."""
        return bool(self.service or self.selector)


class IndexSettings(Section):
    """The prefix index."""

    secret: str = ""
    snapshot: Path | None = None
    peer: HttpUrl | None = None


class EventSettings(Section):
    """The readers of event streams. Times are in seconds."""

    curve_secret_key_file: KeyPairFile | None = None
    bind: list[Endpoint] = []
    publisher_keys: KeyFolder | None = None

    @field_validator("bind")
    @classmethod
    def _can_be_bound(cls, endpoints: list[str]) -> list[str]:
        for text in endpoints:
            endpoint = parse_endpoint(text)
            if endpoint.scheme != "tcp" or not endpoint.port:
                raise ValueError(f"{text}: expected an address of this machine and a port, such as tcp://10.0.0.5:5557")
        return endpoints

    @model_validator(mode="after")
    def _keys_need_encryption(self) -> Self:
        if self.publisher_keys is not None and self.curve_secret_key_file is None:
            raise ValueError("publisher_keys: set curve_secret_key_file too, by which streams are encrypted")
        return self


class ReplicasSettings(Section):
    """Load sharing between routers over Redis. Times are in seconds."""

    redis: str = ""
    prefix: Annotated[str, Field(min_length=1)] = "kvrouter"

    @field_validator("redis")
    @classmethod
    def _is_usable(cls, redis: str) -> str:
        if redis and not redis.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("expected redis://host:6379/0, rediss:// for TLS, or unix:///path/to/socket")
        if redis and not find_spec("redis"):
            raise ValueError("load sharing over Redis needs one more package: pip install 'kvrouter[redis]'")
        if redis:
            from redis.asyncio import ConnectionPool

            try:
                ConnectionPool.from_url(redis)
            except ValueError as error:
                raise ValueError("a port that is no number, or an option that Redis clients do not know") from error
        return redis


class TokenizerSettings(Section):
    """The conversion of prompts to token ids. Times are in seconds."""

    threads: PositiveInt = 2
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
