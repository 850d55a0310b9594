"""The load of a name's targets as policies see it: a record of each, and a linear policy's costs as columns.

A row is read again after the load of its target changed, so a choice costs the rows that changed since the last one.
Time alone changes a row as well, by silent engines and by evictions. So all rows are read again at intervals, in parts.

The cost of answers on a target, in computed tokens, by learned rates:

    context_token   output · d / a
    memory          lacking / used · output · (t0 + a·n + d·ctx) / a

    output     expected tokens of an answer
    n, ctx     requests in flight to the target, and the tokens they hold
    a, t0, d   the target's seconds for a computed token, a step, and a token of context in a step
    used       the share of its KV memory that requests use, as the engine reports it
    lacking    the share that is missing when all requests have their prompts, and half of their answers

Each step of an answer reads the context of all requests there. Near saturation, other prompts are computed between two
tokens, and `d` learns a part of their time. So d / a counts at most as at the start, before anything is learned.

Requests release their memory when they end, so all of it is released once in the time of an answer. A prompt waits
until what is missing was released.
"""

from __future__ import annotations

from math import exp
from sys import maxsize
from typing import Final

from indexer.index import Index
from router.load.target_load import LoadTable, TargetLoad
from router.policies import Candidate, CostColumns, LinearPolicy
from router.policies.rates import Rates
from router.prediction.learned import Learned
from router.programs import Sessions
from router.routing.ranks import RoutableRank

# The interval in seconds at which all rows are read again, and the most rows that one request reads for it.
_SWEEP_SECONDS = 0.5
_SWEEP_ROWS = 512
# The relative change of the price of evictions after which all rows are read again.
_PRICE_CHANGE = 0.05
# The least price of evictions, which only decides between equal targets: so prompts go where there is room.
_LEAST_PRICE: Final = 0.001
# The weight of the tokens that sessions announced to ask for again, in the price of evictions.
STEEP: Final = 2.0
HORIZON: Final = 60.0
# The share of a target's limit in use from which each request is compared with what is left.
_TIGHT: Final = 0.75
# The share of a target's memory in use from which prefixes that its running prompts share are counted once.
_SHARING_MATTERS: Final = 0.25
# The least share of memory in use, by which the wait for memory is divided. Engines round what they report.
_LEAST_USED: Final = 0.05
# The weight of the first ten seconds in an average over `HORIZON` seconds.
_LEAST_OBSERVED: Final = 1 - exp(-10.0 / HORIZON)


def context_token(rates: Rates, start: Rates, output: float) -> float:
    """Return the time in which the steps of an answer read a token of context. `start`: the assumed rates."""
    return output * min(rates.context_token / rates.token, start.context_token / start.token)


def memory_wait(
    rates: Rates, output: float, requests: int, pending: int, context: int, used: float, capacity: int
) -> float:
    """Return the expected wait for KV memory.

    - `pending`: the prompt tokens that were sent to the target and not computed yet.
    - `used`: the share of its memory in use.
    - `capacity`: the tokens that its memory holds.
    """
    lacking = used + (pending + (requests + 1) * output / 2) / capacity - 1
    if lacking <= 0:
        return 0.0
    return lacking / max(used, _LEAST_USED) * output * rates.step_seconds(requests, context) / rates.token


class PrefillShare:
    """The share of a model's targets that compute prompts, averaged over about `HORIZON` seconds.

    An observation counts 1/e after `HORIZON` seconds. The average begins at 1, as if all targets computed prompts.
    """

    def __init__(self) -> None:
        self.average = 1.0
        self._assumed = 1.0  # the weight of the assumption in the average
        self._at: float | None = None

    @property
    def observed(self) -> float:
        """The average of the observations alone. In the first ten seconds, the seconds that are left count as idle."""
        return (self.average - self._assumed) / max(1 - self._assumed, _LEAST_OBSERVED)

    def see(self, share: float, now: float) -> None:
        """Record the share at `now`, in seconds of any clock."""
        if self._at is None:
            self._at = now
        elif now > self._at:
            fading = exp((self._at - now) / HORIZON)
            self.average = share + (self.average - share) * fading
            self._assumed *= fading
            self._at = now


class LoadView:
    """The load of each rank of a name, in the order of `ModelTargets.ranks`.

    - `records`: the ranks as candidates without a prompt. All requests share them, so they are never changed.
    - `columns`: the costs of a linear policy.
    - `prefilling`: the rows whose targets have prompts to compute.
    - `tight`: the rows whose targets have used more than three quarters of their limit.
    - `always_fits`: the tokens of memory that all other targets have left.
    - `longest_output`: the most tokens that an answer is expected to have, if its request announces none.
    """

    def __init__(
        self,
        ranks: list[RoutableRank],
        load: LoadTable,
        learned: Learned,
        policy: LinearPolicy | None,
        prefill_share: PrefillShare,
        index: Index,
        sessions: Sessions,
    ) -> None:
        self._index = index
        self._ranks = ranks
        self._journal = load.journal
        self._pressure = learned.pressure
        self._sessions = sessions
        self._returning = 0.0  # the mean tokens of a rank that sessions will ask for again
        self._rates = learned.rates
        self._outputs = learned.outputs
        self._policy = policy
        self._row_of_slot = {rank.load.slot: rank.row for rank in ranks}
        self._read_to = -1
        self._sweep_at = 0.0
        self._swept = len(ranks)
        self._price = 0.0
        self._least_fill = 0.0
        self._longest_wait = 0.0  # for KV memory, where it is known
        self.records = [Candidate(rank.target) for rank in ranks]
        self.columns = CostColumns(len(ranks))
        self.prefilling: set[int] = set()
        self.tight: set[int] = set()
        self.always_fits = maxsize
        self.longest_output = 0.0
        self._prefill_share = prefill_share

    def update(self, now: float) -> None:
        """Read the rows that changed since the last call. `now`: the clock's time."""
        rows = len(self._ranks)
        slots = self._journal.slots
        first = len(slots) - (self._journal.end - self._read_to)
        if self._read_to < 0 or first < 0:  # nothing was read yet, or the journal has forgotten some changes
            self._read_all()
        else:
            for slot in set(slots[first:]):  # each request changes its target's load more than once
                row = self._row_of_slot.get(slot)
                if row is not None:
                    self._read(row)
        self._read_to = self._journal.end
        if self._swept >= rows and now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_SECONDS
            self._swept = 0
            self._sessions.expire()
            self._returning = sum([self._kept(rank) for rank in self._ranks]) / max(rows, 1)
            self._least_fill = min((rank.fill for rank in self._ranks), default=0.0)
            known = [rank.row for rank in self._ranks if _knows_memory(rank)]
            self._longest_wait = max([self.records[row].memory for row in known], default=0.0)
            price = self._pressure.price()
            if abs(price - self._price) > _PRICE_CHANGE * self._price:
                self._price = price
                self._read_all()
        if self._swept < rows:
            end = min(self._swept + _SWEEP_ROWS, rows)
            for row in range(self._swept, end):
                self._read(row, anew=True)
            self._swept = end
        if rows:
            self._prefill_share.see(len(self.prefilling) / rows, now)

    def _read_all(self) -> None:
        self.always_fits, self.longest_output = maxsize, 0.0
        for row in range(len(self._ranks)):
            self._read(row, anew=True)
        self._swept = len(self._ranks)

    def _read(self, row: int, anew: bool = False) -> None:
        """Read a row's load: of this router, other routers and other clients, scaled by the worker's weight.

        `anew`: also read what time alone changes.
        """
        rank = self._ranks[row]
        target, load = rank.target, rank.load
        if anew:
            load.engine = rank.worker.metrics.get(target.dp_rank)
            rank.full = self._pressure.full(target)
            rank.shows_fill = rank.capacity is not None and self._pressure.observes(target)
            rank.rates = self._rates.likely(target.worker, target.model)
            rank.output = self._outputs.expected(rank.served.model, None)
            self.longest_output = max(self.longest_output, rank.output)
            rank.context_token = context_token(rank.rates, self._rates.start, rank.output)
        peers, engine = load.peers, load.engine
        record = Candidate(
            target,
            requests=load.requests + peers.requests + engine.unseen,
            pending=load.pending + peers.pending,
            context=load.context + peers.context,
            waiting=len(load.prefills) + peers.waiting + engine.waiting,
            loads=load.loads,
            eviction=self._eviction(rank),
            fuller=self._fuller(rank),
            context_token=rank.context_token,
            kv_usage=engine.kv_usage,
        )
        record.memory = self._memory(rank, record)
        if (weight := rank.weight) != 1:
            record.requests = round(record.requests / weight)
            record.pending = round(record.pending / weight)
            record.context = round(record.context / weight)
            record.loads = round(record.loads / weight)
        self.records[row] = record
        if record.pending:
            self.prefilling.add(row)
        else:
            self.prefilling.discard(row)
        self._read_limit(rank, load, record.requests)
        if self._policy is not None:
            columns = self.columns
            columns.fixed[row], columns.per_token[row], columns.shares[row] = self._policy.line(record)

    def _fuller(self, rank: RoutableRank) -> float:
        """Return how much fuller a rank's cache is than the emptiest one, as a share of its size."""
        rank.fill = 1.0
        if rank.capacity and rank.shows_fill:
            rank.fill = min(self._index.held(rank.target) / rank.capacity, 1.0)
        return max(rank.fill - self._least_fill, 0.0)

    def _read_limit(self, rank: RoutableRank, load: TargetLoad, requests: int) -> None:
        """Note how much of its limit a rank has used."""
        row, slots, memory = rank.row, load.limit.slots, load.limit.memory
        tight = (
            load.queues or (load.hides_limit and load.streamed > 0) or (slots is not None and requests > slots * _TIGHT)
        )
        if memory is not None:
            used = load.held + load.outputs
            rank.counts_shared = used > memory * _SHARING_MATTERS
            tight |= used > memory * _TIGHT
            self.always_fits = min(self.always_fits, int(memory * (1 - _TIGHT)))
        if tight:
            self.tight.add(row)
        else:
            self.tight.discard(row)

    def _memory(self, rank: RoutableRank, record: Candidate) -> float:
        """Return the expected wait for KV memory on a rank. If it is unknown, the longest known one is assumed."""
        used, capacity = record.kv_usage, rank.capacity_tokens
        if used is None or capacity is None:
            return self._longest_wait
        requests, pending, context = record.requests, record.pending, record.context
        return memory_wait(rank.rates, rank.output, requests, pending, context, used, capacity)

    def _eviction(self, rank: RoutableRank) -> float:
        """Return the price of an eviction on a rank: 0 while it has room."""
        if not rank.full:
            return 0.0
        if not self._returning or not rank.capacity_tokens:
            return max(self._price, _LEAST_PRICE)
        return self._price * max(1 + STEEP * (self._kept(rank) - self._returning) / rank.capacity_tokens, 0.0)

    def _kept(self, rank: RoutableRank) -> int:
        """Return the tokens that sessions will ask a rank for again, at most those that it can keep."""
        return min(self._sessions.returning(rank.target), rank.capacity_tokens or 0)


def _knows_memory(rank: RoutableRank) -> bool:
    """Return whether a rank's engine reports the size and the usage of its KV memory."""
    return rank.load.engine.kv_usage is not None and rank.capacity_tokens is not None
