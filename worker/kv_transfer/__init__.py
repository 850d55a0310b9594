"""Disaggregation: the transfer of a prompt's KV pages from a prefill worker to a decode worker.

    manager = KVManager(args, DisaggregationMode.DECODE, engine, settings)      # once for each rank
    receiver = KVReceiver(manager, "prefill-1:8998", room)                      # once for each request
    receiver.init(pages, aux_index)
    receiver.poll()                                                             # KVPoll.Success at the end

docs/disaggregation.md describes how an engine uses it. The package `transfer` has the engines that move the bytes.
Decode ranks find prefill ranks through `bootstrap.KVBootstrapServer`.
"""

from worker.kv_transfer.handles import KVReceiver, KVSender
from worker.kv_transfer.layout import KVArgs
from worker.kv_transfer.manager import DisaggregationMode, DisaggregationSettings, KVManager, ManagerStats
from worker.kv_transfer.ranks import Rank, RankMapping, Source, Topology, map_ranks, target_dp_group
from worker.kv_transfer.rooms import KVPoll, KVTransferError, group_state

__all__ = [
    "DisaggregationMode",
    "DisaggregationSettings",
    "KVArgs",
    "KVManager",
    "KVPoll",
    "KVReceiver",
    "KVSender",
    "KVTransferError",
    "ManagerStats",
    "Rank",
    "RankMapping",
    "Source",
    "Topology",
    "group_state",
    "map_ranks",
    "target_dp_group",
]
