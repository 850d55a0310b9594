"""The endpoint picker: Envoy asks it where each request should go, and carries the bytes itself.

It speaks `envoy.service.ext_proc.v3.ExternalProcessor` as the Gateway API Inference Extension uses it:

    request's head and body  ──▶  x-gateway-destination-endpoint: ip:port   (or an error to answer with)
    answer's head            ──▶  what to add to it
    answer's body            ──▶  nothing: it is unchanged, or Envoy does not send it
    the stream's end              the answer's end

server              the port, and what is served there
external_processor  the method that Envoy calls, and responses that Envoy only shows
request             one request: the client and the transport of its exchange is Envoy
request_body        its body
response            its response, as far as Envoy shows it
endpoints           which workers a request may go to, and which come after the first
gateway_headers     headers by which gateways ask for something
state               what requests share: addresses, deadlines, objectives, own answers

ext_proc.proto      the messages of the protocol, as far as they are used
process_requests    reading Envoy's messages
process_responses   writing messages to Envoy

grpc_server         gRPC calls on HTTP/2 connections of our own
http2               those connections
health              gRPC's health service
tls                 a certificate that follows its files
"""

from __future__ import annotations

from router.picker.server import running_picker

__all__ = ["running_picker"]
