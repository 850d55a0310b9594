"""The cache state of the settings, as one record."""

from __future__ import annotations

from dataclasses import dataclass

from indexer import Indexer
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.settings import Settings


@dataclass(frozen=True, slots=True)
class CacheState:
    """The prefixes in flight, the sent prefixes, and the audit of the predicted cache hits."""

    in_flight_prefixes: InFlightPrefixes
    sent_prefixes: SentPrefixes
    audit: HitAudit


def build_cache_state(settings: Settings, indexer: Indexer) -> CacheState:
    """Return the cache state of an index's targets."""
    in_flight_prefixes, sent_prefixes = InFlightPrefixes(settings.proxy.speculation_seconds), SentPrefixes()
    return CacheState(
        in_flight_prefixes, sent_prefixes, HitAudit(indexer, sent_prefixes, settings.audit, indexer.names)
    )
