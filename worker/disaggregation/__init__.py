"""Prefill and decode on different workers: how the KV pages of a prompt get from one to the other.

    manager = KVManager(args, DisaggregationMode.DECODE, engine, settings)      # once for each rank
    receiver = KVReceiver(manager, "prefill-1:8998", room)                      # once for each request
    receiver.init(pages, aux_index)
    receiver.poll()                                                             # KVPoll.Success, in the end

docs/disaggregation.md tells how an engine is wired to it. `transfer` holds the engines that move the bytes;
`bootstrap.KVBootstrapServer` is the service by which decode ranks find prefill ranks.
"""

from worker.disaggregation.handles import KVReceiver, KVSender
from worker.disaggregation.layout import KVArgs
from worker.disaggregation.manager import DisaggregationMode, DisaggregationSettings, KVManager, ManagerStats
from worker.disaggregation.ranks import Rank, RankMapping, Source, Topology, map_ranks, target_dp_group
from worker.disaggregation.rooms import KVPoll, KVTransferError, group_state

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
