"""Every subscription of one part of the router to the events of another. No other module makes one."""

from __future__ import annotations

from router.fleet.fleet import Fleet
from router.routing.build import Routing


def subscribe_routing(routing: Routing, fleet: Fleet) -> None:
    """Subscribe routing to the fleet, to the load of other routers, and to the responses that they learn of."""
    state, selector, placement = routing.state, routing.selector, routing.placement
    fleet.on_scrape.append(selector.scraped)
    fleet.on_replaced.append(placement.replaced)
    fleet.on_cache_lost.append(placement.forget)
    fleet.on_removed += [selector.removed, placement.removed]
    state.sharing.peer_load.on_change.append(state.load.changed)
    state.sharing.on_response.append(state.responses.remember)
    state.responses.on_learned.append(state.sharing.share_response)
