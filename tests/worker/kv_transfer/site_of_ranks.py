"""A prefill and a decode worker for a test: their ranks, each worker in one process, and the bootstrap service."""

from __future__ import annotations

import itertools
from typing import Any

from rank_process import Model, RankProcess

from worker.kv_transfer import Rank, Topology
from worker.kv_transfer.bootstrap import KVBootstrapServer


class Site:
    """Opened with these topologies; `close` also checks that nothing is left of any room, in either process."""

    def __init__(
        self,
        pair: list[RankProcess],
        engine: str,
        model: Model | None = None,
        prefill: Topology | None = None,
        decode: Topology | None = None,
        **settings: Any,
    ) -> None:
        self.prefill, self.decode = pair
        self.model = model or Model()
        self.prefill_ranks = _ranks(prefill or Topology())
        self.decode_ranks = _ranks(decode or Topology())
        self.server = KVBootstrapServer(port=0)
        self.address = self.server.address
        self.settings = {"bootstrap_addr": self.address, **settings}
        for process in pair:
            process.restart_if_stuck()
            process.call("close_all")  # what a test that failed left
        for name, rank in enumerate(self.prefill_ranks):
            self.prefill.call("open", name, "prefill", engine, self.model, prefill, rank, self.settings)
        for name, rank in enumerate(self.decode_ranks):
            self.decode.call("open", name, "decode", engine, self.model, decode, rank, self.settings)
        for name in range(len(self.prefill_ranks)):
            assert self.prefill.call("wait_registered", name)

    def close(self) -> None:
        left = self.left()
        self.server.close()
        for process in (self.prefill, self.decode):
            process.call("close_all")
            left += process.call("threads")
        assert left == [], left

    def left(self) -> list[str]:
        """Return the resources that the ranks still hold for ended rooms."""
        left: list[str] = []
        for process, ranks in ((self.prefill, self.prefill_ranks), (self.decode, self.decode_ranks)):
            for name in range(len(ranks)):
                left += process.call("left", name)
        return left

    def senders(self, dp: int = 0) -> list[int]:
        return [name for name, rank in enumerate(self.prefill_ranks) if rank.dp == dp]

    def transfer(
        self, room: int, source: list[int], target: list[int], chunks: list[int] | None = None, dp: int | None = None
    ) -> None:
        """Bring a prompt over, from the DP rank that is given or follows from the room, and check every decode rank."""
        senders = self.senders(dp if dp is not None else room % (1 + self.prefill_ranks[-1].dp))
        for name in range(len(self.decode_ranks)):
            self.decode.call("wipe", name)
            self.decode.call("receive", name, self.address, room, target, aux=5, prefill_dp_rank=dp)
        for name in senders:
            self.prefill.call("send", name, self.address, room, source, chunks, aux=2)
        for name in range(len(self.decode_ranks)):
            assert self.decode.call("wait", name, room) == ("Success", "", True)
            assert self.decode.call("check", name, room, target, aux=5) == []
        for name in senders:
            assert self.prefill.call("wait", name, room) == ("Success", "", True)


def _ranks(topology: Topology) -> list[Rank]:
    return [Rank(*place) for place in itertools.product(*map(range, topology))]
