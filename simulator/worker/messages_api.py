"""Anthropic's `/v1/messages`: its body as a conversation, and its answers, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel

from router.apis.messages import BILLING_HEADER
from simulator.worker.protocol import ApiError, Conversation, GenerationRequest, Message
from simulator.worker.replies import Reply, json_event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_OVERRIDDEN = ("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank")


class _Message(BaseModel):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class CountTokensRequest(BaseModel):
    """The body of POST /v1/messages/count_tokens: text, tool calls and tool results."""

    model: str
    messages: list[_Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    def conversation(self, sglang: bool = False) -> Conversation:
        """Return the conversation for the chat template. Raises ApiError.

        `sglang`: blocks of the system prompt are joined as in SGLang. vLLM drops those with a billing line.
        """
        messages: list[Message] = []
        if self.system:
            texts = (
                [self.system] if isinstance(self.system, str) else [str(each.get("text", "")) for each in self.system]
            )
            if not sglang and not isinstance(self.system, str):
                texts = [text for text in texts if not text.startswith(BILLING_HEADER)]
            messages.append(Message(role="system", content=("\n" if sglang else "").join(texts)))
        for index, message in enumerate(self.messages):
            messages += _converted(message, f"messages.{index}.content")
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.get("name"),
                    "description": tool.get("description"),
                    "parameters": {"type": "object"} | tool.get("input_schema", {}),
                },
            }
            for tool in self.tools or ()
        ]
        return Conversation(messages=messages, tools=tools or None)


class MessagesRequest(CountTokensRequest, GenerationRequest):
    """The body of POST /v1/messages."""

    model: str
    max_tokens: int

    def with_overrides(self, headers: Mapping[str, str]) -> MessagesRequest:
        """Return the request with the fields of a pair in headers, as SGLang reads them with header overrides."""
        given = {name: headers.get(f"x-override-{name.replace('_', '-')}") for name in _OVERRIDDEN}
        given = {name: value for name, value in given.items() if value is not None}
        return self.model_validate(self.model_dump(exclude_unset=True) | given) if given else self


def _converted(message: _Message, place: str) -> list[Message]:
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results: list[Message] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "name": str(name)}:
                function = {"name": name, "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case {"type": "tool_result"}:
                content = block.get("content") or ""
                given = content if isinstance(content, str) else "\n".join(str(part.get("text")) for part in content)
                results.append(Message(role="tool", content=given))
            case _:
                text = f"{place}: a block of type {block.get('type')!r}, which this worker does not support."
                raise ApiError(HTTPStatus.BAD_REQUEST, text, place)
    if texts or calls:
        results.append(Message(role=message.role, content="\n".join(texts), tool_calls=calls or None))
    return results


def error_body(status: HTTPStatus, message: str) -> dict[str, Any]:
    """Return Anthropic's error body."""
    kind = "not_found_error" if status == HTTPStatus.NOT_FOUND else "invalid_request_error"
    return {"type": "error", "error": {"type": kind if status < 500 else "overloaded_error", "message": message}}


@dataclass(slots=True)
class MessageReply(Reply):
    """An answer as a message with one block of text."""

    def body(self) -> dict[str, Any]:
        choice = self.choices[0]
        body = self._message([{"type": "text", "text": choice.text}], self._stop_reason()) | {"usage": self._usage()}
        return body | {"kv_transfer_params": choice.kv_transfer_params} if choice.kv_transfer_params else body

    def begin(self, index: int) -> str:  # noqa: ARG002 (there is one)
        message = self._message([], None) | {"usage": self._usage()}
        return self._event("message_start", message=message) + self._event(
            "content_block_start", index=0, content_block={"type": "text", "text": ""}
        )

    def piece(self, index: int, text: str, finish_reason: str | None) -> str:  # noqa: ARG002
        return self._event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self) -> str:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        return (
            self._event("content_block_stop", index=0)
            + self._event("message_delta", delta=delta, usage=self._usage())
            + self._event("message_stop")
        )

    def broken(self, status: HTTPStatus, message: str) -> str:
        return json_event(error_body(status, message), "error")

    def _stop_reason(self) -> str | None:
        return _STOP_REASONS.get(self.choices[0].finish_reason or "")

    def _message(self, content: list[Any], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "output_tokens": self.completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        return json_event({"type": kind, **fields}, kind)
