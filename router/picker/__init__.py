"""The endpoint picker: Envoy asks it where each request should go, and carries the bytes itself.

It speaks `envoy.service.ext_proc.v3.ExternalProcessor` as the Gateway API Inference Extension uses it:

    request's head and body  ──▶  x-gateway-destination-endpoint: ip:port   (or an error to answer with)
    answer's head            ──▶  what to add to it
    answer's body            ──▶  nothing, as it came; or not sent here at all
    the stream's end              the answer's end

ext_proc.proto  the messages of that protocol, as far as they are used
messages        making and reading them
request         one request on its way: an exchange whose client and carrier is Envoy
observer        answers' bytes, where Envoy shows them beside
addresses       workers as ip:port
server          the gRPC services
"""

from __future__ import annotations

from router.picker.server import running_picker

__all__ = ["running_picker"]
