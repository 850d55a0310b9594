"""Which publisher a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from worker.publisher import EventPublisher, NullEventPublisher, PublisherConfig
from worker.zmq_publisher import ZmqEventPublisher


class EventPublisherFactory:
    """Makes the publisher that a configuration names."""

    _constructors: ClassVar[dict[str, Callable[..., EventPublisher]]] = {"zmq": ZmqEventPublisher}

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Make `name` selectable. `ctor` gets `attn_dp_rank` and the configuration's other fields as keywords.

        Raises KeyError when the name is taken.
        """
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
        """The publisher for a rank, given the configuration as JSON; no configuration publishes nothing.

        Ranks that share a DP rank hold the same blocks: only the first of them publishes. Raises ValueError, naming
        the field, for a configuration that cannot be used.
        """
        if not config:
            return NullEventPublisher(attn_dp_rank)
        fields: dict[str, Any] = msgspec.structs.asdict(PublisherConfig.from_json(config))
        name = fields.pop("publisher")
        if name != "null" and name not in cls._constructors:
            known = ", ".join(["null", *cls._constructors])
            raise ValueError(f"KV events configuration: unknown publisher {name!r}; known: {known}")
        if name == "null" or attn_tp_rank or attn_cp_rank or pp_rank:
            return NullEventPublisher(attn_dp_rank)
        return cls._constructors[name](attn_dp_rank=attn_dp_rank, **fields)
