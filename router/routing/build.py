"""Routing as one record, made once from the settings."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from indexer import Indexer
from router.fleet.fleet import Fleet
from router.routing.assignment import RequestSampler
from router.routing.placement import Placement
from router.routing.prompt_reader import PromptReader
from router.routing.selector import Selector
from router.routing.state import RoutingState
from router.settings import Settings
from router.tokens.tokenizers import Tokenizers


@dataclass(frozen=True, slots=True)
class Routing:
    """The parts that bring a request to its target, and the state that they share."""

    state: RoutingState
    reader: PromptReader
    selector: Selector
    placement: Placement


def build_routing(
    settings: Settings,
    state: RoutingState,
    fleet: Fleet,
    indexer: Indexer,
    tokenizers: Tokenizers,
    sampler: RequestSampler | None = None,
    random: Random | None = None,
) -> Routing:
    """Return the parts of routing over one state.

    - `settings`: the costs of a missed SLO and of disaggregation.
    - `state`: what the parts share.
    - `fleet`, `indexer`, `tokenizers`: what reading prompts needs.
    - `sampler`: records some of the placed requests, for people.
    - `random`: breaks ties; None: a generator of its own.
    """
    selector = Selector(state, settings.disaggregation, settings.policy.broken_promise, random or Random())
    reader = PromptReader(state, fleet, indexer, tokenizers)
    return Routing(state, reader, selector, Placement(state, selector, sampler))
