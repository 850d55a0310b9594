"""Answers that Envoy shows beside, with a second filter in observability mode: it waits for nothing.

When enough is seen the stream is ended, and Envoy shows no more of that answer.
"""

from __future__ import annotations

from router.picker import ext_proc_pb2 as pb
from router.picker.process_requests import read_observed
from router.picker.state import PickerState


def observe(message: pb.ProcessingRequest, state: PickerState) -> bool:
    """See what is shown. Whether more is wanted."""
    if message.WhichOneof("request") != "response_body":
        return True
    number = read_observed(message)
    if number is None:
        return False  # the picker answered it itself
    state.observed = True
    request = state.requests.get(number)
    part = message.response_body
    return request is not None and request.observed(part.body, part.end_of_stream)
