"""Every subscription of one part of the router to the events of another.

A part has a list of callables for each of its events, such as `Fleet.on_removed`, and calls them in order. This module
adds to these lists, before the first event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from router.admission.admission import Admission
from router.fleet.engine_commands import EngineCommands
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.fleet.worker_commands import Adapters
from router.routing.build import Routing
from router.tokens.tokenizer_source import TokenizerSource

if TYPE_CHECKING:  # an embedded selector has neither, and needs no web server
    from router.forwarding.proxy_services import ProxyContext
    from router.observability.build import Observability


def subscribe_routing(routing: Routing, fleet: Fleet) -> None:
    """Subscribe routing to the fleet and to other routers, and other routers to the load and responses here."""
    state, selector, placement = routing.state, routing.selector, routing.placement
    load, sharing, responses, audit = state.load, state.sharing, state.responses, state.audit

    def scraped(worker: Worker) -> None:
        audit.set_engine(worker.url, worker.metrics.drafts, worker.metrics.pooled)

    def removed(worker: Worker) -> None:
        audit.set_engine(worker.url, drafts=False, pooled=False)

    fleet.on_scrape += [selector.scraped, scraped]
    fleet.on_replaced.append(placement.replaced)
    fleet.on_cache_lost.append(placement.forget)
    fleet.on_restarted.append(placement.restarted)
    fleet.on_restarted.append(routing.selector.pairs.forget)
    fleet.on_change.append(routing.encoders.wake)
    fleet.on_removed += [selector.removed, placement.removed, routing.encoders.forget, removed]
    sharing.on_response.append(responses.remember)
    responses.on_learned.append(sharing.share_response)
    sharing.on_finished.append(state.gate.sessions.finish)
    if sharing.channels:
        load.on_change.append(sharing.changed)


def subscribe_commands(commands: EngineCommands, routing: Routing, fleet: Fleet) -> None:
    """Report the effects of commands to other routers, and apply theirs."""
    sharing = routing.state.sharing
    commands.on_changed.append(lambda worker: sharing.share_engine(worker.url, worker.engine))
    sharing.on_engine.append(commands.apply_elsewhere)
    fleet.on_removed.append(lambda worker: sharing.forget_engine(worker.url))
    fleet.on_restarted.append(lambda worker: sharing.forget_engine(worker.url))


def subscribe_admission(admission: Admission, routing: Routing, fleet: Fleet) -> None:
    """Wake the queue after every event by which a waiting request may find a place."""
    load, sharing = routing.state.load, routing.state.sharing
    load.on_ended.append(admission.wake)
    load.on_first_byte.append(admission.wake)
    fleet.on_change.append(admission.wake)
    sharing.on_update.append(admission.wake)


def subscribe_observability(observability: Observability, admission: Admission, routing: Routing, fleet: Fleet) -> None:
    """Count refusals, waits and predictions, and end the metric series of removed workers."""
    predictions = observability.predictions
    admission.on_waited.append(observability.admission.waited)
    admission.refusals.on_refused.append(observability.admission.refused)
    admission.refusals.on_slo_refused.append(predictions.refused)
    routing.state.learned.predictions.on_first_token.append(predictions.first_token)
    routing.state.learned.predictions.on_answered.append(predictions.answered)
    if routing.state.pulls is not None:
        routing.state.pulls.on_ended.append(observability.requests.pulled)
    fleet.on_full.append(observability.requests.worker_full)
    fleet.on_removed.append(observability.requests.forget)


def subscribe_tokens(source: TokenizerSource, adapters: Adapters, fleet: Fleet) -> None:
    """Drop the tokenizers and adapters that only removed workers used."""
    fleet.on_removed += [source.removed, adapters.removed]
    fleet.on_restarted.append(source.restarted)


def subscribe_forwarding(proxy: ProxyContext, routing: Routing, fleet: Fleet) -> None:
    """Update connections when workers change, and apply tenants' rates to all routers together."""
    services, sharing, access = proxy.services, routing.state.sharing, proxy.gate.access
    upstreams, failover = services.upstreams, services.stream_failover
    fleet.on_key.append(lambda worker: upstreams.show(worker.url, worker.key.authorization))
    fleet.on_removed.append(lambda worker: upstreams.forget(worker.url))
    upstreams.on_broken.append(fleet.connection_broken)
    if failover is not None:
        fleet.on_removed.append(failover.removed)
    access.share_spent(sharing.spent)
    sharing.on_spent.append(access.spent_elsewhere)


def subscribe_picker(forget: Callable[[str], None], fleet: Fleet) -> None:
    """Call `forget` with the URL of each worker that is removed."""
    fleet.on_removed.append(lambda worker: forget(worker.url))
