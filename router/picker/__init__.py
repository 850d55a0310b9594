"""The endpoint picker: Envoy asks it where each request should go, and carries the bytes itself.

It speaks `envoy.service.ext_proc.v3.ExternalProcessor` as the Gateway API Inference Extension uses it:

    request's head and body  ──▶  x-gateway-destination-endpoint: ip:port   (or an error to answer with)
    answer's head            ──▶  what to add to it
    answer's body            ──▶  nothing, as it came; or not sent here at all
    the stream's end              the answer's end

server              the port, and what is served there
external_processor  the method that Envoy calls
request             one request: the client and the transport of its exchange is Envoy
request_body        its body
response            its answer, as far as Envoy tells of it
observer            answers' bytes, where Envoy shows them beside
endpoints           which workers it may go to, and which come after the first
gateway_headers     what gateways ask for in headers
objectives          priorities by name
own_answers         what no single worker could answer
addresses           workers as ip:port
deadlines           one timer for many
state               what requests share

ext_proc.proto      the messages of the protocol, as far as they are used
process_requests    reading Envoy's
process_responses   writing ours
protobuf_wire       protobuf as bytes

grpc_calls          a gRPC call, as methods see it
grpc_server         served on HTTP/2 connections of our own
http2               those
health              gRPC's health service
tls                 a certificate that follows its files
"""

from __future__ import annotations

from router.picker.server import running_picker

__all__ = ["running_picker"]
