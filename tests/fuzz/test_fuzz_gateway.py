"""Messages of a gateway to the picker, damaged and out of order: each ends its own call at most."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import structlog
from budget import damaged, examples
from envoy_client import METHOD, EnvoyStream, headers
from grpc_call import GrpcCall, channel_to
from picker_under_test import PickerUnderTest, picker
from scripted_worker import MODEL, scripted_worker
from structlog.testing import capture_logs

from router.picker import ext_proc_pb2 as pb

FEW = 150
BODY = json.dumps({"model": MODEL, "prompt": "x"}).encode()
PATHS = ["/v1/completions", "/v1/completions", "/health", "/v1/models", "/sleep", "", "*", "/é", "/v1/../sleep", "//"]
ODD = [
    ("content-length", "9" * 5000),
    ("content-length", "²"),
    ("content-length", "-1"),
    ("x-kvrouter-priority", "nan"),
    ("x-request-timeout", "1e999"),
    ("x-request-id", "a b"),
    ("authorization", "Bearer é"),
    ("host", "["),
    ("origin", "http://["),
    ("x-gateway-destination-endpoint", "1.2.3.4:5"),
    ("X-Upper", "\r\nx: y"),
    (":path", "/sleep"),
    (":method", "GET"),
    (":authority", "é"),
]
STATUSES = ["200", "503", "0", "x", "99999999999", "-1", "²", ""]


def head(random: Random) -> Any:
    pairs = [(":method", random.choice(["POST"] * 6 + ["GET", "post", ""])), (":path", random.choice(PATHS))]
    return headers(pairs + random.choices(ODD, k=random.choice([0, 0, 1, 2])), random.random() < 0.2)


def message(random: Random, first: bool) -> bytes:
    kind = "request_headers" if first and random.random() < 0.9 else random.choice(list(_MADE))
    request = pb.ProcessingRequest(**{kind: _MADE[kind](random)})
    if random.random() < 0.7:
        request.protocol_config.request_body_mode = random.randrange(6)
        request.protocol_config.response_body_mode = random.randrange(6)
    if random.random() < 0.1:
        request.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {"x-gateway-destination-endpoint-subset": random.choice([5, "", "x", ["127.0.0.1:1"], [None], {"a": 1}])}
        )
    data: bytes = request.SerializeToString()
    return damaged(random, data) if random.random() < 0.2 else data


_MADE = {
    "request_headers": head,
    "request_body": lambda random: pb.HttpBody(
        body=random.choice([BODY, BODY, b"", b"{", b"\xff" * 9]), end_of_stream=random.random() < 0.8
    ),
    "request_trailers": lambda _: pb.HttpTrailers(),
    "response_headers": lambda random: headers([(":status", random.choice(STATUSES))], random.random() < 0.3),
    "response_body": lambda random: pb.HttpBody(body=b"data: {", end_of_stream=random.random() < 0.5),
    "response_trailers": lambda _: pb.HttpTrailers(),
}


async def test_malformed_messages_end_only_their_own_call() -> None:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    with capture_logs([structlog.processors.format_exc_info]) as logged:
        await _play_all(unhandled, logged)


async def _play_all(unhandled: list[Any], logged: list[Any]) -> None:
    async with scripted_worker() as worker, picker(worker.url) as (side, port), channel_to(port) as channel:
        asked = PickerUnderTest(side, channel, [worker.url.removeprefix("http://")])
        for random in examples(FEW):
            sent = [message(random, place == 0) for place in range(random.randrange(1, 5))]
            await _play(GrpcCall(channel, METHOD), sent)
            failed = [*unhandled, *(line for line in logged if line["log_level"] in ("error", "critical"))]
            assert not failed, (sent, failed)
        await side.until_released()
        stream: EnvoyStream
        stream, endpoint = await asked.routed()
        assert endpoint == asked.addresses[0]
        await stream.finish()
        await side.until_released()


async def _play(call: GrpcCall, messages: list[bytes]) -> None:
    """Send messages to the picker, and read its responses until the call ends."""
    for each in messages:
        call.write(each)
    call.done_writing()
    async with asyncio.timeout(60):
        while await call.read() is not None:
            pass
