"""The routers of a run, in the order of its tables."""

from __future__ import annotations

from benchmarks.policy.rivals import RIVALS, rival
from router.settings import PolicyName
from simulator.fleet.simulated_router import OURS, PLAIN, Knowledge, Side

OURS_AT_ONCE = Side("kv_aware, at once", PolicyName.KV_AWARE)
PEERS = [*(rival(rule) for rule in RIVALS), *PLAIN]
SIDES = [OURS, OURS_AT_ONCE, *PEERS]
# Routers of workers that report no events. SGLang's cache_aware keeps a tree of what it sent to each worker.
WITHOUT_EVENTS = [
    OURS,
    Side("kv_aware, reported", PolicyName.KV_AWARE, late_binding=True, knowledge=Knowledge.REPORTED),
    Side("kv_aware, sent", PolicyName.KV_AWARE, late_binding=True, knowledge=Knowledge.SENT),
    Side("cache_aware, sent", PolicyName.CACHE_AWARE, knowledge=Knowledge.SENT),
    Side("round_robin", PolicyName.ROUND_ROBIN),
]
