"""Choosing a target for a request: what it asks, what each target holds and has to do, and the reservation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import structlog

from indexer import Indexer, MatchQuery, Target, UnknownModelError
from indexer.errors import RequestError
from router.audit import HitAudit, Prediction
from router.fleet import Fleet, Worker
from router.health import Attempt, Outcome
from router.history import RoutingHistory
from router.load import LoadTable, Reservation
from router.policy import Candidate, Decision, Policy
from router.requests import RoutedRequest
from router.speculation import CHUNK_TOKENS, SpeculativeHoldings, prompt_hashes
from router.tokens import Tokenizers, TokenizerUnavailableError
from router.usage import Usage
from router.worker import choosable

log = structlog.get_logger()


class _Served(NamedTuple):
    """What a worker serves under the name a request uses."""

    model: str
    adapter: str | None


# For prompts whose tokens are not known: English text has about this many bytes a token.
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What routing knows of a request.

    `name`: the model or adapter it asks for, None when any worker will do. `tokens`: the length of its prompts, which
    is an estimate when `token_ids` is empty. `answers`: how many each prompt wants.
    """

    name: str | None
    tokens: int
    token_ids: list[list[int]] = field(default_factory=list)
    cache_salt: str | None = None
    answers: int = 1
    streamed: bool = False


def unread_prompt(name: str | None, body_bytes: int) -> RoutedPrompt:
    """A prompt whose tokens are not known, routed by load alone."""
    return RoutedPrompt(name, body_bytes // _BYTES_PER_TOKEN)


@dataclass(slots=True)
class Placement:
    """Where a request goes, and its share of that target's load until `release`."""

    worker: Worker
    target: Target
    decision: Decision
    reservation: Reservation
    prediction: Prediction
    attempt: Attempt
    on_release: list[Callable[[], None]] = field(default_factory=list)

    @property
    def overlap(self) -> int:
        """Tokens of the prompt that the target is expected to serve from its cache."""
        return self.decision.choice.overlap

    def first_byte(self) -> None:
        """The answer began."""
        self.reservation.first_byte()

    def release(self) -> None:
        """The request ended, however it did. Only the first call counts."""
        self.reservation.release()
        self.attempt.end(Outcome.NEITHER)
        while self.on_release:
            self.on_release.pop()()


class Router:
    """Places requests on targets."""

    def __init__(
        self,
        fleet: Fleet,
        indexer: Indexer,
        tokenizers: Tokenizers,
        policy: Policy,
        load: LoadTable,
        speculation: SpeculativeHoldings,
        history: RoutingHistory,
        audit: HitAudit,
    ) -> None:
        self._fleet = fleet
        self._indexer = indexer
        self._tokenizers = tokenizers
        self._policy = policy
        self._load = load
        self._speculation = speculation
        self._history = history
        self._audit = audit
        self._random = Random()

    def resolve(self, name: str, tenant: str) -> tuple[str, str | None]:
        """The model and adapter behind a name. Raises RequestError (404) when nobody serves it."""
        serving = self._fleet.serving(name)
        if serving:
            return serving[0][1].model, serving[0][1].adapter
        if self._indexer.serves(name, tenant):
            return name, None
        raise self._unknown_model(name)

    async def read(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
        """Tokenize a request's prompts. Raises RequestError for a model nobody serves and for a prompt that is none."""
        serving = self._fleet.serving(request.model)
        if not serving:
            raise self._unknown_model(request.model)
        try:
            token_ids = await self._tokenizers.token_ids(serving[0][1].model, request.prompt)
        except TokenizerUnavailableError as error:
            log.debug("routed by load alone", model=request.model, reason=str(error))
            return unread_prompt(request.model, body_bytes)
        return RoutedPrompt(
            request.model,
            sum(map(len, token_ids)),
            token_ids,
            request.cache_salt,
            request.n,
            request.stream,
        )

    def place(self, prompt: RoutedPrompt, without: Collection[Worker] = ()) -> Placement:
        """Choose a target and reserve its load, in one step. Raises RequestError (503) when no worker is left."""
        candidates: list[Candidate] = []
        options: dict[Target, tuple[Worker, list[array[int]], int]] = {}
        for served, workers in self._able(prompt.name, without).items():
            matched = [self._matched(served, token_ids, prompt.cache_salt) for token_ids in prompt.token_ids]
            hashes = [
                prompt_hashes(served.model, served.adapter, prompt.cache_salt, token_ids)
                for token_ids in prompt.token_ids
            ]
            for worker in workers:
                for dp_rank in worker.ranks():
                    target = Target(worker.url, dp_rank, served.model)
                    overlap = by_events = 0
                    for held, known, token_ids in zip(matched, hashes, prompt.token_ids, strict=True):
                        in_flight = self._full_blocks(target, self._speculation.overlap(target, known), len(token_ids))
                        sent = self._full_blocks(target, self._history.overlap(target, known), len(token_ids))
                        told = max(held.get(target, 0), in_flight)
                        by_events += told
                        overlap += max(sent, in_flight if self._audit.distrusts(target) else told)
                    options[target] = (worker, hashes, by_events)
                    load = self._load.of(worker.url, dp_rank)
                    candidates.append(
                        _weighed(Candidate(target, overlap, load.requests, load.pending, load.context), worker)
                    )
        if not candidates:
            if prompt.name is not None and not self._fleet.serving(prompt.name):
                raise self._unknown_model(prompt.name)
            raise RequestError(
                f"No worker {f'for model {prompt.name!r} ' if prompt.name else ''}can be reached. Try again later.",
                status=503,
                type="service_unavailable",
                code="no_worker_available",
            )
        decision = self._policy(candidates, prompt.tokens)
        target = decision.choice.target
        worker, hashes, by_events = options[target]
        load = self._load.of(target.worker, target.dp_rank)
        reservation = Reservation(load, max(prompt.tokens - decision.choice.overlap, 1), prompt.tokens)
        prediction = Prediction(
            target,
            hashes,
            prompt.tokens,
            decision.choice.overlap,
            by_events if self._audit.events_complete(target) else None,
            comparable=len(prompt.token_ids) == prompt.answers == 1,
            capacity=worker.capacity_tokens,
        )
        speculative = [self._speculation.hold(target, known) for known in hashes]
        attempt = worker.health.begin(load.pending, target.dp_rank, prompt.streamed)
        return Placement(worker, target, decision, reservation, prediction, attempt, speculative)

    def answered(self, placement: Placement, usage: Usage | None) -> None:
        """A worker answered a request in full; `usage` is what it says of the tokens."""
        self._audit.answered(placement.prediction, usage)

    def forget(self, worker: Worker) -> None:
        """A worker's cache was reset. Engines tell of it late, so what it held is forgotten at once."""
        for target in worker.targets:
            self._indexer.clear(target)
            self._speculation.forget(target)
            self._history.forget(target)

    def others(self, prompt: RoutedPrompt, without: Collection[Worker]) -> bool:
        """Whether there is any other worker that could take a request now."""
        return bool(self._serving_now(prompt.name, without))

    def _able(self, name: str | None, without: Collection[Worker]) -> dict[_Served, list[Worker]]:
        """The workers that a request may go to now, by what they serve under its name."""
        able: dict[_Served, list[Worker]] = {}
        for worker in choosable(self._serving_now(name, without), self._random):
            served = worker.served(name) if name is not None else None
            able.setdefault(_Served(served.model, served.adapter) if served else _Served("", None), []).append(worker)
        return able

    def _serving_now(self, name: str | None, without: Collection[Worker]) -> list[Worker]:
        """The workers that answer and serve a name; any will do where it is None."""
        return [
            worker
            for worker in self._fleet.workers
            if worker.up and not worker.draining and worker not in without and (name is None or worker.served(name))
        ]

    def _matched(self, served: _Served, token_ids: list[int], cache_salt: str | None) -> dict[Target, int]:
        """How many tokens of a prompt each target holds, by the index."""
        try:
            matches = self._indexer.match(MatchQuery(served.model, token_ids, served.adapter, cache_salt))
        except UnknownModelError:
            return {}
        return {match.target: match.matched_tokens for match in matches}

    def _full_blocks(self, target: Target, shared: int, tokens: int) -> int:
        """What a target reuses of a prompt when it has seen so many tokens of it."""
        shared = min(shared, tokens - 1)
        return shared - shared % (self._indexer.block_size(target) or CHUNK_TOKENS) if shared else 0

    def _unknown_model(self, name: str) -> RequestError:
        known = sorted(self._fleet.names())
        if not known:
            return RequestError(
                "No worker has answered yet, so no model is known. Try again later.",
                status=503,
                type="service_unavailable",
                code="no_worker_available",
            )
        return RequestError(
            f"The model {name!r} does not exist. Send one of: {', '.join(known)}.",
            status=404,
            type="not_found_error",
            param="model",
            code="model_not_found",
        )


def _weighed(candidate: Candidate, worker: Worker) -> Candidate:
    """A candidate with the requests of others too, and its load in proportion to what its worker can bear."""
    weight = worker.settings.weight
    unseen = worker.metrics.of(candidate.target.dp_rank).unseen
    return replace(
        candidate,
        requests=round((candidate.requests + unseen) / weight),
        pending=round(candidate.pending / weight),
        context=round(candidate.context / weight),
    )
