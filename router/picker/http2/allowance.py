"""What a peer may do that costs more than it brings: so much at once, so much a second, and more as it gets on."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_ADDRESSES: Final = 1024  # that are remembered
_CONNECTIONS: Final = 4  # of an address, that begin with all that one may have
_PORTION: Final = 16.0  # that a connection takes of what its address has


class AddressAllowance:
    """What the connections of an address have together: `most` of it, that many more a second."""

    __slots__ = ("_at", "_clock", "_left", "_most", "_rate")

    def __init__(self, most: float, rate: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._rate = rate
        self._clock = clock
        self._left = most
        self._at = clock()

    def take_up_to(self, amount: float) -> float:
        """Take so much, or what is left; how much that was."""
        now = self._clock()
        self.give(max(now - self._at, 0.0) * self._rate)
        self._at = now
        taken = min(self._left, amount)
        self._left -= taken
        return taken

    def give(self, amount: float) -> None:
        """There is so much more, up to the most."""
        self._left = min(self._most, self._left + amount)


class Allowance:
    """What a connection has: `least` to `most` when it begins, then what it earns, and takes of its address's."""

    __slots__ = ("_address", "_left", "_most")

    def __init__(self, most: float, least: float, address: AddressAllowance) -> None:
        self._most = most
        self._address = address
        self._left = max(address.take_up_to(most), least)

    def earn(self, amount: float) -> None:
        """Something got on."""
        self._left = min(self._most, self._left + amount)

    def take(self) -> bool:
        """Spend one. False when there is none left, which ends the connection."""
        if self._left < 1:
            self._left += self._address.take_up_to(_PORTION)
            if self._left < 1:
                return False
        self._left -= 1
        return True

    def close(self) -> None:
        """The connection is over: what is left is for others of its address."""
        self._address.give(self._left)
        self._left = 0.0


class Allowances:
    """Those of the connections of a server: who spends all gets little more by connecting again, or often.

    `most` and `least` are those of one connection, `rate` is what an address gets a second.
    """

    def __init__(self, most: float, least: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._least = least
        self._rate = rate
        self._clock = clock
        self._addresses: OrderedDict[str, AddressAllowance] = OrderedDict()

    def connected(self, address: str) -> Allowance:
        """The allowance of another connection."""
        shared = self._addresses.get(address)
        if shared is None:
            shared = AddressAllowance(_CONNECTIONS * self._most, self._rate, self._clock)
            self._addresses[address] = shared
            if len(self._addresses) > _ADDRESSES:
                self._addresses.popitem(last=False)
        self._addresses.move_to_end(address)
        return Allowance(self._most, self._least, shared)
