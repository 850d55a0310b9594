"""The choice by functions of one's own: candidates and requests as these functions receive them."""

from __future__ import annotations

from router.apis.requests import RoutedRequest
from router.policies import Candidate, Decision, Policy, Request, interface
from router.policies.custom import CustomPolicy
from router.routing.candidates import CandidateSet
from router.settings.fields import CREDENTIAL_HEADERS

# Functions need no credentials.
_WITHHELD = frozenset(name.encode() for name in CREDENTIAL_HEADERS)


def decide(
    custom: CustomPolicy | None,
    usual: Policy,
    found: CandidateSet,
    prompt: RoutedRequest,
    request: Request,
    phase: interface.Phase = interface.Phase.BOTH,
) -> Decision | None:
    """Return the decision of the usual policy with the functions of `custom`; None if these exclude all candidates."""
    candidates = found.candidates
    if custom is None:
        return usual(candidates, request)
    seen = tuple([_seen(found, each) for each in candidates])
    return custom.decide(usual, candidates, request, seen, _asked(prompt, request, phase))


def _seen(found: CandidateSet, candidate: Candidate) -> interface.Candidate:
    worker = found.rank_of(candidate).worker
    return interface.Candidate(
        worker.name,
        worker.url,
        candidate.target.dp_rank,
        worker.settings.labels,
        candidate.overlap,
        candidate.reused - candidate.overlap,
        candidate.requests,
        candidate.pending,
        candidate.context,
        candidate.kv_usage,
        None if candidate.rates is None else candidate.rates.token,
    )


def _asked(prompt: RoutedRequest, request: Request, phase: interface.Phase) -> interface.Request:
    session = request.session
    if session is None:
        session = "" if request.beginning is None else f"{request.beginning:016x}"
    sender, caller = prompt.sender, prompt.identity
    headers = () if sender is None else sender.headers
    return interface.Request(
        prompt.name or "",
        request.tokens,
        request.output_tokens,
        session,
        "" if sender is None else sender.tenant,
        {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name not in _WITHHELD},
        phase,
        "" if caller is None else caller.program,
        "" if caller is None or caller.parent is None else caller.parent,
    )
