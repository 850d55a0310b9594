"""The doctor's findings and the advice for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """A cause of zero or low hits."""

    WORKER_UNREACHABLE = "worker_unreachable"
    NO_MODELS = "no_models"
    KEY_REFUSED = "key_refused"
    REQUESTS_REFUSED = "requests_refused"
    EVENTS_OFF = "events_off"
    ENDPOINT_UNREACHABLE = "endpoint_unreachable"
    NO_PUBLISHER = "no_publisher"
    STREAM_SILENT = "stream_silent"
    TOPIC_MISMATCH = "topic_mismatch"
    EVENTS_UNREADABLE = "events_unreadable"
    EVENTS_WITHOUT_TOKENS = "events_without_tokens"
    BLOCK_SIZE = "block_size"
    TOKENIZER = "tokenizer"
    TOKENIZER_MISSING = "tokenizer_missing"
    PROMPTS_BY_TEXT = "prompts_by_text"
    PROMPTS_DIFFER = "prompts_differ"
    CHAT_TEMPLATE = "chat_template"
    SALT = "salt"
    ADAPTER = "adapter"
    PREFIX_CACHING_OFF = "prefix_caching_off"
    REPLAY_MISSING = "replay_missing"
    REPLAY_SILENT = "replay_silent"
    SEQUENCE = "sequence"
    CLOCK = "clock"
    STREAM_BUFFERED = "stream_buffered"
    NOT_MATCHED = "not_matched"
    POOL_MISSING = "pool_missing"
    POOL_UNREACHABLE = "pool_unreachable"
    POOL_EVENTS_OFF = "pool_events_off"
    POOL_KEYS = "pool_keys"
    HASH_SEEDS = "hash_seeds"


FIXES = {
    Cause.WORKER_UNREACHABLE: "Start the worker, or correct its URL; it must answer GET /v1/models.",
    Cause.NO_MODELS: "Set model: of the worker, under workers: in the settings, to the name that requests use.",
    Cause.KEY_REFUSED: "Set api_key, api_key_file or api_key_env of the worker or of fleet: to the key "
    "of the engine (its --api-key), or set --api-key.",
    Cause.REQUESTS_REFUSED: "Correct the problem that the answer names.",
    Cause.EVENTS_OFF: "Start the engine with --kv-events-config, publisher zmq and events enabled, or list its streams "
    "in the settings, under workers: streams:.",
    Cause.ENDPOINT_UNREACHABLE: "Correct the endpoint (each DP rank has its own port), bind the engine to an address "
    "that is reachable from here, or open the port in the firewall.",
    Cause.NO_PUBLISHER: "Connect to the PUB endpoint, not to the replay endpoint or another service; for an encrypted "
    "stream set curve_server_key_file.",
    Cause.STREAM_SILENT: "Another process listens at this endpoint: compare the endpoint with the "
    "one in the engine's --kv-events-config, and the port with the DP rank's.",
    Cause.TOPIC_MISMATCH: 'Set the topic under workers: streams: to that of the engine, or to "" for all topics.',
    Cause.EVENTS_UNREADABLE: "Upgrade the publisher of these events, or connect to the engine directly.",
    Cause.EVENTS_WITHOUT_TOKENS: "Upgrade the engine, or remove the relay that drops token_ids: a prompt is "
    "matched by its tokens.",
    Cause.BLOCK_SIZE: "Remove block_size from the worker's settings, or set it to the engine's.",
    Cause.TOKENIZER: "Set models: NAME: tokenizer: to the folder of the model that the worker serves.",
    Cause.TOKENIZER_MISSING: "Set models: NAME: tokenizer: to the folder of the model or its name on the Hub, or "
    "install the extra that the evidence names. Until then the engine tokenizes every prompt.",
    Cause.PROMPTS_BY_TEXT: "Set models: NAME: tokenizer: to the folder of the model or its name on the Hub: prompts "
    "are then matched by tokens. Until then prompts with an equal beginning are routed together.",
    Cause.PROMPTS_DIFFER: "No action is needed if the engine tokenizes prompts, which needs some milliseconds each. "
    "To save this time, configure the model files and the chat template of the engine.",
    Cause.CHAT_TEMPLATE: "Copy the worker's chat template to the router's tokenizer folder.",
    Cause.SALT: "A proxy before the engine adds a cache salt to requests: remove it, or let clients send it "
    "in the body (cache_salt) through the router.",
    Cause.ADAPTER: "Request the adapter by its own model name, so that the router knows it too.",
    Cause.PREFIX_CACHING_OFF: "Start the engine with prefix caching (vLLM: --enable-prefix-caching; SGLang: without "
    "--disable-radix-cache).",
    Cause.REPLAY_MISSING: "Set replay_endpoint in the engine's --kv-events-config: without it, a router that starts "
    "later does not know blocks that are already cached, and a lost batch stays lost.",
    Cause.REPLAY_SILENT: "Correct replay_endpoint, or open its port; it must be the engine's ROUTER socket.",
    Cause.SEQUENCE: "Use this endpoint for one publisher only, and connect without a relay that drops messages.",
    Cause.CLOCK: "Synchronize the clocks (NTP): lags and freshness are computed from the engine's time.",
    Cause.STREAM_BUFFERED: "Switch off response buffering in the proxy between here and the worker "
    "(nginx: proxy_buffering off).",
    Cause.POOL_MISSING: "Add the pool to the settings, under pools:, with a name and, for a Mooncake Store, the "
    "addresses of its master (master: and events:). Until then its blocks count for no worker.",
    Cause.POOL_UNREACHABLE: "Correct master: and events: of the pool, start its master, or open their ports.",
    Cause.POOL_EVENTS_OFF: "Start mooncake_master with --enable_kv_events=true and --kv_events_bind_endpoint. Wheels "
    "before 0.3.14 accept these flags and publish nothing: upgrade.",
    Cause.POOL_KEYS: "Correct the text under models: of the pool. vLLM's keys begin with its cache_prefix and the last "
    "part of --model, and not with the served name.",
    Cause.HASH_SEEDS: "Start all workers that share blocks with one PYTHONHASHSEED, or with --prefix-caching-hash-algo "
    "sha256. Until then no worker finds the blocks of another.",
    Cause.NOT_MATCHED: "The cause is unknown: compare the events in `kvrouter record` with the prompt's tokens.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: its worker, cause and evidence."""

    cause: Cause
    worker: str
    evidence: str
    dp_rank: int | None = None

    @property
    def fix(self) -> str:
        return FIXES[self.cause]

    def as_json(self) -> dict[str, object]:
        """Return the finding with its fix, for scripts."""
        return {
            "cause": self.cause.value,
            "worker": self.worker,
            "dp_rank": self.dp_rank,
            "evidence": self.evidence,
            "fix": self.fix,
        }
