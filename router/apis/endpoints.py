"""What clients may send where: for each path, how its body is read, and how its errors are told.

A path that is not known here is passed through: it goes to the least loaded worker that serves the model it names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

import msgspec

from http_api.errors import RequestError, error_body
from router.apis.agent_hints import hints_in_body
from router.apis.anthropic_messages import anthropic_error_body, decode_messages
from router.apis.body_cache import BodyCache, body_key
from router.apis.body_fields import NamedFields, PassedFields, SessionFields
from router.apis.fields import lenient, optional_string, read_body
from router.apis.generate import decode_generate
from router.apis.multipart import form_field
from router.apis.openai_requests import decode_chat, decode_completion
from router.apis.requests import ChatPrompt, RoutedRequest
from router.apis.response_owners import stored_in_path
from router.apis.responses import decode_responses
from router.apis.sessions import only_naming, session_of
from router.http.headers import HeaderItems

Decode = Callable[[bytes, HeaderItems], RoutedRequest]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
ANTHROPIC = "/v1/messages"


# Of most bodies routing by load reads a model's name and little else, so that many are the same to it.
_SHORT: Final = 256  # bytes
_KEPT: Final = 1024


def decode_named(body: bytes, headers: HeaderItems = ()) -> RoutedRequest:
    """What routing by load needs of a JSON body: the model. Raises RequestError (400) when that is no name."""
    return _decode_named(body, headers) if headers or len(body) > _SHORT else _decode_short(body)


@lru_cache(_KEPT)
def _decode_short(body: bytes) -> RoutedRequest:
    return _decode_named(body, ())


def _decode_named(body: bytes, headers: HeaderItems) -> RoutedRequest:
    fields = read_body(body, NamedFields)
    return RoutedRequest(
        optional_string(fields.model, "model"),
        stream=lenient(fields.stream, bool, False),
        priority=lenient(fields.priority, int, 0),
        session=session_of(headers, fields),
        hints=hints_in_body(fields.nvext),
    )


# The endpoints whose prompt decides.
PROMPTED: dict[str, Decode] = {
    CHAT: decode_chat,
    COMPLETIONS: decode_completion,
    RESPONSES: decode_responses,
    ANTHROPIC: decode_messages,
    "/generate": decode_generate,
    "/inference/v1/generate": decode_generate,
}
# Those of chats, which become another text before they are tokens.
_CHATS = frozenset((CHAT, RESPONSES, ANTHROPIC))
# Those of JSON bodies that have no prefix worth going to.
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
_DECODERS = PROMPTED | dict.fromkeys(BY_LOAD, decode_named)
_NAMES = _DECODERS | dict.fromkeys((CHAT, COMPLETIONS, ANTHROPIC), decode_named)


class Call:
    """A request as it came, but for where it came from.

    `naming`: those of its headers that may name a session. `named`: the body, or what routing by load reads of it.
    """

    __slots__ = ("body", "headers", "method", "named", "naming", "path")

    def __init__(
        self,
        method: str,
        path: str,
        headers: HeaderItems,
        body: bytes,
        naming: HeaderItems | None = None,
        named: bytes | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.naming = only_naming(headers) if naming is None else naming
        self.named = body if named is None else named


def read_call(call: Call, with_prompt: bool = True, seen: BodyCache | None = None) -> RoutedRequest:
    """What routing needs of a call. Raises RequestError (400) naming the field at fault.

    `with_prompt`: false leaves the prompt to the worker, where nothing else is needed of it. `seen`: the requests from
    before, of which one may be the same.
    """
    if with_prompt and seen is not None and call.path in _CHATS and call.method == "POST" and not call.naming:
        key = body_key(call.body)
        request = seen.get(key, call.path, call.body)
        if request is None:
            request = _decoded(call, PROMPTED[call.path])
            seen.put(key, call.path, call.body, request)
        return request
    if call.method == "POST" and (decode := (_DECODERS if with_prompt else _NAMES).get(call.path)):
        return _decoded(call, decode)
    session = session_of(call.naming, SessionFields())
    content_type = next((value for name, value in call.headers if name == b"content-type"), b"").decode("latin-1")
    if content_type.startswith("multipart/form-data"):
        return RoutedRequest(
            form_field(content_type, call.body, "model"), session=session, stored=stored_in_path(call.path)
        )
    try:
        fields = msgspec.json.decode(call.body, type=PassedFields)
        name, stored = fields.model, fields.named()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        name, stored = None, None  # it may carry anything
    return RoutedRequest(
        name if isinstance(name, str) else None, session=session, stored=stored_in_path(call.path) or stored
    )


def _decoded(call: Call, decode: Decode) -> RoutedRequest:
    request = decode(call.named if decode is decode_named else call.body, call.naming)
    if isinstance(request.prompt, ChatPrompt):
        request.prompt.call = (call.path, call.body)
    return request


def call_error_body(path: str, error: RequestError) -> bytes:
    """An error as the clients of this path expect it."""
    return anthropic_error_body(error) if _is_anthropic(path) else error_body(error)


def error_event(path: str, error: RequestError) -> bytes:
    """The same in a stream of events."""
    return (b"event: error\n" if _is_anthropic(path) else b"") + b"data: " + call_error_body(path, error) + b"\n\n"


def _is_anthropic(path: str) -> bool:
    return path == ANTHROPIC or path.startswith(ANTHROPIC + "/")
