"""Requests to workers and their responses, over kept HTTP/1.1 connections."""

from __future__ import annotations

from router.http.headers import ResponseHead, end_to_end
from router.http.worker_url import Origin
from router.upstream.pool import Upstream, Upstreams
from router.upstream.request import (
    ChunkForwarder,
    ResponseHandler,
    UnreachableError,
    UpstreamError,
    UpstreamRequest,
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
