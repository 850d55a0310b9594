"""The endpoint picker: Envoy asks it for the endpoint of each request, and forwards the bytes itself.

It implements `envoy.service.ext_proc.v3.ExternalProcessor` as the Gateway API Inference Extension uses it:

    request's head and body  ──▶  `x-gateway-destination-endpoint: ip:port`, or an error response
    response's head          ──▶  headers to add
    response's body          ──▶  the same body, if Envoy sends it at all
    end of the stream             end of the response
"""

from __future__ import annotations

from router.picker.server import running_picker

__all__ = ["running_picker"]
