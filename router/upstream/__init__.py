"""Requests to workers and their answers, over connections that are kept: HTTP/1.1, and nothing that stands between.

response_handler  who gets an answer, and how it may fail to come
request           one request on its way
response_parser   what llhttp reads of the answers
connection        one connection: a request at a time, and its answer as it comes
pool              the connections to a worker, and which of them a request goes over
transport         who takes requests to workers in the router's stead
"""

from __future__ import annotations

from router.http.headers import ResponseHead, end_to_end
from router.http.worker_url import Origin
from router.upstream.pool import Upstream, Upstreams
from router.upstream.request import UpstreamRequest
from router.upstream.response_handler import (
    ChunkForwarder,
    ResponseHandler,
    UnreachableError,
    UpstreamError,
    UpstreamTimeoutError,
)

__all__ = [
    "ChunkForwarder",
    "Origin",
    "ResponseHandler",
    "ResponseHead",
    "UnreachableError",
    "Upstream",
    "UpstreamError",
    "UpstreamRequest",
    "UpstreamTimeoutError",
    "Upstreams",
    "end_to_end",
]
