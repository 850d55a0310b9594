"""A request that is served where it arrived: what a connection asks of it."""

from __future__ import annotations

from mypy_extensions import trait


@trait
class TakenRequest:
    """It answers by the `ResponseWriter` it was made with, once it was started."""

    def start(self, body: bytes) -> None:
        """All of the request came."""
        raise NotImplementedError

    def client_left(self) -> None:
        """The answer is not wanted any more."""
        raise NotImplementedError

    def pause(self) -> None:
        """The client does not read."""
        raise NotImplementedError

    def resume(self) -> None:
        """The client reads again."""
        raise NotImplementedError

    @property
    def answering(self) -> bool:
        """Whether something of an answer was passed on."""
        raise NotImplementedError
