"""Requests to workers and their answers, over connections that are kept: HTTP/1.1, and nothing that stands between.

origin       where a worker listens, and the head of a request to it
answer_head  the head of an answer, and what of it goes on to the client
connection   one connection: a request at a time, and what llhttp reads of the answer
chunks       chunks of events, which need no llhttp
pool         the connections to a worker, and one request's way over them
"""

from __future__ import annotations

from router.http.headers import end_to_end
from router.http.origin import Origin
from router.http.response_head import ResponseHead
from router.upstream.connection import (
    ChunkForwarder,
    ResponseHandler,
    UnreachableError,
    UpstreamError,
    UpstreamTimeoutError,
)
from router.upstream.pool import Upstream, UpstreamRequest, Upstreams

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
