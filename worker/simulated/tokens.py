"""Text to tokens and back, and chat messages to text, through the model's own tokenizer and chat template."""

from __future__ import annotations

import json
import os
from typing import Any

from worker.simulated.settings import BUNDLED_MODEL


class TemplateError(ValueError):
    """The chat template refuses these messages."""


class ChatTokenizer:
    """The tokenizer at a path, or of a name, that transformers can load; prompts are made as vLLM makes them."""

    def __init__(self, path: str = str(BUNDLED_MODEL)) -> None:
        # It would advise to install PyTorch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._backend: Any = self._tokenizer.backend_tokenizer
        self._template_takes_parts = self._probe_parts()

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)

    @property
    def eos_token(self) -> int | None:
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # The backend itself, unlike its wrapper, may be used by several threads at a time.
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, tokens: list[int]) -> list[str]:
        strings: list[str] = self._tokenizer.convert_ids_to_tokens(tokens)
        return strings

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_arguments: Any,
    ) -> str:
        """The prompt for a conversation. Raises TemplateError when the template refuses it."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._prepared(message) for message in messages],
                tools=tools and [_normalized_tool(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_arguments,
            )
        except Exception as error:  # templates are programs: they raise anything
            raise TemplateError(f"messages: the chat template refuses them: {error}") from error
        return text

    def _prepared(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        content = message.get("content")
        if content is None:
            message["content"] = ""
        elif isinstance(content, list) and (message["role"] == "tool" or not self._template_takes_parts):
            message["content"] = "\n".join(part["text"] for part in content)
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
        else:
            message.pop("tool_calls", None)
        return message

    def _probe_parts(self) -> bool:
        """Whether the template understands content given as parts: one part then renders as its text would."""
        as_text, as_part = (
            [{"role": "user", "content": content}] for content in ("probe", [{"type": "text", "text": "probe"}])
        )
        try:
            rendered = [self._tokenizer.apply_chat_template(probe, tokenize=False) for probe in (as_text, as_part)]
        except Exception:  # as above
            return False
        return bool(rendered[0] == rendered[1])


def _normalized_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields vLLM shows a template, in its order: absent ones are null, unknown ones gone."""
    function = tool.get("function") or {}
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, which templates expect, and not JSON text, which the API carries."""
    function = dict(call.get("function") or {})
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    function["arguments"] = arguments
    return {**call, "function": function}
