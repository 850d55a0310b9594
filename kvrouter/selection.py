"""The public interface to choose workers without a proxy: docs/embed.md.

A `Selector` has the index, the policy and the load of the proxy, without its server. The program that embeds it sends
the requests itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from http_api.errors import RequestError
from kvevents import EventSource
from router.admission.admission import Admission
from router.apis.agent_hints import AgentHints
from router.apis.endpoints import CHAT, read_request
from router.apis.identities import Identity
from router.apis.requests import RoutedRequest, TokenPrompts
from router.app.embedded_index import running_indexer
from router.app.subscriptions import subscribe_admission, subscribe_routing
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.build import build_fleet
from router.fleet.discovery import MOST_RANKS, ServedModel
from router.fleet.event_streams import WorkerStreams
from router.fleet.fleet import Fleet
from router.fleet.prober import Prober
from router.fleet.worker import Worker
from router.load.target_load import LoadTable
from router.prediction.slo import SLO
from router.reservations.declared_workers import DeclaredWorkers
from router.reservations.reservations import EXPIRY, Reservation, Reservations
from router.reservations.selection_service import SelectionService
from router.reservations.worker_catalogue import WorkerCatalogue
from router.routing.assignment import Selection
from router.routing.build import Routing, build_cache_state, build_routing, build_state
from router.settings import Settings
from router.sharing import build_sharing
from router.tokens.tokenizer_source import TokenizerSource
from router.tokens.tokenizers import Tokenizers
from router.upstream.build import client_session

__all__ = [
    "VERSION",
    "Load",
    "NoWorker",
    "Prompt",
    "Reservation",
    "Saturated",
    "Selection",
    "SelectionError",
    "Selector",
    "Stream",
    "UnknownModel",
    "UnknownWorker",
]

# Incremented when a name is removed, or changes its meaning.
VERSION: Final = 1
# The program names its workers as a settings file does.
_SOURCE = "config"

Stream = EventSource


class SelectionError(Exception):
    """An error of a selector that is no mistake of the caller. Mistakes are ValueErrors."""


class NoWorker(SelectionError):  # noqa: N818 - a public name
    """No worker of the model, or of the allowed ones, is left."""


class UnknownModel(SelectionError):  # noqa: N818
    """No worker serves the model or adapter."""


class UnknownWorker(SelectionError):  # noqa: N818
    """The selector has no worker with the id."""


class Saturated(SelectionError):  # noqa: N818
    """All targets are at their limits. `retry_after`: seconds after which the caller may try again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[Saturated], tuple[str, float]]:
        return Saturated, (str(self), self.retry_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt to choose a worker for: either `token_ids`, or the `body` of a request to `path`.

    - `model`: the served model; None: the body names it.
    - `adapter`: the LoRA adapter; None without one.
    - `cache_salt`: prompts with different salts share no blocks.
    - `session`, `parent`: the chain of prompts that it belongs to, and the session that started that one.
    - `final`: whether it is the last request of its session; None: not known.
    - `priority`: lower is sooner.
    - `output_tokens`: the expected tokens of its answer; None: not known.
    - `ttft`, `tpot`: its SLO in seconds; None without one.
    """

    model: str | None = None
    token_ids: Sequence[int] | None = None
    body: Mapping[str, Any] | bytes | None = None
    path: str = CHAT
    adapter: str | None = None
    cache_salt: str | None = None
    session: str | None = None
    parent: str | None = None
    final: bool | None = None
    priority: int = 0
    output_tokens: int | None = None
    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        if (self.token_ids is None) is (self.body is None):
            raise ValueError("Set one of token_ids and body.")
        if self.token_ids is not None and self.model is None:
            raise ValueError("model: token_ids need the name of their model.")
        for name, value in (("ttft", self.ttft), ("tpot", self.tpot)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value} is not positive.")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one DP rank: its requests, its uncached tokens without a first token, and all tokens in flight."""

    requests: int
    pending: int
    context: int


class Selector:
    """Chooses workers for requests, and holds their load. It is an async context manager.

    Its methods belong to the event loop that entered it. From other threads, call
    `asyncio.run_coroutine_threadsafe(selector.reserve(...), selector.loop)`. Reservations may be used in any thread.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, settings: Settings | Mapping[str, Any] | None = None) -> None:
        """Prepare a selector. `settings`: those of the router, or its sections; None: the defaults."""
        self._settings = settings if isinstance(settings, Settings) else Settings(**dict(settings or {}))
        if self._settings.workers:
            raise ValueError("workers: a selector does not probe. Add each worker by upsert_worker.")
        self._stack = AsyncExitStack()
        self._fleet: Fleet
        self._routing: Routing
        self._reservations: Reservations
        self._declared: DeclaredWorkers
        self._service: SelectionService

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        settings = self._settings
        async with AsyncExitStack() as stack:
            indexer = stack.enter_context(running_indexer(settings))
            self._fleet = fleet = build_fleet(settings, indexer)
            networks = AllowedNetworks(settings.fleet.allowed_networks, fleet.is_untrusted_host)
            session = await stack.enter_async_context(client_session(settings.upstream, networks))
            cache_state = build_cache_state(indexer)
            tokenizers = Tokenizers(settings.tokenizer.threads, most_characters=settings.limits.characters)
            stack.push_async_callback(tokenizers.close)
            source = TokenizerSource(
                tokenizers, settings.models, session, settings.tokenizer, cache_state.audit.audits, forwards=False
            )
            stack.push_async_callback(source.close)
            load = LoadTable()
            sharing = build_sharing(settings, load, None)
            state = build_state(settings, fleet, indexer, load, sharing, cache_state)
            self._routing = routing = build_routing(settings, state, fleet, indexer, tokenizers, session=session)
            late_binding = state.policy.spec.late_binding
            admission = Admission(
                routing.selector, routing.placement, settings.admission, late_binding, gate=state.gate
            )
            self._reservations = Reservations(fleet, routing, admission, EXPIRY)
            stack.callback(self._reservations.close)

            async def provide(worker: Worker, model: ServedModel) -> None:
                configured = settings.models.get(model.name)
                if configured is not None and configured.tokenizer is not None:
                    await source.provide(worker, model)

            prober = Prober(fleet, settings.fleet, session, WorkerStreams(indexer, networks), provide)
            self._declared = DeclaredWorkers(fleet, prober, _SOURCE, provide)
            catalogue = WorkerCatalogue(fleet, indexer, self._declared)
            self._service = SelectionService(indexer, routing, self._reservations, catalogue)
            subscribe_routing(routing, fleet)
            subscribe_admission(admission, routing, fleet)
            fleet.on_removed += [self._reservations.worker_removed, source.removed]
            sharing.start()
            stack.push_async_callback(sharing.stop)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all reservations and everything that runs. Only the first call counts."""
        await self._stack.aclose()

    @property
    def service(self) -> SelectionService:
        """Dynamo's selection service over this selector, for `kvrouter.adapters.dynamo`."""
        return self._service

    # The workers

    async def upsert_worker(
        self,
        id: str,
        *,
        model: str,
        url: str | None = None,
        adapters: Sequence[str] = (),
        block_size: int | None = None,
        capacity: int | None = None,
        streams: Sequence[Stream] = (),
        dp_size: int = 1,
        role: str = "both",
        weight: float = 1.0,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add a worker, or replace its description. It may be chosen when this returns.

        - `id`: 1 to 253 letters, digits and `._:@-`.
        - `url`: the URL of its server; None: it has none. Nothing is sent there.
        - `adapters`: the LoRA adapters that it serves.
        - `block_size`: tokens of a block; None: its events report it.
        - `capacity`: the blocks of each rank's KV cache; None: not known, so that a rank counts as full once it evicts.
        - `streams`: its event streams. Without them, the prompts that it was sent predict what it has cached.
        - `dp_size`: the number of its DP ranks.

        Raises ValueError, which names the wrong field.
        """
        if not 1 <= dp_size <= MOST_RANKS:
            raise ValueError(f"dp_size: {dp_size} is not from 1 to {MOST_RANKS}.")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity: {capacity} is less than 1 block.")
        await self._declared.upsert(
            id,
            model,
            url=url,
            adapters={name: name for name in adapters},
            block_size=block_size,
            capacity=capacity,
            streams=streams,
            ranks=range(dp_size),
            role=role,
            weight=weight,
            labels=labels,
        )

    async def delete_worker(self, id: str) -> None:
        """Remove a worker, and end its reservations. Raises UnknownWorker."""
        self._worker(id)
        self._declared.remove(id)

    def pause(self, id: str) -> None:
        """Send a worker no new requests. Raises UnknownWorker."""
        self._fleet.drain(self._worker(id), True)

    def resume(self, id: str) -> None:
        """Send a paused worker requests again. Raises UnknownWorker."""
        self._fleet.drain(self._worker(id), False)

    def forget(self, id: str) -> None:
        """Forget what a worker has cached, because its weights or its cache were replaced. Raises UnknownWorker."""
        self._routing.placement.forget(self._worker(id))

    def workers(self) -> list[str]:
        """Return the ids of all workers."""
        return list(self._declared)

    # The choice

    async def select(self, prompt: Prompt, *, allowed: Collection[str] | None = None) -> Selection:
        """Return the selection for a prompt, whatever the load. Nothing is reserved.

        - `allowed`: the ids of the workers that may be chosen; None: any.

        Raises NoWorker, UnknownModel, or ValueError for a prompt that cannot be read.
        """
        with _own_errors():
            request, size = _request(prompt)
            return await self._reservations.select(request, self._excluded(allowed), _slo(prompt), size)

    async def reserve(
        self,
        prompt: Prompt,
        *,
        id: str | None = None,
        allowed: Collection[str] | None = None,
        wait: float = 0.0,
        expiry: float = EXPIRY,
    ) -> Reservation:
        """Choose a worker for a prompt, and reserve its load in the same step.

        - `id`: the id of the reservation; None: a new one.
        - `allowed`: the ids of the workers that may be chosen; None: any.
        - `wait`: seconds to wait in the queue for capacity.
        - `expiry`: seconds without a report after which the reservation ends.

        Raises NoWorker, Saturated, UnknownModel, or ValueError, such as for an id that is held.
        """
        with _own_errors():
            request, size = _request(prompt)
            held = await self._reservations.reserve(
                request, id, self._excluded(allowed), wait=wait, slo=_slo(prompt), size=size, expiry=expiry
            )
        if allowed is not None and held.worker.name not in allowed:  # added while the request waited
            held.drop()
            raise NoWorker("None of the allowed workers can be reached.")
        return held

    def reservation(self, id: str) -> Reservation | None:
        """Return the reservation with an id; None if it does not exist."""
        return self._reservations.get(id)

    def loads(self) -> dict[str, list[Load]]:
        """Return the load of each worker by its DP ranks."""
        table = self._routing.state.load
        found: dict[str, list[Load]] = {}
        for worker in self._fleet.workers:
            ranks = [table.of(worker.url, rank) for rank in worker.ranks()]
            found[worker.name] = [Load(load.requests, load.pending, load.context) for load in ranks]
        return found

    def _worker(self, id: str) -> Worker:
        worker = self._declared.get(id)
        if worker is None:
            raise UnknownWorker(f"Worker {id!r} is unknown. Add it by upsert_worker.")
        return worker

    def _excluded(self, allowed: Collection[str] | None) -> list[Worker]:
        return [] if allowed is None else [each for each in self._fleet.workers if each.name not in allowed]


def _request(prompt: Prompt) -> tuple[RoutedRequest, int]:
    """Return a prompt as routing reads it, and the bytes of its body. Raises RequestError (400)."""
    if prompt.token_ids is not None:
        tokens = TokenPrompts([list(prompt.token_ids)], param="token_ids")
        request, size = RoutedRequest(prompt.adapter or prompt.model, tokens, streamed=True), 0
        request.path = prompt.path
    else:
        body = prompt.body if isinstance(prompt.body, bytes) else msgspec.json.encode(prompt.body)
        request, size = read_request("POST", prompt.path, [], body), len(body)
        request.name = prompt.adapter or prompt.model or request.name
        request.streamed = True
    if prompt.cache_salt is not None:
        request.cache_salt = prompt.cache_salt
    if prompt.priority:
        request.priority = prompt.priority
    if prompt.session is not None:
        request.identity = Identity(prompt.session, None, prompt.parent)
        request.session = prompt.session
    if prompt.output_tokens is not None or prompt.final is not None:
        request.hints = AgentHints(prompt.output_tokens, None, prompt.final).before(request.hints)
    return request, size


def _slo(prompt: Prompt) -> SLO | None:
    if prompt.ttft is None and prompt.tpot is None:
        return None
    return SLO(prompt.ttft, prompt.tpot, time.monotonic())


@contextmanager
def _own_errors() -> Iterator[None]:
    """Convert errors of requests to those of this interface."""
    try:
        yield
    except RequestError as error:
        if error.status == 404:
            raise UnknownModel(error.message) from error
        if error.status == 429:
            raise Saturated(error.message, float(error.retry_after or 1)) from error
        if error.status >= 500:
            raise NoWorker(error.message) from error
        raise ValueError(error.message) from error
