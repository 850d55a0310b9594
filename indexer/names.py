"""What workers are called where people look. Inside they are known by their URLs, which say where they are."""

from __future__ import annotations

from indexer.holdings import Target


class WorkerNames:
    """The names of workers that have other ones than what they are known by. `changes`: how many there were."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self.changes = 0

    def of(self, worker: str) -> str:
        """A worker's name: what it is known by, where it has no other."""
        return self._names.get(worker, worker)

    def about(self, target: Target) -> dict[str, str | int]:
        """Which target is meant, for a line of the log."""
        return {"worker": self.of(target.worker), "dp_rank": target.dp_rank, "model": target.model}

    def set(self, worker: str, name: str) -> None:
        """Call a worker so."""
        self._names[worker] = name
        self.changes += 1

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        self._names.pop(worker, None)
        self.changes += 1
