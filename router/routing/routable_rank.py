"""One rank of a worker as what a request can be sent to, and what it serves."""

from __future__ import annotations

from indexer import Target
from router.cache_state.in_flight_prefixes import chunk_root
from router.fleet.worker import Worker
from router.load.target_load import TargetLoad


class ServedModel:
    """What workers serve under the name a request uses: one object for all of them. `root`: the hash before the first
    chunk of its prompts, but for those with a salt.

    `replacement`: where an adapter's weights come from that took the name of another while the worker ran. The worker
    uses no block of the other (vLLM hashes an adapter's name and path), but its events do not tell them apart: so what
    it holds for this one is what was sent there.
    """

    def __init__(self, model: str, adapter: str | None, replacement: str | None = None) -> None:
        self.model = model
        self.adapter = adapter
        self.replacement = replacement
        self.root = self.root_of(None)

    def root_of(self, salt: str | None) -> int:
        """The hash before the first chunk of its prompts with a salt."""
        name = self.adapter if self.replacement is None else f"{self.adapter}\0{self.replacement}"
        return chunk_root(self.model, name, salt)


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
