"""The conversation that `/v1/responses` makes of its items, like vLLM, and the workers that made stored responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.apis.endpoints import RESPONSES, read_request
from router.apis.requests import ChatPrompt, RoutedRequest
from router.apis.response_owners import SEARCHED_BYTES, ResponseOwners
from router.apis.response_turns import AnswerReader, ResponseTurns, Turn
from router.apis.responses import decode_responses

USER = {"role": "user", "content": "weather?"}
CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo"}'}
MADE = {"id": "c", "function": {"arguments": '{"city": "Oslo"}', "name": "weather"}, "type": "function"}


def responses(**fields: Any) -> RoutedRequest:
    return decode_responses(json.dumps({"model": "m", "input": "hi"} | fields).encode())


def prompt(**fields: Any) -> ChatPrompt:
    made = responses(**fields).prompt
    assert isinstance(made, ChatPrompt)
    return made


def test_string_input_is_a_user_message_with_effort_and_variables_of_the_template() -> None:
    assert prompt(instructions="Be brief.") == ChatPrompt(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], add_special_tokens=True
    )
    made = prompt(reasoning={"effort": "low"}, chat_template_kwargs={"a": 1})
    assert (made.reasoning_effort, made.chat_template_kwargs) == ("low", {"a": 1})


def test_fields_that_affect_routing_are_read() -> None:
    request = responses(stream=True, max_output_tokens=5, cache_salt="s", priority=2, previous_response_id="resp_1")
    assert (request.name, request.streamed, request.max_tokens, request.cache_salt) == ("m", True, 5, "s")
    assert (request.priority, request.stored) == (2, "resp_1")
    assert responses(model=None).name is None


def test_reasoning_or_its_summary_text_and_calls_become_one_message() -> None:
    items = [
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        CALL,
        CALL | {"call_id": "d", "namespace": "ns"},
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
        {"role": "assistant", "content": "Sun."},
        {"role": "assistant", "content": "And warm."},
    ]
    second = {"id": "d", "function": MADE["function"] | {"name": "ns__weather"}, "type": "function"}  # type: ignore[operator]
    assert prompt(input=items).messages == [
        USER,
        {"role": "assistant", "reasoning": "hm", "content": "Let me look.", "tool_calls": [MADE, second]},
        {"role": "tool", "content": "sun", "tool_call_id": "c"},
        {"role": "assistant", "content": "Sun."},
        {"role": "assistant", "content": "And warm."},
    ]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    assert prompt(input=[USER, summary]).messages[1] == {"role": "assistant", "reasoning": "so"}
    assert prompt(input=[USER, {"type": "reasoning", "summary": []}]).messages[1]["reasoning"] == ""


def test_parts_are_kept() -> None:
    parts = [{"type": "input_text", "text": "what is"}, {"type": "input_image", "image_url": "http://a/b.png"}]
    assert prompt(input=[{"type": "message", "role": "user", "content": parts}]).messages == [
        {"role": "user", "content": parts}
    ]


def test_tools_are_those_the_model_is_shown() -> None:
    function = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
    tools = prompt(
        tools=[
            function,
            {"type": "web_search"},
            {"type": "custom", "name": "code", "description": "Python"},
            {"type": "namespace", "name": "ns", "tools": [function, {"type": "custom", "name": "no"}]},
        ]
    ).tools
    assert [tool["function"]["name"] for tool in tools] == ["weather", "code", "ns__weather"]
    assert tools[0]["function"]["strict"] is True
    assert tools[1]["function"]["parameters"]["required"] == ["input"]
    assert prompt(tools=[{"type": "web_search"}]).tools == []
    assert prompt(tools=[]).tools is None


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_an_unfinished_answer_is_gone_on_with(status: str) -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I th"}]}
    unfinished = prompt(input=[USER, said | {"status": status}])
    assert (unfinished.continue_final_message, unfinished.add_generation_prompt) == (True, False)
    finished = prompt(input=[USER, said | {"status": "completed"}])
    assert (finished.continue_final_message, finished.add_generation_prompt) == (False, True)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "name": 5},
        {"role": "user"},
        {},
    ],
)
def test_unconvertible_input_is_routed_by_load(item: dict[str, Any]) -> None:
    assert responses(input=[USER, item]).prompt is None
    assert responses(input=[]).prompt is None


@pytest.mark.parametrize(
    "beginning",
    [
        b'{"id":"resp_1","object":"response"}',
        b'{\n  "id" : "resp_1"}',
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"',
        b'{"object": "response", "id": "resp_1"}',
    ],
)
def test_a_response_is_known_by_how_its_answer_begins(beginning: bytes) -> None:
    owners = ResponseOwners()
    assert owners.learn(beginning, "http://a")
    assert owners.get("resp_1") == "http://a"
    assert owners.get("resp_2") is None


@pytest.mark.parametrize(
    "beginning", [b"", b'{"id":"msg_1"}', b'{"id":"resp_1', b" " * SEARCHED_BYTES + b'"id":"resp_1"']
)
def test_responses_without_ids_register_no_owner(beginning: bytes) -> None:
    owners = ResponseOwners()
    assert not owners.learn(beginning, "http://a")
    assert len(owners) == 0


def test_the_oldest_are_forgotten() -> None:
    owners = ResponseOwners(most=2)
    for number in (1, 2, 1, 3):
        owners.learn(b'{"id":"resp_%d"}' % number, f"http://{number}")
    assert [owners.get(f"resp_{number}") for number in (1, 2, 3)] == ["http://1", None, "http://3"]


def asked(text: str, previous: str | None = None, **fields: Any) -> bytes:
    body = {"model": "m", "input": text, "previous_response_id": previous, "instructions": f"for {text}", **fields}
    return json.dumps(body).encode()


def begun(turns: ResponseTurns, body: bytes, keeps_items: bool = False) -> tuple[ChatPrompt, Turn | None]:
    request = read_request("POST", RESPONSES, [], body)
    assert isinstance(request.prompt, ChatPrompt)
    return turns.begin(request.prompt, request.stored, keeps_items)


def part(text: str) -> dict[str, str]:
    return {"type": "output_text", "text": text}


OUTPUT = [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [part("a"), part("b")]},
    CALL,
]
RESULT = {"type": "function_call_output", "call_id": "c", "output": "sun"}


def answered(turns: ResponseTurns, turn: Turn | None, name: str) -> None:
    assert turn is not None
    reader = AnswerReader(turn, is_stream=True)
    whole = {"type": "response.completed", "response": {"id": name, "output": OUTPUT}}
    stream = b'event: response.created\ndata: {"type": "response.created"}\n\n'
    stream += b"event: response.completed\ndata: " + json.dumps(whole).encode() + b"\n\ndata: [DONE]\n\n"
    for start in range(0, len(stream), 100):
        reader.feed(stream[start : start + 100])
    turns.remember(turn, reader.answer())


@pytest.mark.parametrize("keeps_items", [False, True])
def test_prompt_of_a_continued_response_has_the_turns_before_it(keeps_items: bool) -> None:
    turns, texts = ResponseTurns(), [{"role": "assistant", "content": text} for text in "ab"]
    _, first = begun(turns, asked("one", reasoning={"effort": "low"}), keeps_items)
    answered(turns, first, "resp_1")
    _, second = begun(turns, asked("two", "resp_1"), keeps_items)
    answered(turns, second, "resp_2")
    made, _ = begun(turns, asked("", "resp_2", input=[RESULT], instructions="last"), keeps_items)
    one, two = ({"role": "user", "content": text} for text in ("one", "two"))
    result = {"role": "tool", "content": "sun", "tool_call_id": "c"}
    if keeps_items:
        thought, said = {"role": "assistant", "reasoning": "hm"}, {"role": "assistant", "content": "a"}
        answer = [thought, said, {"role": "assistant", "tool_calls": [MADE]}]
        assert made.messages == [{"role": "system", "content": "for one"}, one, *answer, two, *answer, result]
        assert made.reasoning_effort == "low"
    else:
        assert made.messages == [{"role": "system", "content": "last"}, one, *texts, two, *texts, result]
        assert made.reasoning_effort is None
    assert made.call is not None
    body = json.loads(made.call[1])
    assert "previous_response_id" not in body
    written = read_request("POST", RESPONSES, [], made.call[1]).prompt
    assert isinstance(written, ChatPrompt)
    assert [each["role"] for each in written.messages][:3] == [each["role"] for each in made.messages][:3]


@pytest.mark.parametrize("fields", [{"previous": "resp_none"}, {"store": False}])
def test_response_without_known_turns_or_storage_is_not_remembered(fields: dict[str, Any]) -> None:
    made, turn = begun(ResponseTurns(), asked("one", **fields))
    assert [message["content"] for message in made.messages] == ["for one", "one"]
    assert turn is None


@pytest.mark.parametrize(("status", "messages"), [("incomplete", 3), ("queued", 2)])
def test_response_without_output_is_remembered_if_it_is_whole(status: str, messages: int) -> None:
    turns = ResponseTurns()
    _, turn = begun(turns, asked("one"))
    assert turn is not None
    reader = AnswerReader(turn, is_stream=False)
    reader.feed(json.dumps({"id": "resp_1", "output": [], "status": status}).encode())
    turns.remember(turn, reader.answer())
    assert len(begun(turns, asked("two", "resp_1"))[0].messages) == messages


def test_latest_turns_are_kept_within_the_limit() -> None:
    turns = ResponseTurns(limit=5000)
    for number in range(20):
        answered(turns, begun(turns, asked("word " * 50))[1], f"resp_{number}")
    assert 2500 < turns.bytes <= 5000
    assert len(begun(turns, asked("next", "resp_19"))[0].messages) == 5
    assert len(begun(turns, asked("next", "resp_0"))[0].messages) == 2
