"""Bodies that Envoy sends count together with all others that arrive."""

from __future__ import annotations

import pytest

from http_api.errors import RequestError
from router.auth import ArrivingBodies
from router.picker.request_body import RequestBody


def test_arriving_bodies_share_one_limit() -> None:
    arrivals = ArrivingBodies(100)
    first, second = RequestBody(arrivals), RequestBody(arrivals)
    first.add(b"x" * 60)
    with pytest.raises(RequestError) as refused:
        second.add(b"y" * 60)
    assert refused.value.status == 503
    second.end_arrival()
    first.add(b"x" * 30)
    assert arrivals.bytes == 90
    for _ in range(2):  # once it is whole, and when its call is over
        first.end_arrival()
    assert arrivals.bytes == 0
    assert first.whole() == b"x" * 90
