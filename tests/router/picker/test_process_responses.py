"""The picker's messages to Envoy, read with protobuf; its deadlines; and the limit of arriving bodies."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_api.errors import RequestError
from router.http.arriving import ArrivingBytes
from router.picker import ext_proc_pb2 as pb
from router.picker import process_responses as ours
from router.picker.process_responses import field, number_field, varint
from router.picker.request_body import RequestBody
from router.picker.state import Deadlines

_NAMES = st.sampled_from([b"a", b"content-length", b"x-request-id", b"x-gateway-destination-endpoint"])
_VALUES = st.binary(max_size=300).map(lambda value: value.translate(None, b"\0\r\n").strip(b" \t"))
_HEADERS = st.lists(st.tuples(_NAMES, _VALUES), max_size=6)
_TEXTS = st.text(max_size=200)
_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

_read = pb.ProcessingResponse.FromString


def _set(mutation: pb.HeaderMutation) -> list[tuple[bytes, bytes]]:
    assert all(option.append_action == _OVERWRITE for option in mutation.set_headers)
    return [(option.header.key.encode(), option.header.raw_value) for option in mutation.set_headers]


@given(st.integers(0, 2**63))
def test_numbers(number: int) -> None:
    found = pb.ProcessingRequest.FromString(b"")
    assert pb.HttpStatus.FromString(number_field(1, number % 2**31)).code == number % 2**31
    assert len(varint(number)) == max((number.bit_length() + 6) // 7, 1)
    assert not found.HasField("request_headers")


@given(_TEXTS, st.integers(0, 10**9), _HEADERS, _HEADERS, st.none() | st.just("/prefix/v1?a=b"))
def test_encoded_decision_for_headers(endpoints: str, number: int, before: list, after: list, path: str | None) -> None:
    routed = ours.Routed(endpoints, str(number), before, after, path, [(b"x-said", b"value")])
    found = _read(routed.to_headers())
    common = found.request_headers.response
    assert common.clear_route_cache
    expected = [(b"x-gateway-destination-endpoint", endpoints.encode())]
    expected += [(b":path", path.encode())] if path else []
    assert _set(common.header_mutation) == expected + [header for header in after if header not in before]
    removed = {name for name, _ in before} - {name for name, _ in after} - {b"x-gateway-destination-endpoint"}
    assert sorted(common.header_mutation.remove_headers) == sorted(name.decode() for name in removed)
    assert found.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == endpoints
    assert dict(found.dynamic_metadata["kvrouter"]) == {"request": str(number), "x-said": "value"}


@given(st.dictionaries(st.text(max_size=40), st.floats(0, 1), max_size=5))
def test_encoded_scores(scores: dict[str, float]) -> None:
    routed = ours.Routed("1.2.3.4:5", "6", [], [], None, [], scores)
    found = _read(routed.to_headers()).dynamic_metadata["envoy.lb"]
    assert found["x-gateway-destination-endpoint"] == "1.2.3.4:5"
    assert dict(found["x-gateway-destination-endpoint-scores"]) == scores


@given(st.none() | st.binary(max_size=1000))
def test_encoded_decision_for_a_body(body: bytes | None) -> None:
    found = _read(ours.Routed("1.2.3.4:5", "6", [], [(b"a", b"b")], None, []).to_body(body))
    common = found.request_body.response
    assert common.HasField("body_mutation") == (body is not None)
    assert common.body_mutation.body == (body or b"")
    assert (b"a", b"b") in _set(common.header_mutation)
    assert found.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "1.2.3.4:5"


@given(st.integers(0, 200_000), st.booleans())
def test_bodies_in_parts(size: int, ends: bool) -> None:
    body = bytes(size)
    for made, kind in ((ours.request_chunks, "request_body"), (ours.response_chunks, "response_body")):
        parts = [getattr(_read(each), kind).response.body_mutation.streamed_response for each in made(body, ends)]
        assert b"".join(part.body for part in parts) == body
        assert [part.end_of_stream for part in parts] == [False] * (len(parts) - 1) + [ends]
        assert max(len(part.body) for part in parts) <= 64 * 1024


@given(_HEADERS, _HEADERS, st.booleans())
def test_encoded_response_headers(before: list, after: list, less: bool) -> None:
    found = _read(ours.response_headers(before, after, ours.NO_RESPONSE_BODY if less else b""))
    new = [header for header in after if header not in before]
    assert _set(found.response_headers.response.header_mutation) == new
    assert found.HasField("mode_override") == less
    mode = found.mode_override
    assert (mode.response_body_mode, mode.response_trailer_mode) == (0, 1 if less else 0)


@given(st.integers(100, 599), _HEADERS, st.binary(max_size=500), _TEXTS)
def test_encoded_immediate_response(status: int, headers: list, body: bytes, details: str) -> None:
    found = _read(ours.immediate(status, headers, body, details)).immediate_response
    assert (found.status.code, found.body, found.details) == (status, body, details)
    assert _set(found.headers) == [header for header in headers if header[0] != b"content-length"]


@pytest.mark.parametrize("header", [(b"a\r\nb", b"c"), (b"", b"c"), (b"A", b"c"), (b"a b", b"c"), (b"a", b"b\r\nc: d")])
def test_what_is_no_header_never_becomes_one_for_envoy(header: tuple[bytes, bytes]) -> None:
    for encode in (
        lambda: ours.Routed("1.2.3.4:5", "6", [], [header], None, []),
        lambda: ours.response_headers([], [header]),
        lambda: ours.immediate(200, [header], b"", ""),
    ):
        with pytest.raises(ValueError, match="no token"):
            encode()


def test_encoded_responses_without_changes() -> None:
    kept = {
        ours.KEEP_REQUEST_HEADERS: "request_headers",
        ours.KEEP_REQUEST_TRAILERS: "request_trailers",
        ours.KEEP_RESPONSE_HEADERS: "response_headers",
        ours.KEEP_RESPONSE_BODY: "response_body",
        ours.KEEP_RESPONSE_TRAILERS: "response_trailers",
    }
    for message, kind in kept.items():
        assert _read(message).WhichOneof("response") == kind
    assert field(1, b"") == b"\x0a\x00"


async def test_deadlines_are_called_in_order_unless_dropped() -> None:
    called: list[str] = []
    done = asyncio.Event()
    deadlines = Deadlines(0.02)
    for name in ("a", "dropped", "b"):
        deadlines.set(name, lambda name=name: called.append(name))  # type: ignore[misc]
    deadlines.drop("dropped")
    deadlines.drop("unknown")
    deadlines.set("later", done.set)
    await asyncio.wait_for(done.wait(), 60)
    assert called == ["a", "b"]
    deadlines.set("never", lambda: called.append("never"))
    deadlines.close()
    done.clear()
    others = Deadlines(0.03)
    others.set("after", done.set)
    await asyncio.wait_for(done.wait(), 60)
    assert called == ["a", "b"]


async def test_arriving_bodies_share_one_limit() -> None:
    arrivals = ArrivingBytes(100)
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
