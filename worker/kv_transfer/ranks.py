"""The mapping of prefill ranks to decode ranks, for different kinds of parallelism on both sides.

    TP   heads: rank r of n holds `head_range(total, n, r)`. Sizes must divide each other.
    CP   pages: a prefill's CP rank sends its `page_share` of each prompt. A decode worker has CP 1.
    PP   layers: each prefill stage sends its own. A decode worker has the prefill's PP size, or 1.
    DP   whole requests: a room belongs to one DP rank of the prefill.

If several ranks hold the same heads (MLA's latent, or fewer heads than ranks), one of them sends. The others are
dummies, which receive the request only to end the room.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple


class Topology(NamedTuple):
    """The sizes of an engine. `tp` and `cp` are those of attention, inside one DP rank."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def places(self) -> list[Rank]:
        """Return every rank, in order."""
        return [Rank(*place) for place in itertools.product(*map(range, self))]


class Rank(NamedTuple):
    """The position of a rank in its topology."""

    dp: int = 0
    cp: int = 0
    tp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """A prefill rank of a room. A dummy sends nothing; one source also sends the aux buffers."""

    rank: Rank
    dummy: bool
    sends_aux: bool


@dataclass(frozen=True, slots=True)
class RankMapping:
    """The sources of a decode rank's pages. `required_dst_info_num`: requests that each prefill rank needs to send."""

    sources: tuple[Source, ...]
    required_dst_info_num: int

    @property
    def required_responses(self) -> int:
        """The number of prefill ranks that must report success."""
        return sum(not source.dummy for source in self.sources)


def target_dp_group(bootstrap_room: int, prefill_dp_size: int) -> int:
    """Return the prefill DP rank of a room that has no chosen one."""
    return bootstrap_room % prefill_dp_size


def head_range(total_heads: int, tp_size: int, tp_rank: int) -> range:
    """Return the KV heads of a TP rank, which may share one. Raises ValueError if neither number divides the other."""
    if max(total_heads, tp_size) % min(total_heads, tp_size):
        raise ValueError(f"{total_heads} KV heads can't be split over TP {tp_size}: one must divide the other")
    if total_heads < tp_size:
        head = tp_rank // (tp_size // total_heads)
        return range(head, head + 1)
    each = total_heads // tp_size
    return range(tp_rank * each, (tp_rank + 1) * each)


def page_share(pages: int, cp_size: int, cp_rank: int) -> range:
    """Return the positions in a prompt's pages that a prefill's CP rank sends: contiguous and nearly equal shares."""
    return range(pages * cp_rank // cp_size, pages * (cp_rank + 1) // cp_size)


def map_ranks(decode: Topology, rank: Rank, prefill: Topology, dp_rank: int, total_heads: int) -> RankMapping:
    """Return the sources of a decode rank for a room of `dp_rank`. MLA counts as one head. Raises ValueError."""
    _check_sizes(decode, prefill, dp_rank)
    if decode.tp >= prefill.tp:
        served = decode.tp // prefill.tp
        tp_ranks = range(rank.tp // served, rank.tp // served + 1)
    else:
        served = 1
        each = prefill.tp // decode.tp
        tp_ranks = range(rank.tp * each, (rank.tp + 1) * each)
    pp_ranks = range(prefill.pp) if decode.pp == 1 else range(rank.pp, rank.pp + 1)

    wanted = set(head_range(total_heads, decode.tp, rank.tp))
    senders = set()
    for tp_rank in tp_ranks:
        heads = wanted & set(head_range(total_heads, prefill.tp, tp_rank))
        if heads:
            senders.add(tp_rank)
            wanted -= heads
    sources = tuple(
        Source(
            Rank(dp_rank, cp, tp, pp),
            dummy=tp not in senders,
            sends_aux=(cp, tp, pp) == (0, min(senders), max(pp_ranks)),
        )
        for cp in range(prefill.cp)
        for tp in tp_ranks
        for pp in pp_ranks
    )
    return RankMapping(sources, served)


def _check_sizes(decode: Topology, prefill: Topology, dp_rank: int) -> None:
    if max(decode.tp, prefill.tp) % min(decode.tp, prefill.tp):
        raise ValueError(f"decode has TP {decode.tp} and prefill TP {prefill.tp}: one must divide the other")
    if decode.cp != 1:
        raise ValueError(f"decode has CP {decode.cp}: a decode worker must have CP 1")
    if decode.pp not in (1, prefill.pp):
        raise ValueError(f"decode has PP {decode.pp} and prefill PP {prefill.pp}: decode needs the same, or 1")
    if not 0 <= dp_rank < prefill.dp:
        raise ValueError(f"prefill DP rank {dp_rank} does not exist: the prefill has DP {prefill.dp}")
