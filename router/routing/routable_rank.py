"""One rank of a worker as what a request can be sent to, and what it serves."""

from __future__ import annotations

from indexer import Target
from router.fleet.load import TargetLoad
from router.fleet.worker import Worker
from router.holdings.speculation import chunk_root


class ServedModel:
    """What workers serve under the name a request uses: one object for all of them. `root`: the hash before the first
    chunk of its prompts, but for those with a salt."""

    def __init__(self, model: str, adapter: str | None) -> None:
        self.model = model
        self.adapter = adapter
        self.root = chunk_root(model, adapter, None)


class RoutableRank:
    """One of a worker's ranks as the target for what it serves under a name.

    `one_of_many`: its worker has others. `weight`: that of its worker. `row`: its place among the targets of the name.
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
