"""The endpoints of clients: for each path, the decoder of its body and the format of its errors.

A request to an unknown path is forwarded to the least loaded worker that serves the model which its body names.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from http_api.errors import RequestError, error_body
from kvevents.decoding import read_json
from router.apis.agent_hints import hints_in_body
from router.apis.anthropic_messages import anthropic_error_body, decode_messages
from router.apis.body_fields import ModelFields, OtherFields, SessionFields
from router.apis.fields import optional_string, read_body
from router.apis.forms import form_field
from router.apis.generate import decode_generate
from router.apis.identities import find_identity, identity_headers
from router.apis.openai_requests import decode_chat, decode_completion, usual_chat
from router.apis.requests import ChatPrompt, RoutedRequest, UsualChat
from router.apis.response_owners import stored_in_path
from router.apis.responses import decode_responses
from router.http.headers import HeaderItems

Decode = Callable[[bytes, HeaderItems], RoutedRequest]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
ANTHROPIC = "/v1/messages"


def decode_model_fields(body: bytes, headers: HeaderItems = ()) -> RoutedRequest:
    """Parse what routing by load needs of a JSON body. Raises RequestError (400) if the model is not a string."""
    fields = read_body(body, ModelFields)
    return RoutedRequest(
        optional_string(fields.model, "model"),
        streamed=fields.stream or False,
        priority=fields.priority or 0,
        identity=find_identity(headers, fields),
        hints=hints_in_body(fields.nvext),
    )


# Endpoints that are routed by their prompt.
PROMPTED: dict[str, Decode] = {
    CHAT: decode_chat,
    COMPLETIONS: decode_completion,
    RESPONSES: decode_responses,
    ANTHROPIC: decode_messages,
    "/generate": decode_generate,
    "/inference/v1/generate": decode_generate,
}
# Endpoints with JSON bodies that are routed by load, because no cached prefix helps them.
BY_LOAD = (
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/classify",
    "/pooling",
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/audio/speech",
)
_DECODERS = PROMPTED | dict.fromkeys(BY_LOAD, decode_model_fields)
_NAMES = _DECODERS | dict.fromkeys((CHAT, COMPLETIONS, ANTHROPIC), decode_model_fields)


def read_request(
    method: str,
    path: str,
    headers: HeaderItems,
    body: bytes,
    caller_headers: HeaderItems | None = None,
    known: bytes | UsualChat | None = None,
    with_prompt: bool = True,
) -> RoutedRequest:
    """Parse what routing needs of a received request. Raises RequestError (400) with the field.

    - `caller_headers`: those of `headers` that may name the caller; None: find them.
    - `known`: what the check of the body has read: a usual chat, or the fields that routing by load reads, as JSON;
      None: nothing.
    - `with_prompt`: read its prompt, too.
    """
    if caller_headers is None:
        caller_headers = identity_headers(headers)
    decode = (_DECODERS if with_prompt else _NAMES).get(path) if method == "POST" else None
    if decode is None:
        request = _read_other(path, headers, body, caller_headers)
    elif isinstance(known, tuple):
        request = usual_chat(known, caller_headers)
    elif decode is decode_model_fields and known is not None:
        request = decode(known, caller_headers)
    else:
        request = decode(body, caller_headers)
    request.path = path
    if isinstance(request.prompt, ChatPrompt):
        request.prompt.call = (path, body)
    return request


def _read_other(path: str, headers: HeaderItems, body: bytes, caller_headers: HeaderItems) -> RoutedRequest:
    """Parse what routing needs of a request to an unknown path, or of one that is not a POST."""
    identity = find_identity(caller_headers, SessionFields())
    content_type = next((value for name, value in headers if name == b"content-type"), b"").decode("latin-1")
    if content_type.startswith("multipart/form-data"):
        return RoutedRequest(form_field(content_type, body, "model"), identity=identity, stored=stored_in_path(path))
    try:
        fields = read_json(body, OtherFields)
        name, stored = fields.model, fields.stored_id()
    except msgspec.DecodeError:
        name, stored = None, None  # the body can have any format
    name = name if isinstance(name, str) else None
    return RoutedRequest(name, identity=identity, stored=stored_in_path(path) or stored)


def call_error_body(path: str, error: RequestError) -> bytes:
    """Return an error in the format of the path's API."""
    return anthropic_error_body(error) if is_anthropic(path) else error_body(error)


def error_event(path: str, error: RequestError) -> bytes:
    """Return an error as an event of a stream, in the format of the path's API."""
    return event_of_error(path, call_error_body(path, error))


def event_of_error(path: str, body: bytes) -> bytes:
    """Return the body of an error, which is in the format of the path's API, as an event of a stream."""
    return (b"event: error\n" if is_anthropic(path) else b"") + b"data: " + body + b"\n\n"


def is_anthropic(path: str) -> bool:
    """Return whether a path is of Anthropic's API."""
    return path == ANTHROPIC or path.startswith(ANTHROPIC + "/")
