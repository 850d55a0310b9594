"""The network between workers: transfers of computed prompts from prefill workers to decode workers.

A node has some workers, and a rack some nodes. A transfer has the rate of its distance. It uses three links: the
sender's, the receiver's and that of the pair. Each link serves its transfers one after the other, and no link waits for
another. The two ends are faster than most pairs. So transfers to several racks overlap, and two of one pair do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.settings import Role
from simulator.fleet.sources import Link


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """The network of a fleet. Rates in tokens per second.

    - `end`: the rate at which a worker sends, and at which it receives.
    - `node`, `rack`, `far`: the rate of a pair in one node, in one rack, and in two racks.
    - `latency`: the seconds that each transfer lasts longer.
    - `per_node`, `per_rack`: the workers of a node, and of a rack.

    The defaults are those of 320 KiB a token: 100 GB/s in a node, 50 GB/s in a rack, and 12.5 GB/s between racks.
    """

    end: float = 305_000.0
    node: float = 305_000.0
    rack: float = 152_000.0
    far: float = 38_000.0
    latency: float = 0.005
    per_node: int = 2
    per_rack: int = 4


class Network:
    """The links of a fleet. Roles are mixed in every node and rack, in proportion to their number."""

    def __init__(self, spec: NetworkSpec, roles: list[Role]) -> None:
        """Create idle links. `roles`: the role of each worker."""
        self._spec = spec
        self._places = _places(roles)
        self._sending = [Link(spec.end) for _ in roles]
        self._receiving = [Link(spec.end) for _ in roles]
        self._pairs: dict[tuple[int, int], Link] = {}

    def rate(self, sender: int, receiver: int) -> float:
        """Return the tokens per second of a pair of workers."""
        spec, one, other = self._spec, self._places[sender], self._places[receiver]
        if one // spec.per_node == other // spec.per_node:
            return spec.node
        return spec.rack if one // spec.per_rack == other // spec.per_rack else spec.far

    def transfer(self, sender: int, receiver: int, tokens: int, now: float) -> float:
        """Return when a transfer ends that is requested now."""
        pair = self._pairs.get((sender, receiver))
        if pair is None:
            pair = self._pairs[sender, receiver] = Link(self.rate(sender, receiver))
        links = (self._sending[sender], self._receiving[receiver], pair)
        return self._spec.latency + max(link.transfer(tokens, now) for link in links)


def _places(roles: list[Role]) -> list[int]:
    """Return the place of each worker, so that each part of the places has its share of every role."""
    of_role: dict[Role, int] = {}
    keys: list[tuple[float, int]] = []
    for worker, role in enumerate(roles):
        number = of_role[role] = of_role.get(role, -1) + 1
        keys.append(((number + 0.5) / roles.count(role), worker))
    places = [0] * len(roles)
    for place, (_, worker) in enumerate(sorted(keys)):
        places[worker] = place
    return places
