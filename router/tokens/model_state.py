"""The state of one model's tokenizer: its workers, its files, and the results of its trials."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from router.fleet.discovery import WorkerDescription
from router.fleet.worker import Worker
from router.fleet.worker_keys import WorkerKey
from router.tokens.agreement import Agreement, merged
from router.tokens.candidates import Load
from router.tokens.engine_client import EngineClient
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.media_reader import MediaReader
from router.tokens.model_tokenizer import SourceUsage


@dataclass
class TrialRecord:
    """A worker's last trial: its time, the worker's description at that time, and the result."""

    at: float
    description: WorkerDescription | None
    agreement: Agreement | None = None


@dataclass
class ModelState:
    """The state of one model's tokenizer.

    - `problem`: why no local tokenizer is used, or not the likely one.
    - `mismatched`: workers whose usage disagreed with the local tokenizer at their last trial.
    - `logged_route`: the tokenizer route that was logged last.
    """

    name: str
    client: EngineClient
    engine: EngineTokenizer
    workers: dict[str, Worker] = field(default_factory=dict)
    trials: dict[str, TrialRecord] = field(default_factory=dict)
    folder: Path | None = None
    modified: float = 0.0
    loads: list[Load] = field(default_factory=list)
    local: LocalTokenizer | None = None
    media: MediaReader | None = None
    problem: str = ""
    mismatched: set[str] = field(default_factory=set)
    logged_route: str = ""
    usage: SourceUsage = field(default_factory=SourceUsage)
    task: asyncio.Task[None] | None = None

    def urls(self) -> list[str]:
        """Return the workers that can be asked."""
        return [url for url, worker in self.workers.items() if worker.up and worker.trusted and self._asks(url)]

    @property
    def can_ask(self) -> bool:
        """True if engines return the tokens of prompts; false only if each tried one does not."""
        return not self.trials or any(map(self._asks, self.trials))

    def _asks(self, url: str) -> bool:
        """Return whether a worker returns tokens, as far as is known."""
        tried = self.trials.get(url)
        return tried is None or tried.agreement is None or tried.agreement.askable

    def key_of(self, url: str) -> WorkerKey | None:
        """Return a worker's API key; None if it needs none."""
        worker = self.workers.get(url)
        return worker.key if worker else None

    def merged(self) -> Agreement:
        """Return the merged results of all workers: for each kind the worst."""
        return merged(tried.agreement for tried in self.trials.values() if tried.agreement is not None)
