"""Fields that are read from a request on any path: its model, its prompt, its session."""

from __future__ import annotations

import json
from typing import Any

import pytest

from http_api.errors import RequestError
from router.apis.endpoints import BY_LOAD, call_error_body, error_event, read_request
from router.apis.forms import form_fields
from router.apis.identities import Identity
from router.apis.requests import RoutedRequest, TextPrompts, TokenPrompts
from router.auth.routes import Access, Routes

FORM = (
    b'--XyZ\r\nContent-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav\r\n\r\n'
    b"RIFF" + b"\0" * 10_000 + b'\r\nname="model"\r\n\r\nno\r\n'
    b'--XyZ\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--XyZ--\r\n'
)


def read(path: str, body: Any = b"", method: str = "POST", **headers: str) -> RoutedRequest:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return read_request(method, path, raw, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize("path", BY_LOAD)
def test_endpoints_without_prefix_are_routed_by_load(path: str) -> None:
    assert read(path, {"model": "m", "input": "hi", "user": "u"}) == RoutedRequest(
        "m", identity=Identity("u", by_user=True)
    )
    assert read(path, {"input": "hi"}) == RoutedRequest(None)


@pytest.mark.parametrize("path", BY_LOAD)
@pytest.mark.parametrize("body", [[], b""])
def test_body_without_an_object_is_refused(path: str, body: Any) -> None:
    with pytest.raises(RequestError) as refused:
        read(path, body)
    assert (refused.value.status, refused.value.param) == (400, None)


def test_a_form_names_its_model_beside_a_file() -> None:
    form = "multipart/form-data; boundary=XyZ"
    assert read("/v1/audio/transcriptions", FORM, content_type=form, x_session_id="s") == RoutedRequest(
        "whisper", identity=Identity("s")
    )
    assert read("/v1/audio/transcriptions", FORM.replace(b'"model"', b'"other"'), content_type=form).name is None


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data", "multipart/form-data; boundary=other", 'multipart/form-data; boundary=""']
)
def test_invalid_form_names_no_model(content_type: str) -> None:
    assert read("/v1/audio/transcriptions", FORM, content_type=content_type) == RoutedRequest(None)


def form_parts(*parts: bytes) -> list[tuple[str, bytes]]:
    read = form_fields(b"multipart/form-data; boundary=X", b"--X" + b"\r\n--X".join(parts) + b"\r\n--X--\r\n")
    assert read is not None
    return list(read)


def test_part_of_a_form_may_be_empty() -> None:
    head = b'\r\nContent-Disposition: form-data; name="model"\r\n'
    assert form_parts(head + b"\r\nm") == [("model", b"m")]
    assert form_parts(head + b"\r\n") == [("model", b"")]
    assert form_parts(head) == [("model", b"")]  # its empty line is also the next delimiter's


@pytest.mark.parametrize("part", [b"\r\n\r\nvalue", b"\r\n\r\n", b"\r\n"])
def test_part_of_a_form_without_a_name_is_refused(part: bytes) -> None:
    with pytest.raises(RequestError, match="form is not accepted"):
        form_parts(part)


@pytest.mark.parametrize("cut", range(0, len(FORM), 997))
def test_half_a_form_is_no_harm(cut: int) -> None:
    read("/v1/audio/transcriptions", FORM[:cut], content_type="multipart/form-data; boundary=XyZ")


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", {"model": 5}, b"[" * 5000])
def test_any_other_path_may_carry_anything(body: Any) -> None:
    assert read("/anything", body, "PUT") == RoutedRequest(None)
    assert read("/anything", {"model": "m"}) == RoutedRequest("m")


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/responses/resp_1/cancel"])
def test_paths_of_stored_objects_name_their_id(path: str) -> None:
    assert read(path, method="GET").stored == "resp_1"
    assert read("/v1/responses", method="GET").stored is None


@pytest.mark.parametrize("operation", ["compact", "input_tokens"])
def test_operations_on_responses_are_routed_by_load_or_by_what_they_continue(operation: str) -> None:
    path = f"/v1/responses/{operation}"
    assert Routes().find("POST", path).access is Access.TENANT
    assert read(path, {"model": "m", "input": "x"}) == RoutedRequest("m")
    assert read(path, {"model": "m", "previous_response_id": "resp_1"}).stored == "resp_1"
    assert Routes().find("GET", path).path == "/v1/responses/{id}"


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"text": "hi"}, TextPrompts(["hi"])),
        ({"text": ["hi", "you"]}, TextPrompts(["hi", "you"])),
        ({"prompt": "hi"}, TextPrompts(["hi"])),
        ({"input_ids": [1, 2]}, TokenPrompts([[1, 2]], param="input_ids")),
        ({"input_ids": [[1], [2]]}, TokenPrompts([[1], [2]], param="input_ids")),
        ({"token_ids": [1, 2]}, TokenPrompts([[1, 2]], param="token_ids")),
        ({"text": "hi", "image_data": ["a"]}, None),
        ({"input_embeds": [[0.5]]}, None),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate"])
def test_generate(path: str, body: dict[str, Any], prompt: Any) -> None:
    assert read(path, body).prompt == prompt


def test_generate_has_its_options_within() -> None:
    request = read("/generate", {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 7, "n": 2}})
    assert (request.name, request.streamed, request.max_tokens, request.answers) == (None, True, 7, 2)
    assert read("/generate", {"text": "hi", "lora_path": "poet"}).name == "poet"
    assert read("/generate", {"prompt": "hi", "max_tokens": 3}).max_tokens == 3


USER = {"role": "user", "content": "hi"}
BAD_FIELDS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/messages": [
        ({"messages": [USER], "model": ""}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, "hi"]}, "messages[1]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [USER], "cache_salt": 5}, "cache_salt"),
    ],
    "/v1/responses": [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [USER, "hi"]}, "input[1]"),
        ({"input": "hi", "model": 5}, "model"),
        ({"input": "hi", "cache_salt": ""}, "cache_salt"),
        ({"input": "hi", "previous_response_id": 5}, "previous_response_id"),
    ],
    "/generate": [
        ({}, "text"),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 5]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"text": "a", "model": 5}, "model"),
    ],
    **{path: [({"model": 5}, "model"), ({"model": ""}, "model")] for path in BY_LOAD},
}


@pytest.mark.parametrize(
    ("path", "fields", "param"), [(path, *bad) for path, found in BAD_FIELDS.items() for bad in found]
)
def test_a_bad_field_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(path, {"model": "m"} | fields)
    assert (refused.value.status, refused.value.param) == (400, param)


# From the most to the least specific.
SESSIONS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"x_session_id": "here"}, {}),
    ({}, {"session_id": "here"}),
    ({}, {"vllm_xargs": {"session_id": "here"}}),
    ({}, {"metadata": {"session_id": "here"}}),
    ({}, {"prompt_cache_key": "here"}),
    ({}, {"metadata": {"user_id": "here"}}),
    ({}, {"user": "here"}),
    ({"x_user_id": "here"}, {}),
]


@pytest.mark.parametrize("place", range(len(SESSIONS)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/v1/embeddings"])
def test_the_most_specific_session_counts(path: str, place: int) -> None:
    headers: dict[str, str] = {}
    prompts = {"prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
    body: dict[str, Any] = {"model": "m", "metadata": {}} | prompts
    for number, (more_headers, fields) in enumerate(SESSIONS):
        if number >= place:
            value = "here" if number == place else "there"
            headers |= dict.fromkeys(more_headers, value)
            for key, found in fields.items():
                if isinstance(found, dict):
                    body.setdefault(key, {}).update(dict.fromkeys(found, value))
                else:
                    body[key] = value
    assert read(path, body, **headers).session == "here"


def test_empty_session_is_ignored() -> None:
    body = {"model": "m", "prompt": "hi", "user": "", "session_id": 5, "metadata": "x"}
    assert read("/v1/completions", body, x_session_id="").session is None


@pytest.mark.parametrize(("fields", "n"), [({}, 1), ({"n": 3}, 3), ({"best_of": 4}, 4), ({"n": 2, "best_of": "5"}, 5)])
def test_answers_are_counted(fields: dict[str, Any], n: int) -> None:
    assert read("/v1/completions", {"model": "m", "prompt": "hi"} | fields).answers == n


def test_errors_follow_the_format_of_the_path() -> None:
    error = RequestError("No.", param="model")
    assert json.loads(call_error_body("/v1/chat/completions", error))["error"]["param"] == "model"
    assert json.loads(call_error_body("/v1/messages/count_tokens", error))["type"] == "error"
    assert error_event("/v1/messages", error).startswith(b"event: error\ndata: {")
    assert error_event("/v1/responses", error).startswith(b"data: {")
