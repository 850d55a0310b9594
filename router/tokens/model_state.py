"""The state of each model's tokenizer: its workers, files and trials, and the reports on it.

The reports are for `/workers`, the page, the doctor and Prometheus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.fleet.discovery import Engine, WorkerDescription
from router.fleet.worker import Worker
from router.fleet.worker_keys import WorkerKey
from router.tokens.agreement import Agreement, TokenizerRoute, merged
from router.tokens.candidates import Load
from router.tokens.engine_client import EngineClient, Release
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.media_reader import MediaReader
from router.tokens.model_tokenizer import TokenizerUsage
from router.tokens.tokenizers import Tokenizers


@dataclass
class TrialRecord:
    """A worker's last trial.

    - `agreement`: the result; None if the worker did not answer.
    - `ended`: whether a trial with this description has ended.
    - `local`: the tokenizer that the result is about.
    - `release`: the engine's release, if it is needed.
    - `requests`: the number of requests whose ids the worker could receive.
    - `miscounted`: whether an answer reported another number of prompt tokens than the ids that were sent.
    """

    at: float
    description: WorkerDescription | None
    agreement: Agreement | None = None
    ended: bool = False
    local: LocalTokenizer | None = None
    release: Release = field(default_factory=Release)
    requests: int = 0
    miscounted: bool = False

    def next(self, at: float, description: WorkerDescription | None) -> TrialRecord:
        """Return the record of the next trial. It keeps the result while the description is the same."""
        return replace(self, at=at) if description is self.description else TrialRecord(at, description)


@dataclass
class ModelState:
    """The state of one model's tokenizer.

    - `loading`: whether its files are still read.
    - `sglang`: whether the local tokenizer returns the tokens of SGLang, not those of vLLM.
    - `problem`: why no local tokenizer is used, or not the likely one.
    - `mismatched`: workers whose usage disagreed with the local tokenizer at their last trial.
    """

    name: str
    client: EngineClient
    engine: EngineTokenizer
    workers: dict[str, Worker] = field(default_factory=dict)
    trials: dict[str, TrialRecord] = field(default_factory=dict)
    folder: Path | None = None
    modified: float = 0.0
    loading: bool = True
    sglang: bool = False
    loads: list[Load] = field(default_factory=list)
    local: LocalTokenizer | None = None
    media: MediaReader | None = None
    problem: str = ""
    mismatched: set[str] = field(default_factory=set)
    logged_route: str = ""
    usage: TokenizerUsage = field(default_factory=TokenizerUsage)
    task: asyncio.Task[None] | None = None

    def urls(self) -> list[str]:
        """Return the workers that can be asked."""
        return [url for url, worker in self.workers.items() if worker.up and worker.trusted and self._asks(url)]

    @property
    def can_ask(self) -> bool:
        """True if engines return the tokens of prompts; false only if each tried one does not."""
        return not self.trials or any(map(self._asks, self.trials))

    @property
    def tried(self) -> bool:
        """True if a trial of any worker has ended."""
        return any(tried.ended for tried in self.trials.values())

    @property
    def on_trial(self) -> bool:
        """True if a local tokenizer is loaded or compared, and no trial has ended."""
        return (self.loading or self.local is not None) and not self.tried

    def _asks(self, url: str) -> bool:
        """Return whether a worker returns tokens, as far as is known."""
        tried = self.trials.get(url)
        return tried is None or tried.agreement is None or tried.agreement.askable

    def serves_sglang(self) -> bool:
        """Return whether all its workers are SGLang's, as far as they are known."""
        engines = {engine for url in self.workers if (engine := self.engine_of(url)) is not None}
        return engines == {Engine.SGLANG}

    def engine_of(self, url: str) -> Engine | None:
        """Return a worker's engine; None if it is unknown."""
        worker = self.workers.get(url)
        return worker.description.engine if worker is not None and worker.description is not None else None

    def key_of(self, url: str) -> WorkerKey | None:
        """Return a worker's API key; None if it needs none."""
        worker = self.workers.get(url)
        return worker.key if worker else None

    def merged(self) -> Agreement:
        """Return the merged results of all workers: for each kind the worst."""
        return merged(tried.agreement for tried in self.trials.values() if tried.agreement is not None)


_FINDINGS = {TokenizerRoute.ENGINE: "prompts_asked", TokenizerRoute.GUESSED: "prompts_differ"}


def tokenizer_report(tokenizers: Tokenizers, models: Mapping[str, ModelState]) -> dict[str, dict[str, Any]]:
    """Return how each model's prompts become tokens, for `/workers`, the page and the doctor."""
    found = {}
    for name, tokenizer in tokenizers.by_model().items():
        model = models.get(name)
        merged = model.merged() if model else Agreement()
        usage = {source.value: each for source, each in tokenizer.usage.by_source().items()}
        found[name] = {
            "source": tokenizer.route,
            "reading": tokenizer.local.method if tokenizer.local else None,
            "compared_with": merged.reference.value,
            "suspected": tokenizer.suspected,
            "on_trial": tokenizer.on_trial,
            "probes": {kind.value: report.route.value for kind, report in merged.probes.items()},
            "differences": {kind.value: each.difference for kind, each in merged.probes.items() if each.difference},
            "media": tokenizer.media.report() if tokenizer.media else None,
            "prompts": {source: each.prompts for source, each in usage.items()},
            "milliseconds": {
                source: round(1000 * each.seconds / each.prompts, 3) for source, each in usage.items() if each.prompts
            },
        }
    return found


def tokenizer_findings(tokenizers: Tokenizers, models: Mapping[str, ModelState]) -> list[dict[str, Any]]:
    """Return the problems of tokenizers; docs/troubleshooting.md explains each."""
    found: list[dict[str, Any]] = []
    for model in models.values():
        if model.local is None:
            detail = f"{model.problem or 'no files'}: set models.{model.name}.tokenizer to the model's folder or name"
            if model.can_ask:
                asked = "a worker is asked for the tokens of every prompt, which takes longer"
                found.append(_about(model, "tokenizer_missing", f"{asked}: {detail}"))
            else:
                by_text = "its workers return no tokens, so prompts are routed by their text only"
                found.append(_about(model, "prompts_by_text", f"{by_text}: {detail}"))
        elif model.problem:
            found.append(_about(model, "tokenizer_incomplete", model.problem))
        merged = model.merged()
        for route, finding in _FINDINGS.items():
            kinds = sorted(merged.with_route(route))
            if kinds and model.local is not None:
                detail = f"{', '.join(kinds)}; {kinds[0]} {merged.probes[kinds[0]].difference}"
                found.append(_about(model, finding, detail))
        for url, tried in model.trials.items():
            if tried.miscounted:
                detail = (
                    f"{model.workers[url].name} counted other prompt tokens than it was sent, so it receives no ids"
                )
                found.append(_about(model, "ids_miscounted", detail))
        tokenizer = tokenizers.by_model().get(model.name)
        if tokenizer is not None and tokenizer.suspected:
            detail = "usage in responses disagrees with the local tokenizer, so the engine is asked about every prompt"
            found.append(_about(model, "tokenizer_suspected", detail))
    return found


def _about(model: ModelState, finding: str, detail: str) -> dict[str, Any]:
    return {"finding": finding, "model": model.name, "detail": detail}


class TokenizerCollector(Collector):
    """The metrics of tokenizers, computed when they are scraped."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers

    def collect(self) -> Iterator[Metric]:
        """Yield the route of each model, the prompts and seconds by source, and the size of the caches."""
        by_source = ["model", "source"]
        gauge = GaugeMetricFamily(
            "kvrouter_tokenizer",
            "1 for the current source of a model's token ids: local, engine, mixed or text",
            labels=by_source,
        )
        asked = GaugeMetricFamily(
            "kvrouter_tokenizer_probes",
            "Kinds of prompts for which engines are asked for token ids",
            labels=["model"],
        )
        cache = GaugeMetricFamily(
            "kvrouter_tokenizer_cache_bytes", "Bytes of cached prompts of the tokenizer", labels=["model"]
        )
        prompts = CounterMetricFamily(
            "kvrouter_tokenizer_prompts", "Requests whose prompts were tokenized, by source", labels=by_source
        )
        seconds = CounterMetricFamily(
            "kvrouter_tokenizer_seconds", "Seconds spent on tokenizing prompts, by source", labels=by_source
        )
        for model, tokenizer in self._tokenizers.by_model().items():
            gauge.add_metric([model, tokenizer.route], 1)
            asked.add_metric([model], len(tokenizer.asked))
            cache.add_metric([model], tokenizer.cached_bytes)
            for source, usage in tokenizer.usage.by_source().items():
                prompts.add_metric([model, source.value], usage.prompts)
                seconds.add_metric([model, source.value], usage.seconds)
        yield from (gauge, asked, cache, prompts, seconds)
