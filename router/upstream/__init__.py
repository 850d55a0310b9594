"""Requests to workers and their answers, over connections that are kept: HTTP/1.1, and nothing that stands between.

origin       where a worker listens, and the head of a request to it
answer_head  the head of an answer, and what of it goes on to the client
connection   one connection: a request at a time, and what llhttp reads of the answer
chunks       chunks of events, which need no llhttp
pool         the connections to a worker, and one request's way over them
"""

from __future__ import annotations

from router.upstream.answer_head import AnswerHead
from router.upstream.connection import Passage, Receiver, UnreachableError, UpstreamError, UpstreamTimeoutError
from router.upstream.origin import Origin, end_to_end
from router.upstream.pool import Leg, Upstream, Upstreams

__all__ = [
    "AnswerHead",
    "Leg",
    "Origin",
    "Passage",
    "Receiver",
    "UnreachableError",
    "Upstream",
    "UpstreamError",
    "UpstreamTimeoutError",
    "Upstreams",
    "end_to_end",
]
