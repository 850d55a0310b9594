"""The endpoint picker: Envoy asks it for the endpoint of each request, and forwards the bytes itself.

It implements `envoy.service.ext_proc.v3.ExternalProcessor` as the Gateway API Inference Extension uses it:

    request's head and body  ──▶  `x-gateway-destination-endpoint: ip:port`, or an error response
    response's head          ──▶  headers to add
    response's body          ──▶  the same body, if Envoy sends it at all
    end of the stream             end of the response

- `server`: the port with its services and its certificate.
- `external_processor`: the method that Envoy calls.
- `request`: one request, for which Envoy is both the client and the transport.
- `response`: the response of a request, as far as Envoy shows it.
- `request_body`: the body of a request.
- `endpoints`: the allowed endpoints of a request, and its fallbacks.
- `state`: addresses, deadlines, objectives and the picker's own answers.
- `ext_proc.proto`: the used part of the protocol's messages.
- `process_requests`: decoding of Envoy's messages and of gateways' headers.
- `process_responses`: encoding of messages to Envoy.
- `grpc_server`: gRPC calls.
- `http2`: HTTP/2 connections for gRPC.
- `health`: gRPC's health service.
"""

from __future__ import annotations

from router.picker.server import running_picker

__all__ = ["running_picker"]
