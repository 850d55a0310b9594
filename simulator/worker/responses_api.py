"""OpenAI's `/v1/responses`: its body as a conversation, and its answers, whole or as a stream of events."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import Field

from simulator.worker.protocol import ApiError, Conversation, GenerationRequest, Message
from simulator.worker.replies import Choice, Reply, json_event

STORED_RESPONSES = 1000


class ResponsesRequest(GenerationRequest):
    """The body of POST /v1/responses: messages, tool calls and tool results."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool = True
    rid: str | list[str] | None = Field(None, validation_alias="request_id")

    def conversation(self, earlier: list[Message]) -> Conversation:
        """Return the conversation for the chat template, with the messages of earlier responses. Raises ApiError."""
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        tools = [{"type": "function", "function": tool} for tool in self.tools or () if tool.get("type") == "function"]
        return Conversation(messages=[*system, *earlier, *self.new_messages()], tools=tools or None)

    def new_messages(self) -> list[Message]:
        """Return the messages of the input alone. Raises ApiError."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        return [_message(item, index) for index, item in enumerate(self.input)]


def _message(item: dict[str, Any], index: int) -> Message:
    match item:
        case {"type": "function_call", "call_id": str(call), "name": str(name), "arguments": str(arguments)}:
            function = {"name": name, "arguments": arguments}
            return Message(role="assistant", tool_calls=[{"id": call, "type": "function", "function": function}])
        case {"type": "function_call_output", "output": str(output)}:
            return Message(role="tool", content=output)
        case {"role": str(role), "content": str(content)}:
            return Message(role=role, content=content)
        case {"role": str(role), "content": [*parts]} if all(_is_text(part) for part in parts):
            return Message(role=role, content="\n".join(part["text"] for part in parts))
    raise ApiError(HTTPStatus.BAD_REQUEST, f"input[{index}] is an item that this worker does not support.", "input")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


class StoredResponses:
    """The latest responses: their bodies, and the messages that led to them."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[dict[str, Any], list[Message]]] = OrderedDict()

    def keep(self, body: dict[str, Any], messages: list[Message]) -> None:
        """Store a response with the messages before it."""
        answer = Message(role="assistant", content=body["output"][0]["content"][0]["text"])
        self._stored[body["id"]] = (body, [*messages, answer])
        if len(self._stored) > STORED_RESPONSES:
            self._stored.popitem(last=False)

    def body(self, response: str) -> dict[str, Any]:
        """Return a stored response. Raises ApiError if it does not exist."""
        return self._of(response)[0]

    def messages(self, response: str | None) -> list[Message]:
        """Return the conversation up to a response, without system messages, as vLLM does; empty for `None`.

        Raises ApiError if it does not exist.
        """
        return [] if response is None else [each for each in self._of(response)[1] if each.role != "system"]

    def _of(self, response: str) -> tuple[dict[str, Any], list[Message]]:
        try:
            return self._stored[response]
        except KeyError:
            message = f"Response with id '{response}' not found."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "previous_response_id") from None


@dataclass(slots=True)
class ResponseReply(Reply):
    """An answer as a response with one message in its output."""

    request: ResponsesRequest
    stored: StoredResponses
    messages: list[Message]
    item: str = field(default_factory=lambda: "msg_" + secrets.token_hex(8))
    events: int = 0

    def body(self) -> dict[str, Any]:
        choice = self.choices[0]
        ended = "completed" if choice.finish_reason == "stop" else "incomplete"
        body = self._response(ended, [self._message_item("completed", choice)], self._usage())
        if self.request.store:
            self.stored.keep(body, self.messages)
        return body | {"kv_transfer_params": choice.kv_transfer_params} if choice.kv_transfer_params else body

    def begin(self, index: int) -> str:  # noqa: ARG002 (there is one)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return (
            self._event("response.created", response=self._response("in_progress", [], None))
            + self._event("response.in_progress", response=self._response("in_progress", [], None))
            + self._event("response.output_item.added", output_index=0, item=self._message_item("in_progress", None))
            + self._event("response.content_part.added", item_id=self.item, output_index=0, content_index=0, part=part)
        )

    def piece(self, index: int, text: str, finish_reason: str | None) -> str:  # noqa: ARG002
        where = {"item_id": self.item, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", **where, delta=text, logprobs=[])

    def end(self) -> str:
        choice = self.choices[0]
        where = {"item_id": self.item, "output_index": 0, "content_index": 0}
        item = self._message_item("completed", choice)
        body = self.body()
        return (
            self._event("response.output_text.done", **where, text=choice.text, logprobs=[])
            + self._event("response.content_part.done", **where, part=item["content"][0])
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{body['status']}", response=body)
        )

    def _message_item(self, status: str, choice: Choice | None) -> dict[str, Any]:
        content = [{"type": "output_text", "text": choice.text, "annotations": []}] if choice else []
        return {"id": self.item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self.request.instructions,
            "max_output_tokens": self.request.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": self.request.previous_response_id,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": self.request.tools or [],
            "top_p": 1.0,
            "usage": usage,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        event = json_event({"type": kind, "sequence_number": self.events, **fields}, kind)
        self.events += 1
        return event
