"""Turns of stored responses: the conversation that a request with `previous_response_id` continues.

The worker that stored a response adds the turns before it by itself. The router keeps their messages to predict which
tokens are cached. The latest turns are kept, and other processes do not know them.

vLLM leaves out system messages, reasoning and tool calls of earlier turns. For gpt-oss it keeps all items, and the
instructions, tools and effort of the first turn.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from kvevents.decoding import read_json
from router.apis.endpoints import RESPONSES
from router.apis.requests import ChatPrompt, Turn
from router.apis.responses import UnconvertibleError, item_message

Message = dict[str, Any]

# All turns that are kept, the longest chain, and the longest answer that is read.
_MOST_BYTES = 64 * 2**20
_MOST_TURNS = 1024
_MOST_ANSWER = 4 * 2**20
_ENTRY_BYTES = 500
_WHOLE = ("completed", "incomplete")
_LAST_EVENTS = (b"response.completed", b"response.incomplete")
_TYPE_BYTES = 80  # the beginning of an event, which has its type


class _Body(msgspec.Struct):
    instructions: Any = None
    store: Any = True
    background: Any = None


class _Settings(msgspec.Struct):
    tools: list[dict[str, Any]] | None
    effort: str | None


class Answer(msgspec.Struct):
    """A response: its id, the items of its output, and its status."""

    id: str
    output: list[Message]
    status: str = _WHOLE[0]


class _Event(msgspec.Struct):
    response: Answer


@dataclass(frozen=True, slots=True)
class _Stored:
    turn: Turn
    output: bytes

    @property
    def size(self) -> int:
        return _ENTRY_BYTES + len(self.turn.messages) + len(self.turn.settings) + len(self.output)


class ResponseTurns:
    """The latest turns by the ids of their responses, within `limit` bytes."""

    def __init__(self, limit: int = _MOST_BYTES) -> None:
        self._limit = limit
        self._turns: OrderedDict[str, _Stored] = OrderedDict()
        self.bytes = 0

    def begin(self, prompt: ChatPrompt, previous: str | None, keeps_items: bool) -> tuple[ChatPrompt, Turn | None]:
        """Return a prompt after the turns before it, and its own turn if the response to it may be remembered.

        `keeps_items`: whether the engine keeps all items of earlier turns, as for gpt-oss.
        """
        body = _body_of(prompt)
        if body is None:
            return prompt, None
        earlier = [] if previous is None else self._chain(previous)
        if earlier is None:
            return prompt, None
        instructed = isinstance(body.instructions, str) and bool(body.instructions)
        encode = msgspec.json.encode
        settings = encode(_Settings(prompt.tools, prompt.reasoning_effort))
        turn = Turn(previous, encode(prompt.messages), settings, instructed)
        if earlier:
            try:
                prompt = (_with_all_items if keeps_items else _with_texts)(earlier, prompt, instructed)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                return prompt, None  # a value that msgspec refuses, such as 1e400
        return prompt, None if body.store is False and not body.background else turn

    def remember(self, turn: Turn, answer: Answer | None) -> None:
        """Keep a turn and its answer."""
        if answer is None or answer.status not in _WHOLE:
            return
        stored = _Stored(turn, msgspec.json.encode(answer.output))
        if stored.size > self._limit or answer.id == turn.previous:
            return
        self._forget(answer.id)
        self._turns[answer.id] = stored
        self.bytes += stored.size
        while self.bytes > self._limit:
            self._forget(next(iter(self._turns)))

    def _forget(self, response: str) -> None:
        if (stored := self._turns.pop(response, None)) is not None:
            self.bytes -= stored.size

    def _chain(self, response: str) -> list[_Stored] | None:
        """Return the turns up to a response, the first one first; None if one of them is unknown."""
        chain: list[_Stored] = []
        following: str | None = response
        while following is not None:
            stored = self._turns.get(following)
            if stored is None or len(chain) == _MOST_TURNS:
                return None
            self._turns.move_to_end(following)
            chain.append(stored)
            following = stored.turn.previous
        return chain[::-1]


class AnswerReader:
    """Reads the whole response from the body of an answer, which may be a stream."""

    def __init__(self, turn: Turn, is_stream: bool) -> None:
        self.turn = turn
        self._is_stream = is_stream
        self._kept = b""
        self._last = b""

    def feed(self, data: bytes) -> None:
        """Receive bytes of the body."""
        if len(self._kept) + len(data) > _MOST_ANSWER:
            self._kept = b""  # the rest is neither a JSON object nor an event
            return
        self._kept += data
        if self._is_stream and self._kept.endswith(b"\n\n"):  # engines send whole events
            for event in self._kept.split(b"\n\n"):
                if any(kind in event[:_TYPE_BYTES] for kind in _LAST_EVENTS):
                    self._last = event
            self._kept = b""

    def answer(self) -> Answer | None:
        """Return the response at the end of the body; None if it is not complete."""
        try:
            if not self._is_stream:
                return read_json(self._kept, Answer)
            _, found, data = self._last.partition(b"data:")
            return read_json(data, _Event).response if found else None
        except msgspec.DecodeError:
            return None


def _body_of(prompt: ChatPrompt) -> _Body | None:
    """Return the fields of the request for a response that a prompt is from; None for other requests."""
    if prompt.call is None or prompt.call[0] != RESPONSES:
        return None
    try:
        return read_json(prompt.call[1], _Body)
    except msgspec.DecodeError:
        return None


def _messages(encoded: bytes) -> list[Message]:
    return read_json(encoded, list[Message])


def _with_texts(earlier: list[_Stored], prompt: ChatPrompt, instructed: bool) -> ChatPrompt:
    """Return a prompt after the messages of earlier turns and the texts of their answers."""
    made: list[Message] = []
    for stored in earlier:
        made += [message for message in _messages(stored.turn.messages) if message.get("role") != "system"]
        for item in _messages(stored.output):
            if item.get("type") == "message":
                made += [{"role": "assistant", "content": part.get("text")} for part in item.get("content", [])]
    messages = [*prompt.messages[:instructed], *made, *prompt.messages[instructed:]]
    return _continued(prompt, messages)


def _with_all_items(earlier: list[_Stored], prompt: ChatPrompt, instructed: bool) -> ChatPrompt:
    """Return a prompt after all items of earlier turns, with the instructions and the settings of the first turn."""
    made: list[Message] = []
    for stored in earlier:
        made += _messages(stored.turn.messages)[stored.turn.instructed if made else 0 :]
        for item in _messages(stored.output):
            try:
                made.append(item_message(item))
            except UnconvertibleError:
                continue
    settings = read_json(earlier[0].turn.settings, _Settings)
    return _continued(prompt, [*made, *prompt.messages[instructed:]], settings)


def _continued(prompt: ChatPrompt, messages: list[Message], settings: _Settings | None = None) -> ChatPrompt:
    """Return a prompt with other messages and settings, and with the body that a client would send for them."""
    made = ChatPrompt(
        messages,
        tools=prompt.tools if settings is None else settings.tools,
        reasoning_effort=prompt.reasoning_effort if settings is None else settings.effort,
        chat_template_kwargs=prompt.chat_template_kwargs,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        add_special_tokens=prompt.add_special_tokens,
        media_options=prompt.media_options,
    )
    assert prompt.call is not None
    body = read_json(prompt.call[1], dict[str, Any])
    for name in ("instructions", "previous_response_id"):
        body.pop(name, None)
    body["input"] = [item for message in messages for item in _items(message)]
    if settings is not None:
        body["tools"] = [{"type": "function"} | tool["function"] for tool in settings.tools or []]
        body["reasoning"] = {"effort": settings.effort}
    made.call = (RESPONSES, msgspec.json.encode(body))
    return made


def _items(message: Message) -> list[Message]:
    """Return the items of a request for a response that mean a message of a chat."""
    if message.get("role") == "tool":
        output, call = message.get("content"), message.get("tool_call_id")
        return [{"type": "function_call_output", "call_id": call, "output": output}]
    items: list[Message] = []
    if message.get("reasoning"):
        content = [{"type": "reasoning_text", "text": message["reasoning"]}]
        items.append({"type": "reasoning", "id": "rs_0", "summary": [], "content": content})
    if message.get("content") is not None:
        items.append({"role": message.get("role"), "content": message["content"]})
    for call in message.get("tool_calls") or []:
        items.append({"type": "function_call", "call_id": call.get("id"), **call["function"]})
    return items
