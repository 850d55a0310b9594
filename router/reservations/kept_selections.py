"""Selections that their ids may reserve for a while, with the requests that they answer."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from router.reservations.selection_bodies import SelectBody

SELECTION_SECONDS: Final = 120.0
MOST_SELECTIONS: Final = 4096
MOST_TOKENS: Final = 2**26


class KeptSelection:
    """A selection that its id may reserve until `until`. `asked`: its request, with packed token ids."""

    def __init__(self, asked: SelectBody, member: int, dp_rank: int, until: float) -> None:
        self.tokens = array("I", asked.token_ids or ())
        asked.token_ids = None
        self.asked = asked
        self.member = member
        self.dp_rank = dp_rank
        self.until = until

    def request(self) -> SelectBody:
        """Return the request, with its token ids."""
        return msgspec.structs.replace(self.asked, token_ids=self.tokens.tolist())


class KeptSelections:
    """The last selections with an id: at most `MOST_SELECTIONS`, with `MOST_TOKENS` token ids in total."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, KeptSelection] = OrderedDict()
        self._tokens = 0

    def keep(self, id: str, asked: SelectBody, member: int, dp_rank: int) -> None:
        """Keep a selection for `SELECTION_SECONDS` seconds. It replaces an earlier one with its id."""
        self.drop(id)
        now = self._clock()
        while self._kept and self._kept[oldest := next(iter(self._kept))].until <= now:
            self.drop(oldest)
        self._kept[id] = kept = KeptSelection(asked, member, dp_rank, now + SELECTION_SECONDS)
        self._tokens += len(kept.tokens)
        while len(self._kept) > MOST_SELECTIONS or self._tokens > MOST_TOKENS:
            self.drop(next(iter(self._kept)))

    def get(self, id: str, model: str, group: str) -> KeptSelection | None:
        """Return the selection with an id, if it was made for this model and routing group, and has not expired."""
        kept = self._kept.get(id)
        if kept is None or (kept.asked.model_name, kept.asked.routing_group) != (model, group):
            return None
        return kept if kept.until > self._clock() else None

    def drop(self, id: str) -> None:
        """Drop a selection, if it is kept."""
        if (dropped := self._kept.pop(id, None)) is not None:
            self._tokens -= len(dropped.tokens)
