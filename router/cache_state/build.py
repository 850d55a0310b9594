"""What targets are expected to hold beside their events, as one record."""

from __future__ import annotations

from dataclasses import dataclass

from indexer import Indexer
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.settings import Settings


@dataclass(frozen=True, slots=True)
class CacheState:
    """Prefixes in flight, prefixes that were sent, and the audit of what workers report of both."""

    in_flight_prefixes: InFlightPrefixes
    sent_prefixes: SentPrefixes
    audit: HitAudit


def build_cache_state(settings: Settings, indexer: Indexer) -> CacheState:
    """Return the cache state of an index's targets."""
    in_flight_prefixes, sent_prefixes = InFlightPrefixes(settings.proxy.speculation_seconds), SentPrefixes()
    return CacheState(
        in_flight_prefixes, sent_prefixes, HitAudit(indexer, sent_prefixes, settings.audit, indexer.names)
    )
