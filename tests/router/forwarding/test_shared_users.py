"""Names of users that many conversations share."""

from __future__ import annotations

from router.apis.identities import Identity
from router.apis.requests import RoutedRequest
from router.forwarding.shared_users import SharedUsers


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def checked(users: SharedUsers, identity: Identity) -> str | None:
    request = RoutedRequest("m", identity=identity)
    users.check(request)
    return request.session


def test_one_user_of_many_conversations_is_no_session() -> None:
    clock = Clock()
    users, ann = SharedUsers(clock), Identity("ann", by_user=True)
    assert {checked(users, ann) for _ in range(60)} == {"ann"}
    assert {checked(users, ann) for _ in range(60)} == {None}
    clock.now += 599
    assert checked(users, ann) is None
    clock.now += 2
    assert checked(users, ann) == "ann"


def test_turns_of_one_conversation_are_a_session_for_ever() -> None:
    clock = Clock()
    users = SharedUsers(clock)
    for _ in range(1000):
        clock.now += 1.01
        assert checked(users, Identity("ann", by_user=True)) == "ann"


def test_names_of_sessions_are_never_shared() -> None:
    users = SharedUsers(Clock())
    assert {checked(users, Identity("one")) for _ in range(1000)} == {"one"}


def test_users_are_bounded() -> None:
    users = SharedUsers(Clock())
    for number in range(20_000):
        users.are_many(str(number))
    assert len(users._users) == 10_000
