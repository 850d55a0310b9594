"""Settings of sources outside a worker: shared pools, from which workers load blocks, and pulls from peers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from indexer.pools.blocks import MOST_PARTS
from kvevents.events import canonical_medium, is_pooled
from router.settings.fields import WORKER_NAME, Endpoint, HttpUrl, ModelName, NonNegative, Port, Section


class PoolType(StrEnum):
    """The source of a pool's content: the master of a Mooncake Store, or events of the workers."""

    MOONCAKE = "mooncake"
    EVENTS = "events"


class PullProtocol(StrEnum):
    """The form in which a request names its peer: P2P is vLLM's tier `p2p`, SIDECAR is llm-d's routing sidecar."""

    P2P = "p2p"
    SIDECAR = "sidecar"


class PullSettings(Section):
    """Pulls of prefixes from the host tiers of other workers.

    - `port`: the base port of each worker's tier `p2p`. Its DP ranks have the ports after it.
    """

    protocol: PullProtocol | None = None
    port: Port = 5710


class PoolSettings(Section):
    """A shared pool, and the workers that load from it."""

    name: Annotated[str, Field(pattern=WORKER_NAME.pattern)]
    type: PoolType
    master: HttpUrl | None = None
    events: Endpoint | None = None
    workers: list[HttpUrl] = []
    models: dict[ModelName, str] = {}
    media: list[str] = []
    price: NonNegative | None = None
    objects: Annotated[int, Field(ge=1, le=MOST_PARTS)] = 1
    memory: PositiveInt = 256 * 2**20
    most_keys: PositiveInt = 100_000
    interval: PositiveFloat = 1.0

    @property
    def reported_media(self) -> frozenset[str]:
        """The media of workers' events that report the pool's blocks, in their usual spelling."""
        return frozenset(str(canonical_medium(medium)) for medium in self.media)

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.type is PoolType.MOONCAKE:
            if self.master is None or self.events is None:
                raise ValueError("a pool of type mooncake needs master (its HTTP address) and events (its stream)")
            if self.media:
                raise ValueError("media: the master reports the blocks of a Mooncake Store. Remove media")
        elif not self.media:
            raise ValueError("a pool of type events needs media: the names in the workers' events, e.g. STORAGE")
        elif self.master is not None or self.events is not None:
            raise ValueError("master and events: only a pool of type mooncake has them")
        if unusable := self.reported_media & {"GPU", "cpu", "disk"}:
            raise ValueError(f"media: {', '.join(sorted(unusable))} is no medium whose removals workers report")
        own = [medium for medium in sorted(self.reported_media) if not is_pooled(medium)]
        if own and not self.workers:
            raise ValueError(
                f"media: {', '.join(own)} may be a worker's own. List the workers that share it in workers"
            )
        return self
