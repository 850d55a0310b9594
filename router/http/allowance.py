"""Token buckets for frames without progress (resets, pings), per connection and per peer address."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_ADDRESSES: Final = 1024  # the latest addresses whose buckets are kept
_CONNECTIONS: Final = 4  # an address's bucket fills the buckets of this number of connections
_PORTION: Final = 16.0  # tokens that an empty connection takes from its address at once


class AddressAllowance:
    """The token bucket of all connections of an address. It holds `most` tokens and gains `rate` tokens a second."""

    __slots__ = ("_at", "_clock", "_left", "_most", "_rate")

    def __init__(self, most: float, rate: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._rate = rate
        self._clock = clock
        self._left = most
        self._at = clock()

    def take_up_to(self, amount: float) -> float:
        """Take `amount` tokens, or all if there are fewer. Return the number of taken tokens."""
        now = self._clock()
        self.give(max(now - self._at, 0.0) * self._rate)
        self._at = now
        taken = min(self._left, amount)
        self._left -= taken
        return taken

    def give(self, amount: float) -> None:
        """Add `amount` tokens, up to the bucket's size."""
        self._left = min(self._most, self._left + amount)


class Allowance:
    """The token bucket of one connection: at first `least` to `most` tokens. It refills from that of its address."""

    __slots__ = ("_address", "_left", "_most")

    def __init__(self, most: float, least: float, address: AddressAllowance) -> None:
        self._most = most
        self._address = address
        self._left = max(address.take_up_to(most), least)

    def earn(self, amount: float) -> None:
        """Add tokens for progress of the connection."""
        self._left = min(self._most, self._left + amount)

    def take(self) -> bool:
        """Use one token. Return False if no token is left; the connection must end then."""
        if self._left < 1:
            self._left += self._address.take_up_to(_PORTION)
            if self._left < 1:
                return False
        self._left -= 1
        return True

    def close(self) -> None:
        """Return the remaining tokens to the address, at the end of the connection."""
        self._address.give(self._left)
        self._left = 0.0


class Allowances:
    """The token buckets of a server's connections. A peer without tokens gains few by new connections.

    - `most`, `least`: the largest and smallest number of tokens of a new connection.
    - `rate`: tokens a second of each address.
    """

    def __init__(self, most: float, least: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._least = least
        self._rate = rate
        self._clock = clock
        self._addresses: OrderedDict[str, AddressAllowance] = OrderedDict()

    def connected(self, address: str) -> Allowance:
        """Create the bucket of a new connection."""
        shared = self._addresses.get(address)
        if shared is None:
            shared = AddressAllowance(_CONNECTIONS * self._most, self._rate, self._clock)
            self._addresses[address] = shared
            if len(self._addresses) > _ADDRESSES:
                self._addresses.popitem(last=False)
        self._addresses.move_to_end(address)
        return Allowance(self._most, self._least, shared)
