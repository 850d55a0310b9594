"""The users that are no sessions, because many conversations share their names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Final

from router.apis.requests import RoutedRequest

# One conversation sends its turns one after another, so a user with more requests in a window has several.
_WINDOW: Final = 60.0
_MOST_TURNS: Final = 60
# Seconds without a full window until a user counts as one conversation again.
_SHARED_FOR: Final = 600.0
_MOST_USERS: Final = 10_000


class SharedUsers:
    """The names of users that many conversations share, such as one `user` for all clients of a service.

    The name of a shared user is no session. At most 10,000 users are known, the least recently seen are dropped.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        # The start of a user's window, the requests in it, and the time until which the user counts as shared.
        self._users: OrderedDict[str, tuple[float, int, float]] = OrderedDict()

    def check(self, request: RoutedRequest) -> None:
        """Drop the session of a request if it is the name of a shared user."""
        identity = request.identity
        if identity is not None and identity.by_user and self.are_many(identity.session):
            request.identity = request.session = None

    def are_many(self, user: str) -> bool:
        """Count a request of a user. Return whether the user's name is shared."""
        now = self._clock()
        start, requests, shared_until = self._users.pop(user, (now, 0, 0.0))
        if now - start >= _WINDOW:
            start, requests = now, 0
        requests += 1
        if requests > _MOST_TURNS:
            shared_until = now + _SHARED_FOR
        self._users[user] = (start, requests, shared_until)
        if len(self._users) > _MOST_USERS:
            self._users.popitem(last=False)
        return now < shared_until
