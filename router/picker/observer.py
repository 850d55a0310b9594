"""Answers that Envoy shows beside, with a second filter in observability mode: it waits for nothing.

When enough is seen the stream is ended, and Envoy shows no more of that answer.

A head may be shown too: it says whether the worker was reached.
"""

from __future__ import annotations

from router.picker import ext_proc_pb2 as pb
from router.picker.process_requests import read_observed, read_problem, read_worker
from router.picker.state import PickerState


def observe(message: pb.ProcessingRequest, state: PickerState) -> bool:
    """See what is shown. Whether more is wanted."""
    kind = message.WhichOneof("request")
    if kind == "response_headers":
        _look_for_failure(message, state)
    if kind != "response_body":
        return True
    number = read_observed(message)
    if number is None:
        return False  # the picker answered it itself
    state.observed = True
    request = state.requests.get(number)
    part = message.response_body
    return request is not None and request.observed(part.body, part.end_of_stream)


def _look_for_failure(message: pb.ProcessingRequest, state: PickerState) -> None:
    """A worker that Envoy did not reach gets no requests until it answers again."""
    name, problem = read_worker(message), read_problem(message)
    worker = state.fleet.find(name) if name is not None and problem is not None else None
    if worker is not None and problem is not None:
        state.fleet.report_failure(worker, problem)
