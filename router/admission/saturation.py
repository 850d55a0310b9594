"""The saturation of each model's targets, by stage and by cause: for metrics, autoscaling and the finding `saturated`.

    memory    the tokens of KV memory that running requests need, of those that they may need. If they are not counted,
              because no limit is computed: the share of the KV cache in use that the engine reports
    slots     the requests in flight, of those that the engine runs, or of `admission.requests`
    prefill   the prompt tokens without a first byte, of those of one engine step

A stage is the role of its workers. A worker that does both is a stage of its own. A cause that is not known for any
target of a stage is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission import Admission
from router.admission.ticket import WaitReason
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.load.target_load import LoadTable, TargetLoad
from router.routing.late_binding import STEP_TOKENS
from router.routing.ranks import Limits

_MEMORY: Final = "memory"
_SLOTS: Final = "slots"
_PREFILL: Final = "prefill"


@dataclass(frozen=True, slots=True)
class StageSaturation:
    """The saturation of a model's targets of one role.

    - `causes`: the mean share in use by cause, at most 1.
    - `spare_tokens`: the tokens of KV memory that further requests may need, over all targets.
    """

    model: str
    stage: str
    causes: dict[str, float]
    spare_tokens: int

    @property
    def cause(self) -> str:
        """The cause with the highest share."""
        return max(self.causes, key=lambda cause: self.causes[cause])


class Saturation(Collector):
    """The saturation of all stages."""

    def __init__(self, fleet: Fleet, load: LoadTable, admission: Admission) -> None:
        self._fleet = fleet
        self._load = load
        self._admission = admission

    def stages(self) -> list[StageSaturation]:
        """Return the stages that have a worker that is up. A worker counts for the first of its models."""
        ranks: dict[tuple[str, str], list[tuple[TargetLoad, Worker]]] = {}
        for worker in self._fleet.generating:
            if worker.up and (models := sorted(worker.models())):
                for dp_rank in worker.ranks():
                    of_stage = ranks.setdefault((models[0], worker.role.value), [])
                    of_stage.append((self._load.of(worker.url, dp_rank), worker))
        limits = self._admission.limits
        return [_stage(model, stage, loads, limits) for (model, stage), loads in sorted(ranks.items())]

    def report(self) -> list[dict[str, Any]]:
        """Return the cause with the highest share of each stage, for the page and `kvrouter top`."""
        return [
            {"model": each.model, "stage": each.stage, "cause": each.cause, "share": round(each.causes[each.cause], 2)}
            for each in self.stages()
        ]

    def findings(self) -> list[dict[str, Any]]:
        """Return a finding for each model whose requests wait for full targets, or were refused for them lately."""
        waiting: dict[str | None, int] = {}
        for request in self._admission.queue.in_order():
            if request.reason is WaitReason.SATURATED or self._admission.limits.paced:
                model = request.name and (self._fleet.model_of(request.name) or request.name)
                waiting[model] = waiting.get(model, 0) + 1
        found = []
        for stage in self.stages():
            if stage.model in waiting and stage.causes:
                cause = stage.cause
                detail = (
                    f"{stage.stage}: {stage.causes[cause]:.0%} of {cause} in use; {waiting[stage.model]} requests wait"
                )
                found.append({"finding": "saturated", "model": stage.model, "detail": detail})
        return found

    def collect(self) -> Iterator[Metric]:
        saturation = GaugeMetricFamily(
            "kvrouter_saturation",
            "Share in use of what the targets of a model can run at once",
            labels=["model", "stage", "cause"],
        )
        spare = GaugeMetricFamily(
            "kvrouter_spare_tokens", "Tokens of KV memory that further requests may need", labels=["model", "stage"]
        )
        for stage in self.stages():
            for cause, share in stage.causes.items():
                saturation.add_metric([stage.model, stage.stage, cause], share)
            if _MEMORY in stage.causes:
                spare.add_metric([stage.model, stage.stage], stage.spare_tokens)
        yield from (saturation, spare)


def _stage(model: str, stage: str, loads: list[tuple[TargetLoad, Worker]], limits: Limits) -> StageSaturation:
    shares: dict[str, list[float]] = {}
    spare = 0
    for load, worker in loads:
        limit, engine = load.limit, worker.metrics.get(load.dp_rank)
        if limit.memory is not None and limit.capacity is not None:
            counted = load.held + load.outputs
            needed = counted if limits.computed else int((engine.kv_usage or 0.0) * limit.capacity)
            spare += max(limit.memory - needed, 0)
            shares.setdefault(_MEMORY, []).append(needed / max(limit.memory, 1))
        slots: float | None = limit.slots
        if limits.requests is not None:
            slots = limits.requests * worker.settings.weight
        if slots is not None:
            shares.setdefault(_SLOTS, []).append((load.requests + load.peers.requests + engine.unseen) / slots)
        shares.setdefault(_PREFILL, []).append((load.pending + load.peers.pending) / STEP_TOKENS)
    causes = {cause: sum(min(share, 1.0) for share in known) / len(known) for cause, known in shares.items()}
    return StageSaturation(model, stage, causes, spare)
