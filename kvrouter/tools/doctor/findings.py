"""The doctor's findings, by the names that the router's findings have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.observability.advice import about, advice


class Cause(StrEnum):
    """A cause of zero or low hits."""

    WORKER_DOWN = "worker_down"
    NO_MODELS = "no_models"
    WORKER_KEY = "worker_key"
    REQUESTS_REFUSED = "requests_refused"
    EVENTS_OFF = "events_off"
    ENDPOINT_UNREACHABLE = "endpoint_unreachable"
    NO_PUBLISHER = "no_publisher"
    STREAM_SILENT = "stream_silent"
    TOPIC_MISMATCH = "topic_mismatch"
    EVENTS_UNREADABLE = "events_unreadable"
    EVENTS_WITHOUT_TOKENS = "events_without_tokens"
    BLOCK_SIZE = "block_size"
    TOKENS_DIFFER = "tokens_differ"
    TOKENIZER_MISSING = "tokenizer_missing"
    PROMPTS_BY_TEXT = "prompts_by_text"
    TOKENIZER_INCOMPLETE = "tokenizer_incomplete"
    PROMPTS_ASKED = "prompts_asked"
    PROMPTS_DIFFER = "prompts_differ"
    IDS_MISCOUNTED = "ids_miscounted"
    TOKENIZER_SUSPECTED = "tokenizer_suspected"
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: its worker, cause and evidence."""

    cause: Cause
    worker: str
    evidence: str
    dp_rank: int | None = None

    @property
    def fix(self) -> str:
        """The action that ends the finding."""
        return advice(self.cause).action

    def as_json(self) -> dict[str, object]:
        """Return the finding with its fix, for scripts."""
        return {
            "cause": self.cause.value,
            "worker": self.worker,
            "dp_rank": self.dp_rank,
            "evidence": self.evidence,
            "fix": self.fix,
            "severity": advice(self.cause).severity.value,
            "link": about(self.cause)["link"],
        }
