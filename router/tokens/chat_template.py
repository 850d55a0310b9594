"""Render a conversation with a model's chat template: the same text, to the character, as vLLM tokenizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from indexer.errors import RequestError
from router.apis.conversation import prepare_messages, prepare_tools
from router.apis.requests import ChatPrompt
from router.tokens.content_format import loops_over_parts

# What the renderer itself fills in.
_NOT_THE_CLIENTS = frozenset({"messages", "conversation", "chat_template", "tokenize"})
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class ChatTemplate:
    """One chat template of a tokenizer (of transformers): read once, rendered for every request."""

    def __init__(self, source: str, tokenizer: Any) -> None:
        self._source = source
        self._tokenizer = tokenizer
        root = _parse(source)
        self._wraps_parts = loops_over_parts(root)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._variables = meta.find_undeclared_variables(root) - _NOT_THE_CLIENTS

    @cached_property
    def takes_system_first(self) -> bool:
        """Whether a system message must be the first one, found out as vLLM does: by a bare rendering of another."""
        conversation = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        try:
            environment.from_string(self._source).render(messages=conversation, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        return False

    @cached_property
    def effort_without_thinking(self) -> str:
        """The effort by which a template is told not to think: "none", or "low" where it does not know that."""
        hello = ChatPrompt([{"role": "user", "content": "Hi"}])
        try:
            none = self.render(replace(hello, reasoning_effort="none"))
        except RequestError:
            return "low"
        for effort in _EFFORTS:
            try:
                if self.render(replace(hello, reasoning_effort=effort)) == none:
                    return "low"
            except RequestError:
                continue
        return "none"

    def render(self, chat: ChatPrompt, *, media_as_text: bool = False) -> str:
        """The text of the conversation. Raises RequestError (400) with the template's words when it refuses.

        `media_as_text`: with a text of their own in the place of images and the like.
        """
        messages = prepare_messages(
            chat.messages,
            wraps_parts=self._wraps_parts,
            knows_developer=self._knows_developer,
            media_as_text=media_as_text,
        )
        variables = {"tools": prepare_tools(chat.tools)} | template_variables(chat)
        try:
            return self._rendered(messages, variables)
        except Exception as error:
            # A template may fail in any way on messages it was not written for; vLLM answers 400 to all of them.
            raise RequestError(f"The chat template refuses this: {_reason(error)}", param="messages") from error

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        tools, documents = variables.pop("tools"), variables.pop("documents", None)
        add_generation_prompt = variables.pop("add_generation_prompt")
        continue_final_message = variables.pop("continue_final_message")
        others = {name: value for name, value in variables.items() if name in self._variables}
        text: str
        if documents is None and not continue_final_message and _plain(messages) and _plain_tools(tools):
            # What transformers does beside rendering, such as copying all of it, makes no difference to JSON's types.
            text = self._compiled.render(
                self._special_tokens | others,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        else:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                documents=documents,
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **others,
            )
        return text

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """The template as transformers reads it."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        compiled: jinja2.Template = _compile_jinja_template(self._source)
        return compiled

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        """The names that a template may call the tokenizer's special tokens by."""
        names: dict[str, str] = self._tokenizer.special_tokens_map
        return names


def template_variables(chat: ChatPrompt) -> dict[str, Any]:
    """The variables a client sets: `chat_template_kwargs`, and over them the request's own fields.

    As in vLLM, null and "auto" stand for a variable that is not set.
    """
    if chat.chat_template_kwargs is None and chat.documents is None and chat.reasoning_effort is None:  # as of most
        return {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
        }
    variables = dict(chat.chat_template_kwargs or {})
    fields = {
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "documents": chat.documents,
        "reasoning_effort": chat.reasoning_effort,
    }
    if chat.reasoning_effort is not None and "enable_thinking" not in variables:
        fields["enable_thinking"] = chat.reasoning_effort != "none"
    variables |= {name: value for name, value in fields.items() if value is not None}
    return {name: value for name, value in variables.items() if value is not None and value != "auto"}


def _plain(messages: list[dict[str, Any]]) -> bool:
    """Whether transformers hands messages to the template as they are.

    It leaves out what is null, and says a message's reasoning by other names, too.
    """
    for message in messages:
        if len(message) > 2 and ("reasoning" in message or None in message.values()):
            return False
    return bool(messages)


def _plain_tools(tools: list[Any] | None) -> bool:
    """Likewise of tools. It refuses those that are no objects."""
    return tools is None or all(isinstance(tool, dict) for tool in tools)


def _reason(error: BaseException) -> str:
    """The template's own words, of an error that may have been wrapped."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jinja2.TemplateError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error)


class _Generation(Extension):
    """The `{% generation %}` block of transformers, which marks an answer and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _parse(source: str) -> nodes.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    return environment.parse(source)
