"""The settings of a simulated worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from kvevents import WireForm
from worker.publisher import PublisherConfig

BUNDLED_MODEL = Path(__file__).parent / "model"


def _loopback_events() -> PublisherConfig:
    return PublisherConfig(publisher="zmq", endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorkerSettings:
    """The model, the size of the cache and the speed of a simulated worker.

    A step lasts `base_step_s`, plus `prefill_s_per_token` for each computed prompt token, plus `decode_s_per_sequence`
    for each generated token. Raises ValueError for an invalid setting.
    """

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    model: str = "simulated"
    tokenizer: str = str(BUNDLED_MODEL)  # the folder of a model
    adapters: tuple[str, ...] = ()
    api_key: str = field(default="", repr=False)  # key that requests need; "": no key

    block_size: int = 16  # tokens
    num_blocks: int = 4096  # per DP rank
    dp_size: int = 1
    prefix_caching: bool = True
    max_model_len: int = 32768  # tokens of prompt and answer together

    # The host tier, of which other workers pull at `pull_port` plus the DP rank.
    host_blocks: int = 0  # per DP rank; 0: no host tier
    pull_port: int = 5710
    pull_s_per_token: float = 0.00001

    max_num_seqs: int = 64  # running requests per DP rank
    max_num_batched_tokens: int = 2048  # per step
    max_waiting: int = 1024  # per DP rank; further requests are refused with 503
    max_queued_tokens: int | None = None  # of prompts in prefill, per DP rank; None: no limit. Beyond it 503

    base_step_s: float = 0.005
    prefill_s_per_token: float = 0.00015
    decode_s_per_sequence: float = 0.0002

    # Media: the time to encode an item, and the most encoded items that are kept.
    encode_s_per_item: float = 0.05
    encoder_items: int = 64

    # Disaggregation. SGLang's style also changes the engine that the worker reports. Encode workers need no style.
    disaggregation: Literal["sglang", "nixl"] | None = None
    role: Literal["prefill", "decode", "encode"] | None = None
    bootstrap_port: int = 0  # port of a prefill worker's bootstrap service; 0: any free port
    transfer_timeout_s: float = 30.0  # seconds until a prompt's KV must have arrived

    # Endpoints of rank 0. None: no events. The worker binds the stream, or connects to an address that a router binds.
    kv_events: PublisherConfig | None = field(default_factory=_loopback_events)
    connects: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "dp_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        at_least_0 = ("max_waiting", "host_blocks", "base_step_s", "prefill_s_per_token", "decode_s_per_sequence")
        for name in (*at_least_0, "pull_s_per_token", "encode_s_per_item", "encoder_items"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("port", "bootstrap_port", "pull_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be between 0 and 65535, not {getattr(self, name)}")
        if self.max_queued_tokens is not None and self.max_queued_tokens < 1:
            raise ValueError(f"max_queued_tokens must be at least 1, not {self.max_queued_tokens}")
        if self.disaggregation not in (None, "sglang", "nixl"):
            raise ValueError(f"disaggregation must be sglang or nixl, not {self.disaggregation!r}")
        if self.role not in (None, "prefill", "decode", "encode"):
            raise ValueError(f"role must be prefill, decode or encode, not {self.role!r}")
        if self.role in ("prefill", "decode") and self.disaggregation is None:
            raise ValueError(f"role {self.role!r} needs disaggregation: sglang or nixl")
        if self.transfer_timeout_s <= 0:
            raise ValueError(f"transfer_timeout_s must be above 0, not {self.transfer_timeout_s}")
        if self.disaggregation == "sglang" and self.kv_events == _loopback_events():
            object.__setattr__(self, "kv_events", replace(self.kv_events, wire_form=WireForm.SGLANG_MAPS))
        if self.disaggregation == "sglang" and self.dp_size > 1 and self.kv_events is not None:
            for endpoint in (self.kv_events.endpoint, self.kv_events.replay_endpoint or ""):
                if endpoint.endswith(":0"):
                    raise ValueError(
                        f"kv_events: {endpoint} must name a port: as SGLang does, the worker reports only rank 0's"
                    )
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"a cache of num_blocks * block_size = {self.num_blocks * self.block_size} tokens cannot hold one "
                f"request of max_model_len = {self.max_model_len}: raise num_blocks or lower max_model_len"
            )
        if self.model in self.adapters or len(set(self.adapters)) < len(self.adapters):
            raise ValueError(
                f"adapters need distinct names, also different from the model {self.model!r}: {self.adapters}"
            )
        if self.kv_events is not None and self.kv_events.publisher not in ("zmq", "null"):
            raise ValueError(f"kv_events.publisher must be zmq or null, not {self.kv_events.publisher!r}")
