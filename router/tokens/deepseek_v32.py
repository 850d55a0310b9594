"""DeepSeek-V3.2's chats: the model has a description of its encoding instead of a chat template.

The format is that of `encoding_dsv32` in the model's repository, called as vLLM's `--tokenizer-mode deepseek_v32` does.
"""

from __future__ import annotations

import json
from typing import Any

from http_api.errors import RequestError
from router.apis.messages import prepare_messages, prepare_tools
from router.apis.requests import ChatPrompt
from router.tokens.chat_template import template_variables

Message = dict[str, Any]

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_THINK, _THOUGHT = "<think>", "</think>"
_DSML = "｜DSML｜"

# The model was trained with this text.
_TOOLS = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{_DSML}function_calls>" block like the following as part of your reply to the user:
<{_DSML}function_calls>
<{_DSML}invoke name="$FUNCTION_NAME">
<{_DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{_DSML}parameter>
...
</{_DSML}invoke>
<{_DSML}invoke name="$FUNCTION_NAME2">
...
</{_DSML}invoke>
</{_DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<{_DSML}function_calls>
...
</{_DSML}function_calls>
<function_results>
...
</function_results>
{_THINK}...thinking about results{_THOUGHT}
Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
"""  # noqa: E501


class DeepSeekV32:
    """A renderer of chats to the text that the model's tokenizer.json encodes."""

    truncates = True
    ignores_template = False
    keeps_items = False

    def encode(self, chat: ChatPrompt) -> str:
        """Return the text of a conversation. Raises RequestError (400) if the format cannot represent it."""
        variables = template_variables(chat)
        thinks = bool(variables.get("thinking") or variables.get("enable_thinking"))
        messages = prepare_messages(chat.messages, wraps_parts=False, knows_developer=True)
        tools = None if chat.tools is None else prepare_tools(chat.tools)
        if tools:
            messages.insert(0, {"role": "system", "tools": tools})
        try:
            return BEGIN + "".join(_Rendering(messages, thinks).parts())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(
                f"DeepSeek-V3.2's format cannot represent this request: {error}", param="messages"
            ) from error


class _Rendering:
    """The rendering of one conversation. `_last_user` is the position of the last message of a user or developer."""

    def __init__(self, messages: list[Message], thinks: bool) -> None:
        if thinks and messages[-1]["role"] == "user":
            messages = _without_old_thoughts(messages)
        self._messages = messages
        self._thinks = thinks
        self._last_user = _last_user(messages)

    def parts(self) -> list[str]:
        """Return the text of each message."""
        return [self._part(place, message) for place, message in enumerate(self._messages)]

    def _part(self, place: int, message: Message) -> str:
        content, tools = message.get("content"), message.get("tools")
        match message["role"]:
            case "system":
                return (content or "") + (f"\n\n{_tools(tools)}" if tools else "")
            case "developer":
                if not content:
                    raise ValueError("a developer message without content")
                shown = f"\n\n{_tools(tools)}" if tools else ""
                return self._asked(place, f"{shown}\n\n# The user's message is: {content}")
            case "user":
                return self._asked(place, content)
            case "tool":
                return self._result(place, content)
            case "assistant":
                return self._answer(place, message)
        raise ValueError(f"the role {message['role']!r}")

    def _asked(self, place: int, content: Any) -> str:
        return f"{USER}{content}{ASSISTANT}{self._opening(place == self._last_user)}"

    def _opening(self, answers_now: bool) -> str:
        return _THINK if answers_now and self._thinks else _THOUGHT

    def _result(self, place: int, content: Any) -> str:
        called = place - 1
        while called >= 0 and self._messages[called]["role"] == "tool":
            called -= 1
        calls = self._messages[called].get("tool_calls") or []
        number = place - called
        if number > len(calls):
            raise ValueError("the result of a tool that was not called")
        text = ("\n\n<function_results>" if number == 1 else "") + f"\n<result>{content}</result>"
        if number == len(calls):
            text += f"\n</function_results>\n\n{self._opening(place >= self._last_user)}"
        return text

    def _answer(self, place: int, message: Message) -> str:
        calls, reasoning = message.get("tool_calls"), message.get("reasoning")
        thought = ""
        if self._thinks and place > self._last_user:
            if not (reasoning or calls):
                raise ValueError("an answer after the last question that neither thinks nor calls")
            thought = f"{reasoning or ''}{_THOUGHT}"
        called = ""
        if calls:
            each = "\n".join(_call(call["function"]) for call in calls)
            called = f"\n\n<{_DSML}function_calls>\n{each}\n</{_DSML}function_calls>"
        return f"{thought}{message.get('content') or ''}{called}{END}"


def _tools(tools: list[Any]) -> str:
    return _TOOLS % "\n".join(_json(tool["function"]) for tool in tools)


def _call(function: dict[str, Any]) -> str:
    arguments = "\n".join(
        f'<{_DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _json(value)}</{_DSML}parameter>"
        for name, value in function["arguments"].items()
    )
    return f'<{_DSML}invoke name="{function["name"]}">\n{arguments}\n</{_DSML}invoke>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _last_user(messages: list[Message]) -> int:
    return max(
        (place for place, message in enumerate(messages) if message["role"] in ("user", "developer")), default=-1
    )


def _without_old_thoughts(messages: list[Message]) -> list[Message]:
    """Return the messages without reasoning and developer messages before the last question."""
    last = _last_user(messages)
    kept: list[Message] = []
    for place, message in enumerate(messages):
        if place >= last or message["role"] in ("user", "system", "tool"):
            kept.append(message)
        elif message["role"] == "assistant":
            kept.append({name: value for name, value in message.items() if name != "reasoning"})
    return kept
