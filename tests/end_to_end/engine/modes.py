"""The modes of vLLM that `test_modes.py` tries, each with what its servers are started with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.processes import wait_for
from engine.servers import RouterProcess, VllmWorker
from engine.web import post_json

Act = Callable[[list[VllmWorker], RouterProcess], None]
Servers = tuple[tuple[str, ...], ...]

PORT = "PORT"  # in flags: a free one, the same for all servers of a mode
DRAFT = "DRAFT"  # in flags: the folder of what drafts for the family llama3
TWO: Servers = ((), ())
TOKEN = "of-the-operator"
_UP_SECONDS = 60.0


@dataclass(frozen=True)
class Mode:
    """One row of the table.

    - `flags`, `servers`: the flags of all servers, and of each.
    - `family`: a model of `make_families.py`, if not the usual one.
    - `models`: the models that requests name in turn, if not the served one.
    - `acts`: actions between equal parts of the traffic.
    - `hits`: whether caches are used.
    - `learned_by`: wrong predictions per server before the router has learned a change without events.
    """

    name: str
    flags: tuple[str, ...] = ()
    servers: Servers = TWO
    environment: Mapping[str, str] = field(default_factory=dict)
    family: str = ""
    models: tuple[str, ...] = ()
    acts: tuple[Act, ...] = ()
    hits: bool = True
    learned_by: int = 0


def kill(workers: list[VllmWorker], router: RouterProcess) -> None:  # noqa: ARG001
    """Kill the first worker. The router detects it at the next request."""
    workers[0].kill()


def start_again(workers: list[VllmWorker], router: RouterProcess) -> None:
    """Restart the first worker with the same ports and an empty cache."""
    workers[0].start()
    _wait_until_used(workers, router)


def put_to_sleep(workers: list[VllmWorker], router: RouterProcess) -> None:
    """Put the first worker to sleep through the router. On CPU, this stops the engine and resets its cache."""
    post_json(f"{router.url}/sleep?worker={workers[0].url}", token=TOKEN)
    assert router.workers()[workers[0].url]["state"] == "asleep"


def wake(workers: list[VllmWorker], router: RouterProcess) -> None:
    post_json(f"{router.url}/wake_up?worker={workers[0].url}", token=TOKEN)
    assert router.workers()[workers[0].url]["state"] == "ready"


def _wait_until_used(workers: list[VllmWorker], router: RouterProcess) -> None:
    for worker in workers:
        worker.wait_until_ready()
    wait_for(lambda: router.health()["workers_up"] == len(workers), _UP_SECONDS, "all workers are used")


def swap_model(workers: list[VllmWorker], router: RouterProcess) -> None:
    """Restart the first worker with another model, behind the same URL and name."""
    workers[0].stop()
    workers[0].swap(workers[0].installation.model("small"))
    workers[0].start()
    _wait_until_used(workers, router)


def reset_at_the_engine(workers: list[VllmWorker], router: RouterProcess) -> None:  # noqa: ARG001
    """Reset the cache of the first worker directly."""
    post_json(f"{workers[0].url}/reset_prefix_cache")


_HYBRID = (
    *("--data-parallel-hybrid-lb", "--data-parallel-size", "4", "--data-parallel-size-local", "2"),
    *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", PORT, "--api-server-count", "1"),
)
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
_EAGLE = {"method": "eagle", "model": DRAFT, "num_speculative_tokens": 2}
_FEW = ("--num-gpu-blocks-override", "160")  # 5120 tokens, so that most is evicted

MODES = (
    Mode("two workers"),
    Mode("DP=2, internal", servers=(("--data-parallel-size", "2", "--api-server-count", "1"),)),
    Mode("DP=4, hybrid", _HYBRID, (("--data-parallel-start-rank", "0"), ("--data-parallel-start-rank", "2"))),
    Mode("block size 128", ("--block-size", "128", "--num-gpu-blocks-override", "250")),
    *(Mode(f"hashes by {name}", ("--prefix-caching-hash-algo", name)) for name in ("sha256_cbor", "xxhash")),
    Mode("prefix caching off", ("--no-enable-prefix-caching",), hits=False),
    Mode("chunked prefill of 128 tokens", ("--enable-chunked-prefill", "--max-num-batched-tokens", "128")),
    Mode("speculative, ngram", ("--speculative-config", json.dumps(_NGRAM))),
    Mode("speculative, EAGLE", ("--speculative-config", json.dumps(_EAGLE)), family="llama3"),
    Mode("small caches", _FEW),
    Mode("sliding windows (Gemma 3)", family="gemma3"),
    Mode("linear attention (Qwen3-Next)", family="qwen3_next"),
    Mode("LoRA", ("--enable-lora", "--lora-modules", "ADAPTERS"), models=("poet", "clerk", "tiny")),
    Mode("kill -9 and restart", acts=(kill, start_again)),
    Mode("sleep and wake", acts=(put_to_sleep, wake)),
    Mode("cache reset at the engine", acts=(reset_at_the_engine,), learned_by=1),
    Mode("model swapped behind a URL", acts=(swap_model,)),
)
