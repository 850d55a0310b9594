"""The factory of publishers: from a configuration to a publisher."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from worker.publisher import EventPublisher, NullEventPublisher, PublisherConfig
from worker.zmq_publisher import ZmqEventPublisher


class EventPublisherFactory:
    """A factory of publishers by the name in their configuration."""

    _constructors: ClassVar[dict[str, Callable[..., EventPublisher]]] = {"zmq": ZmqEventPublisher}

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Register a constructor, which receives `attn_dp_rank` and the other configured fields. Raises KeyError."""
        if name == "null" or name in cls._constructors:
            raise KeyError(f"publisher {name!r} is already registered")
        cls._constructors[name] = ctor

    @classmethod
    def create(
        cls,
        config: str | None,
        attn_dp_rank: int = 0,
        attn_tp_rank: int = 0,
        attn_cp_rank: int = 0,
        pp_rank: int = 0,
    ) -> EventPublisher:
        """Create the publisher of a rank from its JSON configuration. Without a configuration it publishes nothing.

        Ranks that share a DP rank hold the same blocks, so only the first of them publishes. Raises ValueError, which
        names the field, for an invalid configuration.
        """
        if not config:
            return NullEventPublisher(attn_dp_rank)
        given = PublisherConfig.from_json(config)
        name = given.publisher
        if name != "null" and name not in cls._constructors:
            known = ", ".join(["null", *cls._constructors])
            raise ValueError(f"KV events configuration: unknown publisher {name!r}; known: {known}")
        if name == "null" or attn_tp_rank or attn_cp_rank or pp_rank:
            return NullEventPublisher(attn_dp_rank)
        return cls._constructors[name](attn_dp_rank=attn_dp_rank, **given.fields())
