"""The transfers of computed prompts between prefill and decode workers: their seconds per token, learned by pair.

A transfer begins when the prefill worker answers, and ends before the decode worker's first byte. Between the two the
decode worker also computes one token, which its rates explain. The rest is the transfer's time. It is learned only if
the decode worker computes no other prompt and holds no request back. Workers that receive both requests at once show
no beginning, and answers that are not streamed show no end: nothing is learned from these transfers. The first transfer
of a pair is not learned either, because engines connect to each other in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from indexer import Target
from router.policies.rates import RateTable
from router.routing.ranks import RoutableRank
from router.routing.sources import LoadRates

# The seconds before the first moved token and those per token, before any transfer is learned: about 30 GB/s for
# 320 KiB a token.
_FIRST_GUESS = (0.005, 1 / 100_000)


class TransferTimes:
    """The learned transfers of all pairs."""

    def __init__(self, rates: RateTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates = rates
        self._clock = clock
        self._learned = LoadRates(_FIRST_GUESS, clock)
        self._connected: set[str] = set()

    def seconds(self, prefill: Target, decode: Target, tokens: float) -> float:
        """Return the seconds in which a number of tokens moves between two targets."""
        if tokens <= 0:
            return 0.0
        start, token = self._learned.of(_name(prefill, decode))
        return start + token * tokens

    def watch(self, prefill: Target, decode: RoutableRank, tokens: int, streamed: bool) -> WatchedTransfer:
        """Return the watch of a transfer of `tokens` tokens. `streamed`: the first byte of the answer shows its end."""
        return WatchedTransfer(self, prefill, decode, tokens, streamed)

    def seen(self, prefill: Target, decode: Target, tokens: int, seconds: float, step: float) -> None:
        """Learn from a transfer. `seconds`: its time, and `step` seconds of them for one step of decoding."""
        pair = _name(prefill, decode)
        if tokens <= 0:
            return
        if pair in self._connected:
            self._learned.seen(pair, tokens, seconds, step)
        else:
            self._connected.add(pair)

    def forget(self, worker: str) -> None:
        """Forget a worker that was removed."""

        def is_of_worker(pair: str) -> bool:
            return worker in pair.split("\n")

        self._learned.forget(is_of_worker)
        self._connected = {pair for pair in self._connected if not is_of_worker(pair)}

    def step_seconds(self, decode: RoutableRank) -> float:
        """Return the seconds until a decode worker has computed one more token: half a step, and a step."""
        rates, load = self._rates.likely(decode.target.worker, decode.target.model), decode.load
        return 1.5 * rates.step_seconds(load.requests, load.context)

    def now(self) -> float:
        """Return the time of the clock."""
        return self._clock()


class WatchedTransfer:
    """A transfer whose beginning and end are reported."""

    __slots__ = ("_decode", "_prefill", "_streamed", "_times", "_tokens", "begun")

    def __init__(
        self, times: TransferTimes, prefill: Target, decode: RoutableRank, tokens: int, streamed: bool
    ) -> None:
        self._times = times
        self._prefill = prefill
        self._decode = decode
        self._tokens = tokens
        self._streamed = streamed
        self.begun: float | None = None

    def begin(self) -> None:
        """Record that the prefill worker answered. Only the first call counts."""
        if self.begun is None:
            self.begun = self._times.now()

    def end(self) -> None:
        """Record the decode worker's first byte, and learn from the time between."""
        begun, self.begun = self.begun, None
        decode = self._decode
        if begun is None or not self._streamed:
            return
        if decode.load.pending or decode.worker.metrics.get(decode.target.dp_rank).waiting:
            return
        seconds = self._times.now() - begun
        self._times.seen(self._prefill, decode.target, self._tokens, seconds, self._times.step_seconds(decode))


def _name(prefill: Target, decode: Target) -> str:
    return f"{prefill.worker}\n{prefill.dp_rank}\n{decode.worker}\n{decode.dp_rank}"
