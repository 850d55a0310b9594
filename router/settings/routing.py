"""Settings of the choice of a worker: policies, models, service levels, prefill and decode."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
)

from router.settings.fields import ModelName, NonNegative, Section
from router.settings.own_code import NAME, check_function


class PolicyName(StrEnum):
    """The policies that choose a worker."""

    KV_AWARE = "kv_aware"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    SESSION_AFFINITY = "session_affinity"
    CACHE_AWARE = "cache_aware"


def _policy(given: Any) -> Any:
    if isinstance(given, str) and given not in list(PolicyName):
        return check_function(given, list(PolicyName))
    return PolicyName(given) if isinstance(given, str) else given


def _scorer(given: str) -> str:
    return check_function(given, [])


class PolicySettings(Section):
    """The policy, and the weights of its cost. Costs are in prefill tokens, times in seconds."""

    name: Annotated[PolicyName | Annotated[str, Field(pattern=NAME)], BeforeValidator(_policy)] = PolicyName.KV_AWARE
    extra: list[Annotated[str, Field(pattern=NAME), AfterValidator(_scorer)]] = []
    interference: NonNegative = 1.0
    interference_per_request: NonNegative = 0.25
    eviction: NonNegative = 10.0
    cpu_token: NonNegative = 0.1
    disk_token: NonNegative = 0.5
    near: NonNegative = 0.0

    @model_validator(mode="after")
    def _extra_adds_to_the_default(self) -> Self:
        if self.extra and self.name is not PolicyName.KV_AWARE:
            raise ValueError(
                f"extra: scorers add to the cost of {PolicyName.KV_AWARE}. Set name to it, or remove extra"
            )
        return self


class ModelSettings(Section):
    """A model: its tokenizer (a folder, or a name on the Hugging Face Hub), default service level, and other names."""

    tokenizer: str | None = None
    service_level: str | None = None
    aliases: list[ModelName] = []


class WhenLate(StrEnum):
    """The treatment of a request that no worker can serve within its SLO."""

    SERVE = "serve"
    REFUSE = "refuse"


class ServiceLevelSettings(Section):
    """A class of requests and its SLO: seconds to the first token, and seconds per token after it."""

    ttft: PositiveFloat | None = None
    tpot: PositiveFloat | None = None
    when_late: WhenLate = WhenLate.SERVE


class Backend(StrEnum):
    """The way in which prefill workers hand KV caches to decode workers. AUTO: by the engine that workers report."""

    AUTO = "auto"
    SGLANG = "sglang"
    NIXL = "nixl"
    MOONCAKE = "mooncake"
    TRTLLM = "trtllm"
    SIDECAR = "sidecar"


class EncodingSettings(Section):
    """Media items on encode workers. `workers_encode`: whether the other workers can encode items themselves."""

    workers_encode: bool = True


class PairRevisions(StrEnum):
    """The pairing of prefill and decode workers by their revision.

    PREFERRED: pairs have one revision while a revision has workers of both roles. STRICT: they always have.
    """

    PREFERRED = "preferred"
    STRICT = "strict"
    OFF = "off"


class DisaggregationSettings(Section):
    """Prefill and decode on separate workers.

    - `decode_computes`: whether decode workers may compute prompts alone.
    - `revision_labels`: the labels with a worker's revision. The first that a worker has counts.
    """

    backend: Backend = Backend.AUTO
    decode_computes: bool = True
    revisions: PairRevisions = PairRevisions.PREFERRED
    revision_labels: list[str] = ["disaggregatedset.x-k8s.io/revision", "serving.kserve.io/llmisvc-revision"]

    @field_validator("revisions", mode="before")
    @classmethod
    def _off_in_yaml(cls, value: object) -> object:
        """Return "off" for `off`, which YAML reads as false."""
        return "off" if value is False else value
