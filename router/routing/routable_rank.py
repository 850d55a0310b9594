"""A DP rank of a worker as a target of requests, and the model that it serves."""

from __future__ import annotations

from indexer import Target
from router.cache_state.in_flight_prefixes import chunk_root
from router.fleet.worker import Worker
from router.load.target_load import TargetLoad


class ServedModel:
    """A model or adapter behind a name: one object for all workers that serve it.

    - `root`: the hash before the first chunk of prompts without a cache salt.
    - `replacement`: the path of an adapter that replaced another of its name while the worker ran. Its events do not
      distinguish the two, so its holdings are predicted from the prompts that were sent.
    """

    def __init__(self, model: str, adapter: str | None, replacement: str | None = None) -> None:
        self.model = model
        self.adapter = adapter
        self.replacement = replacement
        self.root = self.root_of(None)

    def root_of(self, salt: str | None) -> int:
        """Return the hash before the first chunk of prompts with a cache salt."""
        name = self.adapter if self.replacement is None else f"{self.adapter}\0{self.replacement}"
        return chunk_root(self.model, name, salt)


class RoutableRank:
    """A DP rank of a worker, as the target of requests for one name.

    - `one_of_many`: whether its worker has other ranks.
    - `weight`: the weight of its worker.
    - `row`: its position among the targets of the name.
    """

    def __init__(
        self, worker: Worker, served: ServedModel, target: Target, load: TargetLoad, one_of_many: bool
    ) -> None:
        self.worker = worker
        self.served = served
        self.target = target
        self.load = load
        self.one_of_many = one_of_many
        self.weight = worker.settings.weight
        self.row = 0
