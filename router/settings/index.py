"""Settings of what the router knows: the prefix index, event streams, tokenizers, load of other routers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from router.settings.fields import HttpUrl, KeyPairFile, NonNegative, Section


class IndexSettings(Section):
    """The prefix index."""

    secret: str = ""
    orphan_blocks: PositiveInt = 65_536
    snapshot: Path | None = None
    snapshot_interval: PositiveFloat = 60.0
    peer: HttpUrl | None = None


class EventSettings(Section):
    """The readers of event streams. Times are in seconds."""

    replay_timeout: PositiveFloat = 1.0
    replay_rounds: PositiveInt = 3
    idle_check: PositiveFloat = 30.0
    pending_batches: PositiveInt = 20_000
    catch_up_timeout: NonNegative = 5.0
    curve_secret_key_file: KeyPairFile | None = None


class ReplicasSettings(Section):
    """Load sharing between routers over Redis. Times are in seconds."""

    redis: str = ""
    prefix: Annotated[str, Field(min_length=1)] = "kvrouter"
    interval: PositiveFloat = 0.005
    expiry: PositiveFloat = 3.0

    @field_validator("redis")
    @classmethod
    def _is_usable(cls, redis: str) -> str:
        if redis and not redis.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("expected redis://host:6379/0, rediss:// for TLS, or unix:///path/to/socket")
        if redis and not find_spec("redis"):
            raise ValueError("load sharing over Redis needs one more package: pip install 'kvrouter[redis]'")
        if redis:
            from redis.asyncio import ConnectionPool

            ConnectionPool.from_url(redis)  # Raises ValueError for a bad port or an unknown option.
        return redis


class AuditSettings(Section):
    """When predictions of cached tokens count as wrong."""

    samples: PositiveInt = 32
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.1


class TokenizerSettings(Section):
    """The conversion of prompts to token ids. Times are in seconds."""

    threads: PositiveInt = 2
    timeout: PositiveFloat = 5.0
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    hub_timeout: Annotated[float, Field(ge=0)] = 10.0
    check_interval: PositiveFloat = 60.0
    media_timeout: Annotated[float, Field(ge=0)] = 1.0
