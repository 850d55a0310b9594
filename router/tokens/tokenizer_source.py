"""The source of each model's tokenizer, and trials of whether it agrees with the model's engines.

The files are in the folder that the settings or the worker name, or on the Hugging Face Hub. Each worker is tried with
probes (router/tokens/agreement.py) when it starts, at intervals, and when usage in its responses disagrees with the
local tokenizer. For kinds of prompts that differ, the engines are asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from indexer import Target
from router.apis.requests import ChatPrompt
from router.cache_state.target_audit import TargetAudit
from router.fleet.discovery import ServedModel
from router.fleet.worker import Worker
from router.http.event_loop import end_tasks
from router.settings import ModelSettings, TokenizerSettings
from router.tokens import TokenizerUnavailableError
from router.tokens.agreement import CHECK_SECONDS, Agreement, TokenizerRoute, Trial
from router.tokens.candidates import candidates
from router.tokens.engine_client import EngineClient
from router.tokens.engine_tokenizer import EngineTokenizer
from router.tokens.media_reader import MediaReader
from router.tokens.model_files import fetch_from_hub, is_hub_name
from router.tokens.model_state import ModelState, TrialRecord, tokenizer_findings, tokenizer_report
from router.tokens.model_tokenizer import ModelTokenizer
from router.tokens.permission import Permission, permission
from router.tokens.tokenizers import TOKENIZING_SECONDS, Tokenizers

log = structlog.get_logger()

# The interval of trials in seconds while usage disagrees with the local tokenizer.
_SUSPECTED_SECONDS = 10.0
# The cache of media has this fraction of the cache of texts.
_MEDIA_SHARE = 8
_NOT_LOCAL = (TokenizerRoute.ENGINE, TokenizerRoute.GUESSED, TokenizerRoute.NONE)
_LOG_LINES = {
    "engine": "a worker is asked for the tokens of every prompt",
    "text": "prompts are routed by their text only, because no tokens are available",
}


class TokenizerSource:
    """The tokenizers of all models of the fleet, with their trials."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        models: dict[str, ModelSettings],
        session: aiohttp.ClientSession,
        settings: TokenizerSettings,
        audits: Callable[[], Iterable[tuple[Target, TargetAudit]]] = tuple,
        forwards: bool = False,
    ) -> None:
        """Create a source without models. `forwards`: token ids are sent to workers whose trial allows it."""
        self.forwards = forwards
        self._audits = audits
        self._tokenizers = tokenizers
        self._configured = models
        self._session = session
        self._settings = settings
        self._models: dict[str, ModelState] = {}
        self._served: dict[str, set[str]] = {}  # by worker: the models it served when it last answered
        self._one_at_a_time = asyncio.Lock()

    async def provide(self, worker: Worker, served: ServedModel) -> None:
        """Load the tokenizer of a served model, and start a trial if one is due, when a worker answers."""
        self._forget_former(worker)
        async with self._one_at_a_time:  # loading is not thread-safe
            model = self._models.get(served.model) or await self._begin(worker, served)
            model.workers[worker.url] = worker
            if model.sglang != model.serves_sglang():
                await self._load_for_other_engine(model)
        if model.task is None or model.task.done():
            due = [url for url in list(model.workers) if self._due(model, url)]
            if due:
                model.task = asyncio.create_task(self._try(model, due), name=f"try tokenizer of {model.name}")

    def _forget_former(self, worker: Worker) -> None:
        """Drop models that neither this worker nor any other serves any more."""
        served = worker.models()
        if served == self._served.get(worker.url):
            return
        self._served[worker.url] = served
        for model in [each for each in self._models.values() if worker.url in each.workers]:
            if model.name in served:
                continue
            del model.workers[worker.url]
            model.trials.pop(worker.url, None)
            if not model.workers and model.name not in self._configured:
                if model.task is not None:
                    model.task.cancel()
                del self._models[model.name]
                self._tokenizers.remove(model.name)

    def removed(self, worker: Worker) -> None:
        """Drop the trials of a removed worker."""
        self._served.pop(worker.url, None)
        for model in self._models.values():
            model.workers.pop(worker.url, None)
            if model.trials.pop(worker.url, None) is not None:
                self._use(model)

    def restarted(self, worker: Worker) -> None:
        """Drop the trials of a worker that has a new process, so that it is tried again."""
        if self.forwards:
            for model in self._models.values():
                model.trials.pop(worker.url, None)

    def permission(self, worker: Worker, model: str) -> Permission:
        """Return the kinds of prompts whose ids this worker may receive for a model."""
        state = self._models.get(model)
        if state is None:
            return Permission(reason="the model has no tokenizer")
        return permission(state, self._tokenizers.by_model().get(model), worker)

    def tokenizes_alone(self, model: str, prompt: ChatPrompt) -> bool:
        """Return whether the model's local tokenizer makes the tokens of a prompt without asking an engine."""
        tokenizer = self._tokenizers.by_model().get(model)
        return tokenizer is not None and tokenizer.local is not None and not tokenizer.asks(prompt)

    def count_request(self, worker: Worker, model: str) -> int:
        """Count a request whose ids a worker may receive, and return their number since its first trial."""
        tried = self._models[model].trials[worker.url]
        tried.requests += 1
        return tried.requests

    def miscounted(self, worker: Worker, model: str) -> None:
        """Record that an answer reported another number of prompt tokens than the ids that were sent."""
        state = self._models.get(model)
        tried = state.trials.get(worker.url) if state is not None else None
        if tried is not None and not tried.miscounted:
            tried.miscounted = True
            log.warning("token ids are no longer sent to a worker", worker=worker.name, model=model)

    async def settled(self) -> None:
        """Wait until all running trials end."""
        await asyncio.gather(*(model.task for model in self._models.values() if model.task is not None))

    async def close(self) -> None:
        """Cancel all trials."""
        await end_tasks(model.task for model in self._models.values() if model.task is not None)

    def report(self) -> dict[str, dict[str, Any]]:
        """Return how each model's prompts become tokens: for `/workers`, the page and the doctor."""
        found = tokenizer_report(self._tokenizers, self._models)
        for name, reasons in self.ids_not_sent().items():
            found[name]["ids_not_sent"] = reasons
        return found

    def ids_not_sent(self) -> dict[str, dict[str, str]]:
        """Return by model and worker why no token ids are sent, "" if they are. It is empty if that is off."""
        return {
            model.name: {each.name: self.permission(each, model.name).reason for each in model.workers.values()}
            for model in (self._models.values() if self.forwards else ())
        }

    def findings(self) -> list[dict[str, Any]]:
        """Return the problems of tokenizers; docs/troubleshooting.md explains each."""
        return tokenizer_findings(self._tokenizers, self._models)

    async def _begin(self, worker: Worker, served: ServedModel) -> ModelState:
        client = EngineClient(
            self._session,
            served.model,
            TOKENIZING_SECONDS,
            lambda url: model.key_of(url),
            lambda url: model.engine_of(url),
        )
        model = self._models[served.model] = ModelState(
            served.model, client, EngineTokenizer(client, lambda: model.urls(), self._settings.cache_bytes)
        )
        model.workers[worker.url] = worker
        self._use(model)
        try:
            await self._find_files(model, served)
            await self._load_first(model)
        except BaseException:
            del self._models[served.model]
            self._tokenizers.remove(served.model)
            raise
        model.loading = False
        self._use(model)
        return model

    async def _load_for_other_engine(self, model: ModelState) -> None:
        """Load a model's tokenizer anew for the engine of its workers, and drop all trials of the former one."""
        if model.task is not None:
            await end_tasks([model.task])
        model.trials.clear()
        model.engine.forget()
        await self._load_first(model)
        self._use(model)

    async def _find_files(self, model: ModelState, served: ServedModel) -> None:
        """Find the folder with a model's files: the configured one, else the worker's if it exists on this machine."""
        configured = self._configured.get(served.model, ModelSettings()).tokenizer
        for name in (configured,) if configured else dict.fromkeys((served.root, served.model)):
            if name is None:
                continue
            if await asyncio.to_thread(Path(name).is_dir):
                model.folder = Path(name)
                return
            if is_hub_name(name):
                try:
                    model.folder = await fetch_from_hub(name)
                    return
                except TokenizerUnavailableError as error:
                    model.problem = str(error)
            elif configured:
                model.problem = f"models.{served.model}.tokenizer is {name!r}, which is not a folder"
        if not model.problem:
            model.problem = f"the folder that the worker names ({served.root}) is not on this machine"

    async def _load_first(self, model: ModelState) -> None:
        model.sglang = model.serves_sglang()
        if model.folder is None:
            return
        model.problem, model.local = "", None
        problems: list[str] = []
        try:
            model.modified = await asyncio.to_thread(_modified, model.folder)
            model.loads = candidates(model.folder, model.sglang)
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

    def _due(self, model: ModelState, url: str) -> bool:
        worker, tried = model.workers[url], model.trials.get(url)
        if not worker.up:
            return False
        if tried is None or tried.description is not worker.description:
            return True
        age = time.monotonic() - tried.at
        return age > CHECK_SECONDS or (age > _SUSPECTED_SECONDS and self._mismatched(model, url))

    def _mismatched(self, model: ModelState, url: str) -> bool:
        """Return whether usage in a worker's responses disagrees with the local tokenizer."""
        return any(
            audit.lengths_differ
            for target, audit in self._audits()
            if (target.worker, target.model) == (url, model.name)
        )

    async def _try(self, model: ModelState, urls: list[str]) -> None:
        for url in urls:
            worker = model.workers.get(url)
            if worker is None:
                continue
            before = model.trials.get(url) or TrialRecord(0.0, None)
            tried = model.trials[url] = before.next(time.monotonic(), worker.description)
            self._use(model)
            model.engine.try_again(url)
            mismatched = self._mismatched(model, url)
            newly_mismatched = mismatched and url not in model.mismatched
            (model.mismatched.add if mismatched else model.mismatched.discard)(url)
            try:
                if self.forwards and worker.description is not None:
                    tried.release = await model.client.release(url, worker.description.engine)
                tried.agreement = await self._tried(model, url, mismatched)
                tried.local = model.local
            except TokenizerUnavailableError as error:
                log.info("cannot compare a worker's tokens", worker=worker.name, model=model.name, reason=str(error))
                agrees = False
            else:
                agrees = not tried.agreement.with_route(*_NOT_LOCAL)
            finally:
                tried.ended = True
            self._use(model, suspect=newly_mismatched and agrees)

    async def _tried(self, model: ModelState, url: str, mismatched: bool) -> Agreement:
        """Try a worker, compare the best local tokenizer with it, and return the result."""
        # `/tokenize` does not support families with their own encoders.
        special = model.local is not None and model.local.has_chat_encoder
        trial = Trial(model.client, url, computes=mismatched or special or self.forwards)
        await trial.ask()
        found = await asyncio.to_thread(trial.compare, model.local)
        if not found.with_route(TokenizerRoute.ENGINE, TokenizerRoute.GUESSED):
            return found
        if model.folder is not None and await asyncio.to_thread(_modified, model.folder) != model.modified:
            async with self._one_at_a_time:
                await self._load_first(model)  # the files were replaced too
            found = await asyncio.to_thread(trial.compare, model.local)
        for load in model.loads:
            if not found.with_route(TokenizerRoute.ENGINE, TokenizerRoute.GUESSED):
                break
            try:
                other = await asyncio.to_thread(load, self._settings.cache_bytes)
            except TokenizerUnavailableError:
                continue
            agreement = await asyncio.to_thread(trial.compare, other)
            if agreement.exact > found.exact:
                model.local, found = other, agreement
        return found

    def _use(self, model: ModelState, suspect: bool = False) -> None:
        """Use the model's current state from now on. `suspect`: ask the engine until it was seen to agree."""
        asked = model.merged().with_route(TokenizerRoute.ENGINE)
        engine = model.engine if model.local is not None or model.can_ask else None
        now = self._tokenizers.by_model().get(model.name)
        suspected = suspect or (now is not None and now.suspected)
        current = (model.local, engine, asked, suspected, model.on_trial)
        if now is not None and (now.local, now.engine, now.asked, now.suspected, now.on_trial) == current:
            return
        if now is not None and now.asked != asked:
            model.engine.forget()
            log.info(
                "engines are asked for the tokens of some kinds of prompts", model=model.name, shapes=sorted(asked)
            )
        if model.local is not None and (model.media is None or model.media.local is not model.local):
            limit = self._settings.cache_bytes // _MEDIA_SHARE
            model.media = MediaReader(model.local, model.engine, limit)
        tokenizer = ModelTokenizer(model.local, engine, asked, model.usage, suspected, model.media, model.on_trial)
        self._tokenizers.add(model.name, tokenizer)
        if model.local is None and model.tried and tokenizer.route != model.logged_route:
            model.logged_route = tokenizer.route
            log.info(_LOG_LINES[tokenizer.route], model=model.name, reason=model.problem)


def _modified(folder: Path) -> float:
    try:
        return max(
            (path.stat().st_mtime for path in folder.iterdir() if path.suffix in (".json", ".jinja")), default=0.0
        )
    except OSError as error:
        raise TokenizerUnavailableError(f"{folder}: {error}") from error


async def configured_tokenizers(models: dict[str, ModelSettings], settings: TokenizerSettings) -> Tokenizers:
    """Return the settings' tokenizers, for an indexer without workers. Raises TokenizerUnavailableError."""
    tokenizers = Tokenizers(settings.threads)
    for model, named in models.items():
        if (name := named.tokenizer) is None:
            continue
        if not await asyncio.to_thread(Path(name).is_dir) and is_hub_name(name):
            name = str(await fetch_from_hub(name))
        load = candidates(Path(name))[0]
        tokenizers.add(model, await asyncio.to_thread(load, settings.cache_bytes))
    return tokenizers
