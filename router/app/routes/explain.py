"""`POST /explain`: the decision for a request with its terms. The request is not sent, and no load is reserved.

`match_reader` reads the prompts of `/match`, which are tokenized like those of other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from http_api.errors import RequestError
from http_api.openapi import errors, json_body
from indexer import DEFAULT_TENANT, MatchQuery
from indexer.api.questions import ReadMatch
from indexer.targets import WorkerNames
from router.admission.admission import Admission
from router.admission.room import SeenSession
from router.admission.ticket import WaitReason
from router.apis.abilities import needed_abilities
from router.apis.agent_hints import AgentHints, hints_in_headers
from router.apis.endpoints import PROMPTED, read_request
from router.apis.fields import kind_of, read_body
from router.apis.identities import identity_headers
from router.apis.media_items import MediaChat, media_chat
from router.apis.openai_requests import decode_match
from router.apis.requests import ChatPrompt, MatchRequest, RoutedRequest, Sender
from router.app.services import services_of
from router.auth.bodies import check_amounts, check_media
from router.forwarding.proxy_services import LONG_BODY, aside_if_long
from router.http.headers import HeaderItems
from router.policies import Cost
from router.policies.records import Source
from router.prediction.service_levels import ServiceLevels, read_slo
from router.prediction.slo import SLO, Estimate, Prediction
from router.programs import Sessions
from router.routing.encoders import Encoders
from router.routing.prompt_reader import PromptReader
from router.routing.selector import TargetSelector
from router.settings import LimitSettings
from router.tokens.tokenizers import Tokenized, Tokenizers, TokenizerUnavailableError

routes = APIRouter()


class ExplainBody(msgspec.Struct):
    """`POST /explain`: a request, the path it would be sent to, and the tenant that would send it."""

    request: dict[str, Any]
    path: str = "/v1/chat/completions"
    tenant: str = ""


@routes.post("/explain", openapi_extra=json_body(ExplainBody), responses=errors(400, 404, 503))
async def explain_decision(request: Request) -> dict[str, Any]:
    """Explain the decision that a request would get now. The request is not sent."""
    services = services_of(request)
    routing, proxy = services.routing, services.proxy
    return await explain(
        routing.reader,
        routing.selector,
        services.admission,
        routing.encoders,
        routing.state.gate.sessions,
        services.indexer.names,
        services.settings.limits,
        await request.body(),
        request.scope["headers"],
        proxy.services.service_levels,
        proxy.gate.session_headers,
    )


class _ExplainFields(msgspec.Struct):
    request: Any = None
    path: Any = "/v1/chat/completions"
    tenant: Any = ""


async def explain(
    reader: PromptReader,
    selector: TargetSelector,
    admission: Admission,
    encoders: Encoders,
    sessions: Sessions,
    names: WorkerNames,
    limits: LimitSettings,
    body: bytes,
    headers: HeaderItems,
    levels: ServiceLevels | None = None,
    session_headers: Collection[bytes] = (),
) -> dict[str, Any]:
    """Return the answer to `/explain`, the best candidate first. Raises RequestError, which names the invalid field."""
    prompt, size, tenant, media = await aside_if_long(body, partial(_asked, limits, headers, session_headers))
    await reader.read(prompt, size)
    prompt.sender = Sender(tenant, list(headers))
    if (hints := hints_in_headers(headers)) is not None:
        prompt.hints = hints.before(prompt.hints)
    if media is not None and prompt.name is not None:
        prompt.encoding = encoders.seconds(prompt.name, [item.key for item in media.items])
    now = time.monotonic()
    slo = read_slo(headers, levels, tenant, prompt.name, now)
    usual = selector.choose(prompt, now=now, slo=slo)
    assert usual is not None  # without limits there is always a candidate
    begins = admission.preview(prompt, slo, tenant)
    seen = admission.session(prompt, usual, tenant)
    selection = usual if isinstance(begins, WaitReason) else begins
    chosen = selection.decision.chosen
    costs = sorted(usual.decision.costs, key=lambda cost: cost.total)
    pair = selection.disaggregation
    predict = partial(selector.predict, prompt=prompt) if pair is None else pair.predict
    return {
        "path": prompt.path,
        "model": prompt.name,
        "tokens": prompt.tokens,
        "exact": prompt.exact,
        "session": prompt.session,
        "program": prompt.identity and prompt.identity.program,
        "parent": prompt.identity and prompt.identity.parent,
        "working_set": seen and _session(seen, names),
        "hints": prompt.hints and _hints(prompt.hints),
        "encoding": round(prompt.encoding, 6),
        "held": begins if isinstance(begins, WaitReason) else None,
        "slo": slo and _slo(slo, selection.prediction or selector.predict(chosen, prompt), now),
        "choice": {"worker": names.get(chosen.target.worker), "dp_rank": chosen.target.dp_rank},
        "unit": usual.decision.unit,
        "candidates": [
            _candidate(names, cost, sessions.returning(cost.candidate.target))
            | {"room": seen and seen.rooms.get(cost.candidate.target)}
            | {"forecast": _prediction(predict(cost.candidate), slo, now)}
            for cost in costs
        ],
        "excluded": [
            {"worker": names.get(each.target.worker), "dp_rank": each.target.dp_rank, "by": function}
            for each, function in usual.decision.excluded or ()
        ],
        "disaggregation": selection.disaggregation and selection.disaggregation.as_json(names),
    }


def _asked(
    limits: LimitSettings, headers: HeaderItems, session_headers: Collection[bytes], body: bytes
) -> tuple[RoutedRequest, int, str, MediaChat | None]:
    """Return the request to explain, the bytes of its body, its tenant, and its media."""
    fields = read_body(body, _ExplainFields)
    if not isinstance(fields.request, dict):
        raise RequestError(
            f"request is {kind_of(fields.request)}. Send the body of the request to explain.", param="request"
        )
    if not isinstance(fields.path, str) or not fields.path.startswith("/"):
        raise RequestError(f"path must be one such as {', '.join(PROMPTED)}.", param="path")
    if not isinstance(fields.tenant, str):
        raise RequestError(
            f"tenant is {kind_of(fields.tenant)}. Send the name of a tenant, or omit it.", param="tenant"
        )
    check_amounts(fields.request, limits)
    sent = msgspec.json.encode(fields.request)
    check_media(sent, limits)
    request = read_request("POST", fields.path, headers, sent, identity_headers(headers, session_headers))
    request.needs = needed_abilities(sent)
    return request, len(sent), fields.tenant, media_chat(request.path, sent)


def _hints(hints: AgentHints) -> dict[str, Any]:
    """Return an agent's hints, in tokens and seconds."""
    return {
        "output_tokens": hints.output_tokens,
        "next_call": hints.next_call,
        "final": hints.final,
    }


def _session(seen: SeenSession, names: WorkerNames) -> dict[str, Any]:
    """Return the state of a request's session, the target that it is charged to, and the calls that wait for room."""
    charged = seen.charged and {"worker": names.get(seen.charged.worker), "dp_rank": seen.charged.dp_rank}
    return {
        "state": seen.state,
        "tokens": seen.tokens,
        "charged": charged,
        "gate": "closed" if seen.closed else "open",
        "waiting": seen.waiting,
    }


def _candidate(names: WorkerNames, cost: Cost, returning: int) -> dict[str, Any]:
    candidate, source = cost.candidate, cost.candidate.source
    return {
        "worker": names.get(candidate.target.worker),
        "dp_rank": candidate.target.dp_rank,
        "overlap": candidate.overlap,
        "source": source and _source(names, source),
        "load": {
            "requests": candidate.requests,
            "pending": candidate.pending,
            "context": candidate.context,
            "loads": candidate.loads,
            "returning": returning,
        },
        "terms": cost.terms,
        "total": cost.total,
    }


def _source(names: WorkerNames, source: Source) -> dict[str, Any]:
    """Return the source of a candidate. `peer`: the target to pull from; None for a pool."""
    peer = source.peer and {"worker": names.get(source.peer.worker), "dp_rank": source.peer.dp_rank}
    price, seconds = round(source.price, 3), round(source.load_seconds, 6)
    return {"name": source.name, "tokens": source.tokens, "price": price, "seconds": seconds, "peer": peer}


def _slo(slo: SLO, prediction: Prediction, now: float) -> dict[str, Any]:
    """Return whether the choice is predicted to meet an SLO, and the seconds to spare, which are negative if late."""
    ttft, tpot = slo.ttft, slo.tpot
    met = prediction.slo_missed_by(slo, now, 1.0) <= 0
    return {
        "service_level": slo.service_level or None,
        "ttft": ttft,
        "tpot": tpot,
        "met": met,
        "chance": round(prediction.chance(slo, now), 3),
        "ttft_to_spare": None if ttft is None else round(ttft - prediction.ttft.expected, 6),
        "tpot_to_spare": None if tpot is None else round(tpot - prediction.tpot.expected, 6),
        "refused": slo.refuses_late and not met,
    }


def _prediction(prediction: Prediction, slo: SLO | None, now: float) -> dict[str, Any]:
    """Return the predicted latency of a candidate in seconds, and whether it meets the SLO."""
    report: dict[str, Any] = {
        "ttft": _estimate(prediction.ttft),
        "tpot": _estimate(prediction.tpot),
        "measured": prediction.measured,
    }
    if slo is not None:
        report["met"] = prediction.slo_missed_by(slo, now, 1.0) <= 0
        report["chance"] = round(prediction.chance(slo, now), 3)
        report["others_missed"] = round(prediction.others_missed, 3)
    return report


def _estimate(estimate: Estimate) -> dict[str, float]:
    band = estimate.band
    return {"low": round(band.low, 6), "expected": round(band.expected, 6), "high": round(band.high, 6)}


# Returns the model and adapter of a (name, tenant). Raises RequestError (404) for a name that no worker serves.
Resolve = Callable[[str, str], tuple[str, str | None]]


def match_reader(tokenizers: Tokenizers, resolve: Resolve) -> ReadMatch:
    """Return the reader of `/match` for prompts and messages. `resolve`: a name's model and adapter for a tenant."""

    def read(body: bytes) -> MatchQuery | Awaitable[MatchQuery]:
        return read_long(body) if len(body) > LONG_BODY else tokenized(decode_match(body), len(body))

    async def read_long(body: bytes) -> MatchQuery:
        query = tokenized(await asyncio.to_thread(decode_match, body), len(body))
        return query if isinstance(query, MatchQuery) else await query

    def tokenized(asked: MatchRequest, size: int) -> MatchQuery | Awaitable[MatchQuery]:
        """Return the query, or an awaitable of it if its prompt is long. `size` is the body's size in bytes."""
        model, adapter = resolve(asked.model, asked.tenant_id or DEFAULT_TENANT)
        with _explained(asked, model):
            now = tokenizers.tokenize_now(model, asked.prompt, size)
            return tokenized_aside(asked, model, adapter) if now is None else _query(asked, model, adapter, now)

    async def tokenized_aside(asked: MatchRequest, model: str, adapter: str | None) -> MatchQuery:
        with _explained(asked, model):
            return _query(asked, model, adapter, await tokenizers.tokenize_aside(model, asked.prompt))

    return read


def _query(asked: MatchRequest, model: str, adapter: str | None, tokenized: Tokenized) -> MatchQuery:
    (token_ids,) = tokenized.token_ids
    tenant = asked.tenant_id or DEFAULT_TENANT
    return MatchQuery(model, token_ids, asked.lora_name or adapter, asked.cache_salt, tenant)


@contextmanager
def _explained(asked: MatchRequest, model: str) -> Iterator[None]:
    """Convert errors of tokenization to RequestErrors that say what to send instead."""
    try:
        yield
    except TokenizerUnavailableError as error:
        raise RequestError(
            f"{error}: send token_ids instead, or set models.{model}.tokenizer",
            param="messages" if isinstance(asked.prompt, ChatPrompt) else "prompt",
        ) from error
    except ValueError as error:
        raise RequestError("prompt: /match takes one prompt. Ask for each of them.", param="prompt") from error
