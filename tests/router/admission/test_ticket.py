"""Priority and deadline of requests."""

from __future__ import annotations

import pytest

from http_api.errors import RequestError
from router.admission.ticket import Ticket, read_ticket

NOW = 1000.0


def ticket(*headers: tuple[str, str], priority: int = 0, best_priority: int | None = None) -> Ticket:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return read_ticket(raw, priority, best_priority=best_priority, clock=lambda: NOW)


def test_without_anything_said_a_request_has_all_the_time() -> None:
    assert ticket() == Ticket(arrived=NOW)
    assert ticket().left(NOW + 10**6) is None


def test_priority_header_overrides_the_body_up_to_the_cap_of_the_tenant() -> None:
    assert ticket(priority=3).priority == 3
    assert ticket(("x-kvrouter-priority", "-2"), priority=3).priority == -2
    assert ticket(("x-kvrouter-priority", "-9"), best_priority=1).priority == 1
    assert ticket(best_priority=1).priority == 1
    assert ticket(priority=5, best_priority=1).priority == 5
    assert ticket(best_priority=-4).priority == -4
    assert ticket(("x-kvrouter-priority", "0"), best_priority=-4).priority == 0


@pytest.mark.parametrize("value", ["soon", "", "1.5", "99999999999"])
def test_invalid_priority_is_refused_by_its_name(value: str) -> None:
    with pytest.raises(RequestError, match="x-kvrouter-priority") as refusal:
        ticket(("x-kvrouter-priority", value))
    assert refusal.value.param == "x-kvrouter-priority"


@pytest.mark.parametrize(
    ("header", "value"), [("x-request-timeout", "2.5"), ("x-envoy-expected-rq-timeout-ms", "2500")]
)
def test_timeout_header_is_the_deadline_of_the_whole_answer(header: str, value: str) -> None:
    read = ticket((header, value))
    assert (read.deadline, read.place_by) == (NOW + 2.5, NOW + 2.5)
    assert read.left(NOW + 1) == 1.5
    assert read.left(NOW + 3) == 0


@pytest.mark.parametrize("header", ["x-stainless-read-timeout", "x-stainless-timeout"])
def test_first_byte_timeout_limits_only_sending(header: str) -> None:
    read = ticket((header, "600"))
    assert (read.deadline, read.place_by) == (None, NOW + 600)


def test_earliest_deadline_wins() -> None:
    read = ticket(("x-request-timeout", "9"), ("x-envoy-expected-rq-timeout-ms", "7000"), ("x-stainless-timeout", "8"))
    assert (read.deadline, read.place_by) == (NOW + 7, NOW + 7)


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "inf"])
def test_invalid_header_of_kvrouter_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="x-request-timeout"):
        ticket(("x-request-timeout", value))


@pytest.mark.parametrize("value", ["0", "x", "None", "not-given", "nan", "inf"])
def test_invalid_headers_of_other_products_are_ignored(value: str) -> None:
    assert ticket(("x-envoy-expected-rq-timeout-ms", value), ("x-stainless-read-timeout", value)).place_by is None
