"""Where a model's tokenizer comes from, and whether it reads prompts as the model's engines do.

Its files are in the folder that the settings or its worker name, or on the Hugging Face Hub. Each worker is tried with
probes (router/tokens/agreement.py) when it comes up, again and again after that, and when its answers show that prompts
are read otherwise than here: what does not agree is asked of the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from indexer import Target
from router.cache_state.hit_audit import TargetAudit
from router.fleet.discovery import ServedModel, WorkerDescription
from router.fleet.fleet import Worker
from router.fleet.worker_keys import WorkerKey
from router.http.event_loop import end_tasks
from router.settings import ModelSettings, TokenizerSettings
from router.tokens.agreement import Agreement, Trial, Way, merged
from router.tokens.candidates import Load, candidates
from router.tokens.engine_client import EngineClient
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.errors import TokenizerUnavailableError
from router.tokens.hub import fetched, is_hub_name
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.media_reader import MediaReader
from router.tokens.model_tokenizer import ModelTokenizer, Usage
from router.tokens.tokenizers import Tokenizers

log = structlog.get_logger()

# While answers show that prompts are read otherwise than here, a worker is tried this often, in seconds.
_SUSPECTED_SECONDS = 10.0
# What is kept of media is this part of what is kept of texts.
_MEDIA_SHARE = 8


@dataclass
class _Tried:
    """When a worker was tried last, and as what it described itself then."""

    at: float
    description: WorkerDescription | None
    agreement: Agreement | None = None


@dataclass
class _Model:
    """What is known of one model.

    `problem`: why no reading of its files is used, or not the likely one. `misled`: the workers whose answers told of
    other prompts than were read here when they were tried last. `told`: by which way its prompts become tokens, as the
    log has it.
    """

    name: str
    client: EngineClient
    engine: EngineTokenizer
    workers: dict[str, Worker] = field(default_factory=dict)
    tried: dict[str, _Tried] = field(default_factory=dict)
    folder: Path | None = None
    written: float = 0.0
    loads: list[Load] = field(default_factory=list)
    local: LocalTokenizer | None = None
    media: MediaReader | None = None
    problem: str = ""
    misled: set[str] = field(default_factory=set)
    told: str = ""
    usage: Usage = field(default_factory=Usage)
    task: asyncio.Task[None] | None = None

    def urls(self) -> list[str]:
        """The workers that can be asked."""
        return [url for url, worker in self.workers.items() if worker.up and worker.trusted and self._asks(url)]

    @property
    def can_ask(self) -> bool:
        """Whether engines tell the tokens of prompts, as far as is known: not, when each that was tried does not."""
        return not self.tried or any(map(self._asks, self.tried))

    def _asks(self, url: str) -> bool:
        """Whether a worker tells tokens, as far as is known."""
        tried = self.tried.get(url)
        return tried is None or tried.agreement is None or tried.agreement.askable

    def key_of(self, url: str) -> WorkerKey | None:
        """What a worker wants to be shown."""
        worker = self.workers.get(url)
        return worker.key if worker else None

    def merged(self) -> Agreement:
        """What was found of all workers: of each shape the worst."""
        return merged(tried.agreement for tried in self.tried.values() if tried.agreement is not None)


class TokenizerSource:
    """Finds a tokenizer for every model the fleet serves, and tries it. `close` ends what it has begun."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        models: dict[str, ModelSettings],
        session: aiohttp.ClientSession,
        settings: TokenizerSettings,
    ) -> None:
        self.audits: Callable[[], Iterable[tuple[Target, TargetAudit]]] = tuple
        self._tokenizers = tokenizers
        self._configured = models
        self._session = session
        self._settings = settings
        self._models: dict[str, _Model] = {}
        self._served: dict[str, set[str]] = {}  # by worker, what it served when it answered last
        self._one_at_a_time = asyncio.Lock()

    async def provide(self, worker: Worker, served: ServedModel) -> None:
        """Make sure that a model which an answering worker serves has a tokenizer; called each time it answers."""
        async with self._one_at_a_time:  # workers of one model ask for the same, and loading is not thread-safe
            model = self._models.get(served.model) or await self._begin(served)
        self._forget_former(worker)
        model.workers[worker.url] = worker
        if model.task is None or model.task.done():
            due = [url for url in list(model.workers) if self._due(model, url)]
            if due:
                model.task = asyncio.create_task(self._try(model, due), name=f"try tokenizer of {model.name}")

    def _forget_former(self, worker: Worker) -> None:
        """Forget the models that a worker no longer serves, nor any other: it may name others whenever it is asked."""
        served = worker.models()
        if served == self._served.get(worker.url):
            return
        self._served[worker.url] = served
        for model in [each for each in self._models.values() if worker.url in each.workers]:
            if model.name in served:
                continue
            del model.workers[worker.url]
            model.tried.pop(worker.url, None)
            if not model.workers and model.name not in self._configured:
                if model.task is not None:
                    model.task.cancel()
                del self._models[model.name]
                self._tokenizers.remove(model.name)

    def removed(self, worker: Worker) -> None:
        """A worker is gone."""
        self._served.pop(worker.url, None)
        for model in self._models.values():
            model.workers.pop(worker.url, None)
            if model.tried.pop(worker.url, None) is not None:
                self._use(model)

    async def settled(self) -> None:
        """Wait until all that is being tried was tried."""
        await asyncio.gather(*(model.task for model in self._models.values() if model.task is not None))

    async def close(self) -> None:
        """End what was begun."""
        await end_tasks(model.task for model in self._models.values() if model.task is not None)

    def report(self) -> dict[str, dict[str, Any]]:
        """How each model's prompts become tokens: for `/workers`, the page and the doctor."""
        found = {}
        for name, tokenizer in self._tokenizers.by_model().items():
            model = self._models.get(name)
            merged = model.merged() if model else Agreement()
            usage = tokenizer.usage
            found[name] = {
                "way": tokenizer.way,
                "reading": tokenizer.local.way if tokenizer.local else None,
                "compared_with": merged.truth.value,
                "suspected": tokenizer.suspected,
                "shapes": {shape.value: report.way.value for shape, report in merged.shapes.items()},
                "differences": {
                    shape.value: each.difference for shape, each in merged.shapes.items() if each.difference
                },
                "media": tokenizer.media.report() if tokenizer.media else None,
                "prompts": {path.value: usage.prompts[path] for path in usage.seconds},
                "milliseconds": {
                    path.value: round(1000 * seconds / usage.prompts[path], 3)
                    for path, seconds in usage.seconds.items()
                    if usage.prompts[path]
                },
            }
        return found

    def findings(self) -> list[dict[str, Any]]:
        """What is wrong with how prompts become tokens; docs/troubleshooting.md says what to do."""
        found: list[dict[str, Any]] = []
        for model in self._models.values():
            if model.local is None:
                detail = (
                    f"{model.problem or 'no files'}: set models.{model.name}.tokenizer to the model's folder or name"
                )
                if model.can_ask:
                    asked = "every prompt is asked of a worker, which takes longer"
                    found.append(_about(model, "tokenizer_missing", f"{asked}: {detail}"))
                else:
                    by_text = "its workers tell no tokens, so prompts are routed by their text alone"
                    found.append(_about(model, "prompts_by_text", f"{by_text}: {detail}"))
            elif model.problem:
                found.append(_about(model, "tokenizer_incomplete", model.problem))
            merged = model.merged()
            for way, finding in _FINDINGS.items():
                shapes = sorted(merged.of_way(way))
                if shapes and model.local is not None:
                    detail = f"{', '.join(shapes)}; {shapes[0]} {merged.shapes[shapes[0]].difference}"
                    found.append(_about(model, finding, detail))
            tokenizer = self._tokenizers.by_model().get(model.name)
            if tokenizer is not None and tokenizer.suspected:
                detail = "answers tell of other prompts than are read here, so the engine is asked about all"
                found.append(_about(model, "tokenizer_suspected", detail))
        return found

    async def _begin(self, served: ServedModel) -> _Model:
        client = EngineClient(self._session, served.model, self._settings.timeout, lambda url: model.key_of(url))
        model = _Model(served.model, client, EngineTokenizer(client, lambda: model.urls(), self._settings.cache_bytes))
        await self._find_files(model, served)
        await self._load_first(model)
        self._models[served.model] = model
        self._use(model)
        return model

    async def _find_files(self, model: _Model, served: ServedModel) -> None:
        """The folder with a model's files: what the settings name, else what the worker says, if it can be had here."""
        configured = self._configured.get(served.model, ModelSettings()).tokenizer
        for name in (configured,) if configured else dict.fromkeys((served.root, served.model)):
            if name is None:
                continue
            if await asyncio.to_thread(Path(name).is_dir):
                model.folder = Path(name)
                return
            if is_hub_name(name) and self._settings.hub_timeout:
                try:
                    model.folder = await fetched(name, self._settings.hub_timeout)
                    return
                except TokenizerUnavailableError as error:
                    model.problem = str(error)
            elif configured:
                model.problem = f"models.{served.model}.tokenizer is {name!r}, which is no folder"
        if not model.problem:
            model.problem = f"the folder that the worker names ({served.root}) is not on this machine"

    async def _load_first(self, model: _Model) -> None:
        """Load the likely reading of the files: the first that can be loaded."""
        if model.folder is None:
            return
        model.problem, model.local = "", None
        problems: list[str] = []
        try:
            model.written = await asyncio.to_thread(_written, model.folder)
            model.loads = candidates(model.folder)
        except TokenizerUnavailableError as error:
            model.loads, problems = [], [str(error)]
        for load in model.loads:
            try:
                model.local = await asyncio.to_thread(load, self._settings.cache_bytes)
                break
            except TokenizerUnavailableError as error:
                problems.append(str(error))
        model.problem = "; ".join(problems)
        if problems:
            log.warning("tokenizer not loaded", model=model.name, reason=model.problem)

    def _due(self, model: _Model, url: str) -> bool:
        """Whether a worker is to be tried now."""
        worker, tried = model.workers[url], model.tried.get(url)
        if not worker.up:
            return False
        if tried is None or tried.description is not worker.description:
            return True
        age = time.monotonic() - tried.at
        return age > self._settings.check_interval or (age > _SUSPECTED_SECONDS and self._misled(model, url))

    def _misled(self, model: _Model, url: str) -> bool:
        """Whether the answers of a worker tell of other prompts than are read here."""
        return any(
            audit.lengths_differ
            for target, audit in self.audits()
            if (target.worker, target.model) == (url, model.name)
        )

    async def _try(self, model: _Model, urls: list[str]) -> None:
        """Try workers, and use what agrees with all."""
        for url in urls:
            worker = model.workers.get(url)
            if worker is None:
                continue
            tried = model.tried[url] = _Tried(time.monotonic(), worker.description)
            model.engine.try_again(url)
            misled = self._misled(model, url)
            newly_misled = misled and url not in model.misled
            (model.misled.add if misled else model.misled.discard)(url)
            try:
                tried.agreement = await self._tried(model, url, misled)
            except TokenizerUnavailableError as error:
                log.info(
                    "a worker's prompts cannot be compared", worker=worker.name, model=model.name, reason=str(error)
                )
                continue
            self._use(model, newly_misled and not tried.agreement.of_way(Way.ENGINE, Way.GUESSED, Way.NONE))

    async def _tried(self, model: _Model, url: str, misled: bool) -> Agreement:
        """What a worker makes of the probes, beside what the best reading of the model's files makes of them."""
        # Families with encoders of their own are not known to `/tokenize`.
        special = model.local is not None and model.local.has_chat_encoder
        trial = Trial(model.client, url, computes=misled or special)
        await trial.ask()
        found = await asyncio.to_thread(trial.compare, model.local)
        if not found.of_way(Way.ENGINE, Way.GUESSED):
            return found
        if model.folder is not None and await asyncio.to_thread(_written, model.folder) != model.written:
            async with self._one_at_a_time:
                await self._load_first(model)  # the model was replaced here, too
            found = await asyncio.to_thread(trial.compare, model.local)
        for load in model.loads:
            if not found.of_way(Way.ENGINE, Way.GUESSED):
                break
            try:
                other = await asyncio.to_thread(load, self._settings.cache_bytes)
            except TokenizerUnavailableError:
                continue
            agreement = await asyncio.to_thread(trial.compare, other)
            if agreement.exact > found.exact:
                model.local, found = other, agreement
        return found

    def _use(self, model: _Model, suspect: bool = False) -> None:
        """Use what is known of a model from now on. `suspect`: ask the engine until it was seen to agree."""
        asked = model.merged().of_way(Way.ENGINE)
        engine = model.engine if model.local is not None or model.can_ask else None
        now = self._tokenizers.by_model().get(model.name)
        suspected = suspect or (now is not None and now.suspected)
        if now is not None and (now.local, now.engine, now.asked, now.suspected) == (
            model.local,
            engine,
            asked,
            suspected,
        ):
            return
        if now is not None and now.asked != asked:
            model.engine.forget()
            log.info("prompts are asked of engines by shape", model=model.name, shapes=sorted(asked))
        timeout, interval = self._settings.media_timeout, self._settings.check_interval
        if timeout and model.local is not None and (model.media is None or model.media.local is not model.local):
            limit = self._settings.cache_bytes // _MEDIA_SHARE
            model.media = MediaReader(model.local, model.engine, limit, timeout, interval)
        tokenizer = ModelTokenizer(model.local, engine, asked, model.usage, suspected, model.media)
        self._tokenizers.add(model.name, tokenizer)
        if model.local is None and model.tried and tokenizer.way != model.told:
            model.told = tokenizer.way
            log.info(_TOLD[tokenizer.way], model=model.name, reason=model.problem)


_TOLD = {
    "engine": "every prompt is asked of a worker",
    "text": "prompts are routed by their text alone: no tokens of them can be had",
}
_FINDINGS = {Way.ENGINE: "prompts_asked", Way.GUESSED: "prompts_differ"}


def _about(model: _Model, finding: str, detail: str) -> dict[str, Any]:
    return {"finding": finding, "model": model.name, "detail": detail}


def _written(folder: Path) -> float:
    """When the latest of a model's small files was written."""
    try:
        return max(
            (path.stat().st_mtime for path in folder.iterdir() if path.suffix in (".json", ".jinja")), default=0.0
        )
    except OSError as error:
        raise TokenizerUnavailableError(f"{folder}: {error}") from error


async def configured_tokenizers(models: dict[str, ModelSettings], settings: TokenizerSettings) -> Tokenizers:
    """The tokenizers that the settings name, for an indexer that has no workers to ask.

    Raises TokenizerUnavailableError for one that cannot be loaded.
    """
    tokenizers = Tokenizers(settings.threads, settings.timeout)
    for model, named in models.items():
        if (name := named.tokenizer) is None:
            continue
        if not await asyncio.to_thread(Path(name).is_dir) and is_hub_name(name) and settings.hub_timeout:
            name = str(await fetched(name, settings.hub_timeout))
        load = candidates(Path(name))[0]
        tokenizers.add(model, await asyncio.to_thread(load, settings.cache_bytes))
    return tokenizers
