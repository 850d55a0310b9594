"""The mean load of the workers of each model and role, which shows the role that is short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from router.fleet.worker import Worker
from router.load.target_load import LoadTable
from router.settings import Role


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The load of the usable workers of a role that serve a model.

    - `prefill_seconds`: the mean predicted seconds until the prefills of a rank are done.
    - `kv_usage`: the mean share of KV memory in use; None if no engine reports it.
    """

    model: str
    role: Role
    workers: int
    prefill_seconds: float
    kv_usage: float | None


def role_loads(workers: Iterable[Worker], load: LoadTable) -> Iterator[RoleLoad]:
    """Yield the load of every model and role that has a usable worker."""
    groups: dict[tuple[str, Role], list[Worker]] = {}
    for worker in workers:
        for model in worker.models() if worker.up else ():
            groups.setdefault((model, worker.role), []).append(worker)
    for (model, role), members in sorted(groups.items()):
        ranks = [(worker, rank) for worker in members for rank in worker.ranks()]
        backlog = sum(load.of(worker.url, rank).backlog for worker, rank in ranks)
        used = [usage for worker, rank in ranks if (usage := worker.metrics.get(rank).kv_usage) is not None]
        yield RoleLoad(model, role, len(members), backlog / len(ranks), sum(used) / len(used) if used else None)
