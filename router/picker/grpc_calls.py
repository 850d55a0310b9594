"""A gRPC call as its method sees it: the interface between `grpc_server` and the services."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

# Status codes of gRPC.
OK: Final = 0
NOT_FOUND: Final = 5
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13


class Call(Protocol):
    """The peer's end of a call."""

    def send(self, *messages: bytes) -> None:
        """Send messages."""

    def end(self, status: int = OK, reason: str = "") -> None:
        """End the call, once all messages are sent. Then nothing is received any more, and it is closed."""


class CallHandler(Protocol):
    """Handles one call."""

    def received(self, message: bytes) -> None:
        """A message of the peer."""

    def peer_ended(self) -> None:
        """The peer sends no more."""

    def closed(self) -> None:
        """The call is over, however it ended. Called once, and nothing after it."""


# Begins a call; and the methods of a server, by their paths: /package.Service/Method.
Method: TypeAlias = Callable[[Call], CallHandler]
Methods: TypeAlias = Mapping[str, Method]
