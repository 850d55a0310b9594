"""What the requests of a picker share."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Protocol

from router.fleet.fleet import Fleet, Worker
from router.forwarding.proxy_services import ProxyContext
from router.picker.addresses import Addresses
from router.picker.deadlines import Deadlines
from router.picker.objectives import Objectives
from router.picker.own_answers import OwnAnswers
from router.settings import PickerSettings


class ObservedRequest(Protocol):
    """A request whose answer is shown by a stream of its own."""

    def observed(self, data: bytes, ended: bool) -> bool:
        """Bytes of the answer came. Whether more of them are wanted."""


@dataclass(slots=True)
class PickerState:
    """What requests need, and those that are here: by the numbers their answers are observed under."""

    proxy_context: ProxyContext
    fleet: Fleet
    settings: PickerSettings
    own_answers: OwnAnswers
    objectives: Objectives
    body_deadlines: Deadlines
    addresses: Addresses = field(default_factory=Addresses)
    requests: dict[str, ObservedRequest] = field(default_factory=dict)
    observed: bool = False  # there is a filter that shows answers
    told: bool | None = None  # whether Envoy tells of answers' heads; None: nobody knows yet
    numbers: count[int] = field(default_factory=lambda: count(1))
    random: Random = field(default_factory=Random)

    def address_of(self, worker: Worker) -> str | None:
        """Where a worker is, if that is known."""
        return self.addresses.of(worker.url)

    def worker_at(self, address: str) -> Worker | None:
        """The worker at an address."""
        return next((each for each in self.fleet.workers if self.address_of(each) == address), None)
