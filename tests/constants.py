"""Constants of the product with other values, for tests that cannot wait for the real ones.

`python tests/constants.py '{"linger": 0}' serve …` is the command `kvrouter` with them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from indexer.indexer import Indexer
from indexer.streams.sequence import SequenceSettings
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.fleet.circuit import CircuitLimits
from router.fleet.stall_detector import StallLimits
from router.forwarding.retries import RetryBudget
from router.policies.custom import CustomFunction
from router.policies.rates import Rates
from router.routing.encoders import Encoders

# Where each constant is used, and what replaces it there for a value.
_PLACES: dict[str, tuple[str, Any]] = {
    "audit_samples": ("router.routing.build.HitAudit", lambda count: partial(HitAudit, samples=count)),
    "backoff": ("router.fleet.fleet.CircuitLimits", lambda seconds: partial(CircuitLimits, backoff=seconds)),
    "catch_up": ("router.app.services.CATCH_UP_SECONDS", float),
    "check_interval": ("router.tokens.tokenizer_source.CHECK_SECONDS", float),
    "encoded_at_once": ("router.forwarding.encode_stage._AT_ONCE", int),
    "idle_check": (
        "router.app.embedded_index.Indexer",
        lambda seconds: partial(Indexer, sequence=SequenceSettings(idle_check=seconds)),
    ),
    "items_of_encoder": ("router.routing.build.Encoders", lambda count: partial(Encoders, most_items=count)),
    "linger": ("router.routing.build.InFlightPrefixes", lambda seconds: partial(InFlightPrefixes, seconds)),
    "policy_time": ("router.policies.registry.CustomFunction", lambda limit: partial(CustomFunction, time_limit=limit)),
    "pulled_tokens": ("router.routing.pulls._LEAST_TOKENS", int),
    "rates": ("router.routing.build.Rates", lambda rates: partial(Rates, **rates)),
    "retry_interval": ("router.settings.FleetSettings.retry_interval", float),
    "retry_minimum": ("router.forwarding.proxy_services.RetryBudget", lambda most: partial(RetryBudget, minimum=most)),
    "session_seconds": ("router.forwarding.realtime._SESSION_SECONDS", float),
    "stall_factor": ("router.fleet.stall_detector.StallLimits", lambda factor: partial(StallLimits, factor=factor)),
}


@contextmanager
def changed(**values: Any) -> Iterator[None]:
    """Let constants have other values in this process. Routers that start in the block have them."""
    with ExitStack() as stack:
        for name, value in values.items():
            place, make = _PLACES[name]
            stack.enter_context(patch(place, make(value)))
        yield


if __name__ == "__main__":
    from kvrouter.__main__ import main

    with changed(**json.loads(sys.argv.pop(1))):
        main()
