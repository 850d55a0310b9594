"""The findings of the router and of the doctor: for each its severity, its meaning, and what to do.

One cause is one finding: `advised` drops the consequences of another finding, and joins the ranks of a worker.

One file, because it is a table of all findings.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final, NamedTuple

# The page of the repository that describes all findings.
PAGE: Final = "docs/reference/findings.md"
# The findings that follow from another one of the same worker, or of the same model if it has no worker.
_CONSEQUENCES: Final = {
    "worker_key": {"worker_down", "no_models"},
    "worker_ejected": {"rank_ejected"},
    "prefix_caching_off": {"tokens_differ", "drift", "events_missing"},
    "block_size": {"tokens_differ", "drift"},
    "tokens_differ": {"drift", "prompt_length"},
    "events_missing": {"drift"},
    "events_lost": {"drift", "tokens_differ"},
    "parents_unknown": {"drift", "tokens_differ"},
    "prompt_length": {"drift"},
    "prompts_differ": {"tokenizer_suspected", "prompt_length", "tokens_differ", "drift"},
    "prompts_asked": {"tokenizer_suspected"},
    "tokenizer_suspected": {"drift"},
    "worker_down": {"hot_worker"},
}
# The findings of a model that follow from one of a worker which serves it.
_OF_MODELS: Final = {"prompt_length": {"tokenizer_suspected"}, "tokens_differ": {"tokenizer_suspected"}}


class Severity(StrEnum):
    """The severity of a finding, the worst first.

    - `ERROR`: a worker or the router does not serve.
    - `WARNING`: requests are served, with fewer hits or later than they could be.
    - `INFO`: nothing needs to be done.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Advice(NamedTuple):
    """The severity and the meaning of a finding, and the `action` that ends it."""

    severity: Severity
    meaning: str
    action: str


_UNKNOWN: Final = Advice(Severity.WARNING, "", "See docs/troubleshooting.md of the router's version.")

ADVICE: Final = {
    "worker_down": Advice(
        Severity.ERROR,
        "the worker does not answer, and receives no requests",
        "Start the worker, or correct its URL: it must answer GET /v1/models. It is probed again by itself.",
    ),
    "worker_key": Advice(
        Severity.ERROR,
        "the worker refuses the API key, or requires one",
        "Set api_key, api_key_file or api_key_env of the worker, or of fleet:, to the key of the engine (its "
        "--api-key).",
    ),
    "worker_ejected": Advice(
        Severity.ERROR,
        "the worker answers, but fails or hangs; it is ejected",
        "Check the worker's log: it fails, hangs or is slow. The router tries it again.",
    ),
    "rank_ejected": Advice(
        Severity.ERROR,
        "one DP rank of a worker hangs while others work",
        "Check this rank in the worker's log. The router tries it again.",
    ),
    "process_down": Advice(
        Severity.ERROR,
        "one of several processes does not answer",
        "Check the router's log for the reason. The process is restarted.",
    ),
    "no_models": Advice(
        Severity.ERROR, "the worker's `/v1/models` is empty", "Set model: of the worker in the settings."
    ),
    "not_ready": Advice(
        Severity.ERROR,
        "the router cannot serve yet",
        "Wait, or check the findings above. Send no requests to this router yet.",
    ),
    "requests_refused": Advice(
        Severity.ERROR, "it refuses requests; its answer has the reason", "Correct the problem that the answer names."
    ),
    "worker_description": Advice(
        Severity.WARNING,
        "the worker reports invalid data, or streams that may not be followed",
        "Check the worker's answers to /v1/models, /kv_event_sources and /server_info. Streams outside "
        "fleet.allowed_networks are not followed.",
    ),
    "events_missing": Advice(
        Severity.WARNING,
        "a stream never delivered an event, or its publisher disappeared",
        "Switch on the engine's events, open their port to the router, and compare keys. The doctor with "
        "`--worker` follows one prompt to the index.",
    ),
    "events_lost": Advice(
        Severity.WARNING,
        "event batches were missed and could not be replayed",
        "Set a replay endpoint of the engine, or increase its buffer_steps.",
    ),
    "parents_unknown": Advice(
        Severity.WARNING,
        "every block that the events report follows a block that is not known, so none is matched",
        "Set replay_endpoint in the engine's --kv-events-config, so that earlier blocks are learned. If it is set, the "
        "publisher names parents that it never stores: upgrade it.",
    ),
    "publisher_unknown": Advice(
        Severity.WARNING,
        "a publisher connected to the router, and its events are credited to no worker",
        "Let its topic be kv@NAME@MODEL, with the name or address of a worker that the router knows.",
    ),
    "drift": Advice(
        Severity.WARNING,
        "the engine found more or fewer cached tokens than its events reported",
        "Examine this worker by the option --worker of kvrouter doctor: it compares tokens and events of one prompt.",
    ),
    "unexplained_pool": Advice(
        Severity.WARNING,
        "the engine found more cached tokens than it holds and loads",
        "Add the engine's pool under pools in the settings, or correct it there.",
    ),
    "pool_not_loaded": Advice(
        Severity.WARNING,
        "a pool holds tokens for the worker, and its answers lack them",
        "Check the worker's connector and its log. Until it loads, its pool earns no credit.",
    ),
    "pool_unknown": Advice(
        Severity.WARNING,
        "the content of a shared pool is unknown, for 30 s or longer",
        "Check the pool's master, its HTTP address and its stream. Raise most_keys if it has more keys.",
    ),
    "load_not_shared": Advice(
        Severity.WARNING, "this router receives no load of the others", "Check Redis. The router reconnects by itself."
    ),
    "prompt_length": Advice(
        Severity.WARNING,
        "prompts have another length in the engine",
        "Configure the tokenizer and the chat template of the engine.",
    ),
    "tokenizer_missing": Advice(
        Severity.WARNING,
        "the model's files are missing, so workers are asked about every prompt",
        "Set models: NAME: tokenizer: to the model's folder or its name on the Hub.",
    ),
    "tokenizer_incomplete": Advice(
        Severity.WARNING,
        "the likely reader of the files could not be loaded",
        "Install the extra that the evidence names.",
    ),
    "prompts_differ": Advice(
        Severity.WARNING,
        "some prompt shapes differ and the engine cannot be asked: routed by estimate",
        "Configure the engine's model files and template. vLLM can also be asked, with --enable-scale-out.",
    ),
    "ids_miscounted": Advice(
        Severity.WARNING,
        "a worker counted other prompt tokens than the ids it received; it receives no more",
        "Check the worker's chat template and release, and restart it.",
    ),
    "tokenizer_suspected": Advice(
        Severity.WARNING,
        "answers report other prompts than the router computed; the engine is asked",
        "The finding ends when the next prompts agree. Check the requests of clients.",
    ),
    "prompts_by_text": Advice(
        Severity.WARNING,
        "the model's files are missing, and the workers report no tokens: prompts are compared by text",
        "Set models: NAME: tokenizer: to the model's folder or its name on the Hub.",
    ),
    "events_off": Advice(
        Severity.WARNING,
        "the worker publishes no events, so its cache is predicted from what it was sent",
        "Start the engine with --kv-events-config, publisher zmq and events enabled, or list its streams in "
        "the settings, under workers: streams:.",
    ),
    "endpoint_unreachable": Advice(
        Severity.WARNING,
        "the event endpoint accepts no connections",
        "Correct the endpoint (each DP rank has its own port), bind the engine to an address that is "
        "reachable from here, or open the port in the firewall.",
    ),
    "no_publisher": Advice(
        Severity.WARNING,
        "the endpoint is no publisher: a replay port, web server or encrypted stream",
        "Connect to the PUB endpoint, not to the replay endpoint or another service; for an encrypted stream "
        "set curve_server_key_file.",
    ),
    "stream_silent": Advice(
        Severity.WARNING,
        "the publisher sends nothing while the worker computes: another engine's port",
        "Another process listens at this endpoint: compare the endpoint with the one in the engine's "
        "--kv-events-config, and the port with the DP rank's.",
    ),
    "topic_mismatch": Advice(
        Severity.WARNING,
        "events have another topic than the subscription",
        'Set the topic under workers: streams: to that of the engine, or to "" for all topics.',
    ),
    "events_unreadable": Advice(
        Severity.WARNING,
        "events have an unknown format",
        "Upgrade the publisher of these events, or connect to the engine directly.",
    ),
    "events_without_tokens": Advice(
        Severity.WARNING,
        "stored blocks have no token ids",
        "Upgrade the engine, or remove the relay that drops token_ids: a prompt is matched by its tokens.",
    ),
    "block_size": Advice(
        Severity.WARNING,
        "the block size of the settings differs from that of the events",
        "Remove block_size from the worker's settings, or set it to the engine's.",
    ),
    "tokens_differ": Advice(
        Severity.WARNING,
        "the worker's events have other tokens than the prompts that it was sent",
        "Set models: NAME: tokenizer: to the folder of the model that the worker serves, with its chat template.",
    ),
    "chat_template": Advice(
        Severity.WARNING,
        "conversations have other tokens, although plain prompts agree",
        "Copy the worker's chat template to the router's tokenizer folder.",
    ),
    "salt": Advice(
        Severity.WARNING,
        "a prompt without a cache salt was stored with one",
        "A proxy before the engine adds a cache salt to requests: remove it, or let clients send it in the "
        "body (cache_salt) through the router.",
    ),
    "adapter": Advice(
        Severity.WARNING,
        "a prompt for the base model was computed with an adapter",
        "Request the adapter by its own model name, so that the router knows it too.",
    ),
    "prefix_caching_off": Advice(
        Severity.WARNING,
        "the worker caches nothing of what it is sent, so its prompts are computed again",
        "Start the engine with prefix caching (vLLM: --enable-prefix-caching; SGLang: without --disable-radix-cache).",
    ),
    "replay_missing": Advice(
        Severity.WARNING,
        "the stream has no replay endpoint: earlier or lost events are never learned",
        "Set replay_endpoint in the engine's --kv-events-config: without it, a router that starts later does "
        "not know blocks that are already cached, and a lost batch stays lost.",
    ),
    "replay_silent": Advice(
        Severity.WARNING,
        "the replay endpoint does not answer",
        "Correct replay_endpoint, or open its port; it must be the engine's ROUTER socket.",
    ),
    "sequence": Advice(
        Severity.WARNING,
        "batches are missing or their numbers decrease: a lossy relay or two publishers",
        "Use this endpoint for one publisher only, and connect without a relay that drops messages.",
    ),
    "stream_buffered": Advice(
        Severity.WARNING,
        "all tokens of a stream arrive at its end",
        "Switch off response buffering in the proxy between here and the worker (nginx: proxy_buffering off).",
    ),
    "pool_missing": Advice(
        Severity.WARNING,
        "the worker uses a shared pool that the settings lack; the evidence has the settings",
        "Add the pool to the settings, under pools:, with a name and, for a Mooncake Store, the addresses of "
        "its master (master: and events:). Until then its blocks count for no worker.",
    ),
    "pool_unreachable": Advice(
        Severity.WARNING,
        "the pool's master or its stream does not answer",
        "Correct master: and events: of the pool, start its master, or open their ports.",
    ),
    "pool_events_off": Advice(
        Severity.WARNING,
        "the master publishes no events",
        "Start mooncake_master with --enable_kv_events=true and --kv_events_bind_endpoint. Wheels before "
        "0.3.14 accept these flags and publish nothing: upgrade.",
    ),
    "pool_keys": Advice(
        Severity.WARNING,
        "no key of the pool contains the text of the settings",
        "Correct the text under models: of the pool. vLLM's keys begin with its cache_prefix and the last "
        "part of --model, and not with the served name.",
    ),
    "hash_seeds": Advice(
        Severity.WARNING,
        "workers that share blocks hash one prompt differently",
        "Start all workers that share blocks with one PYTHONHASHSEED, or with --prefix-caching-hash-algo "
        "sha256. Until then no worker finds the blocks of another.",
    ),
    "not_matched": Advice(
        Severity.WARNING,
        "all of the above is correct, but the prompt is not found",
        "The cause is unknown: compare the events in `kvrouter record` with the prompt's tokens.",
    ),
    "policy_failed": Advice(
        Severity.WARNING,
        "a policy of your own raised an error in the last five minutes",
        "Correct the function: the detail names its error. The default policy decides meanwhile.",
    ),
    "policy_switched_off": Advice(
        Severity.WARNING,
        "a policy of your own is slow, so the default decides without it",
        "Make the function faster, then restart the router.",
    ),
    "hook_failed": Advice(
        Severity.WARNING,
        "a hook raised an error, was late or was not called in the last five minutes",
        "Correct the function or the service at hooks.key_url: the detail names the problem. hooks.on_error decides "
        "about its requests meanwhile.",
    ),
    "cache_too_small": Advice(
        Severity.WARNING,
        "prompts return after their blocks were evicted: the caches are too small for what is asked again",
        "Give the KV caches more memory, offload blocks to the host (CPU tier), share a pool, or add workers.",
    ),
    "sessions_wait": Advice(
        Severity.WARNING,
        "sessions of agents wait, because the contexts of live ones fill the KV caches",
        "Add workers or KV memory, share a pool, or start fewer sessions at once: `more` in /health says how many fit.",
    ),
    "hot_worker": Advice(
        Severity.WARNING,
        "one worker has most of the requests in flight, while others have few",
        "Look at the hottest prefixes on the page, at session ids that clients share, and at drained workers.",
    ),
    "saturated": Advice(
        Severity.WARNING,
        "the workers of a model are full, and requests wait or are refused",
        "Add workers, or lower the load. For slots, raise the engine's --max-num-seqs. For memory, give its KV cache "
        "more. For prefill, add prefill workers.",
    ),
    "sessions_move": Advice(
        Severity.WARNING,
        "sessions continue on another worker than before, and compute their prompts again",
        "Add workers, or raise admission.requests and admission.tokens: a busy worker costs more than a hit saves.",
    ),
    "prompts_vary": Advice(
        Severity.WARNING,
        "turns of sessions differ early, and the text behind the difference is the same: it is computed again",
        "Let the client send the named text last, or leave it out. proxy.billing_line: strip drops Claude Code's line. "
        "logs.prompt_text: true shows the words that differ in the router's log.",
    ),
    "prompts_asked": Advice(
        Severity.INFO,
        "the engine tokenizes some prompt shapes differently and is asked",
        "No action is needed. To save time, configure the engine's model files and chat template.",
    ),
    "model_changed": Advice(
        Severity.INFO,
        "another model appeared under the same name and URL within the last hour",
        "No action is needed after an intended change: the new model's prompts are probed again.",
    ),
    "clock": Advice(
        Severity.INFO,
        "the engine's clock differs by more than 5 s",
        "Synchronize the clocks (NTP): lags and freshness are computed from the engine's time.",
    ),
}


def advice(finding: str) -> Advice:
    """Return the advice for a finding, also for one of a later version."""
    return ADVICE.get(finding, _UNKNOWN)


def advised(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings without consequences of others, the worst first, each with severity, action and link."""
    kept = _joined(_causes(list(found)))
    kept.sort(key=lambda each: list(Severity).index(advice(each["finding"]).severity))
    return [each | about(each["finding"]) for each in kept]


def about(finding: str) -> dict[str, str]:
    """Return the fields that each finding of a kind has."""
    severity, _, action = advice(finding)
    return {"severity": severity.value, "action": action, "link": f"{PAGE}#{finding}"}


def has_errors(found: Iterable[dict[str, Any]]) -> bool:
    """Return whether a finding says that a worker or the router does not serve."""
    return any(advice(each["finding"]).severity is Severity.ERROR for each in found)


def _causes(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings that do not follow from another one."""
    of_workers: dict[object, set[str]] = {}
    of_models: dict[object, set[str]] = {}
    for each in found:
        place, name = (of_workers, "worker") if "worker" in each else (of_models, "model")
        place.setdefault(each.get(name), set()).update(_CONSEQUENCES.get(each["finding"], ()))
        of_models.setdefault(each.get("model"), set()).update(_OF_MODELS.get(each["finding"], ()))
    return [
        each
        for each in found
        if each["finding"] not in of_workers.get(each.get("worker"), ())
        and (each.get("model") is None or each["finding"] not in of_models.get(each["model"], ()))
    ]


def _joined(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings, with one for all ranks of a worker: `dp_ranks`, and the details of the first."""
    joined: dict[tuple[object, ...], dict[str, Any]] = {}
    for each in found:
        if "dp_rank" not in each:
            joined[len(joined),] = each
            continue
        key = each["finding"], each["worker"], each.get("model")
        first = joined.setdefault(key, each)
        if first is not each:
            ranks = [*first.get("dp_ranks", [first["dp_rank"]]), each["dp_rank"]]
            joined[key] = first | {"dp_ranks": ranks}
    return list(joined.values())
