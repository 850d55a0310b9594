"""Chat templates: the same text, to the character, that vLLM renders and tokenizes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mypy_extensions import mypyc_attr

from http_api.errors import RequestError
from router.apis.messages import prepare_messages, prepare_tools
from router.apis.requests import ChatPrompt
from router.tokens.content_format import loops_over_parts, parsed
from router.tokens.template_environment import Sandbox, environment
from router.tokens.template_pieces import TemplatePieces

# Variables that the renderer sets.
_NOT_THE_CLIENTS = frozenset({"messages", "conversation", "chat_template", "tokenize"})
# Variables that every template receives.
_ARGUMENTS = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# Marks the end of the last message if the model is to continue it.
_END_MARK = "KVROUTER_FINAL_MESSAGE_ENDS "


@mypyc_attr(allow_interpreted_subclasses=True)
class ChatTemplate:
    """A compiled chat template.

    - `takes_system_first`: a system message must be the first message.
    - `reads_clock`: the template may write the date.
    - `effort_without_thinking`: the effort that disables thinking: "none", or "low" if the template does not support
      that.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template with the special tokens by their names in it. Raises TemplateSyntaxError."""
        self._source = source
        root = parsed(source)
        self._wraps_parts = loops_over_parts(root)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._variables = meta.find_undeclared_variables(root) - _NOT_THE_CLIENTS
        self._error: jinja2.TemplateError | None = None
        self._fixed: dict[str, Any] = {}
        self._pieces: TemplatePieces | None = None
        try:
            self._compiled = environment(Sandbox).from_string(source)
            # Constant for all requests: the environment's globals, and the special tokens.
            self._fixed = {**self._compiled.globals, **(special_tokens or {})}
            self._pieces = TemplatePieces(source, special_tokens or {}, self._variables - _ARGUMENTS)
        except jinja2.TemplateError as error:  # every rendering raises it
            self._error = error
        self.takes_system_first = _takes_system_first(source)
        self.reads_clock = "strftime_now" in source
        self.effort_without_thinking = self._effort_without_thinking()

    def _effort_without_thinking(self) -> str:
        hello = ChatPrompt([{"role": "user", "content": "Hi"}])
        try:
            none = self.render(replace(hello, reasoning_effort="none"))
        except RequestError:
            return "low"
        for effort in _EFFORTS:
            with contextlib.suppress(RequestError):
                if self.render(replace(hello, reasoning_effort=effort)) == none:
                    return "low"
        return "none"

    def render(self, chat: ChatPrompt, *, media_as_text: bool = False) -> str:
        """Return a conversation's text, also of media if `media_as_text`. Raises RequestError (400) if it refuses."""
        try:
            if self._error is not None:
                raise self._error
            return self._text(chat, media_as_text)
        except Exception as error:
            # A template can fail in any way on unexpected messages; engines answer 400 to all of them.
            raise RequestError(f"The chat template refuses this request: {_reason(error)}", param="messages") from error

    def answer_to_continue(self, chat: ChatPrompt) -> str:  # noqa: ARG002 (the rendered text includes it)
        """Return the text whose tokens follow those of the rendered chat, or an empty text."""
        return ""

    def _text(self, chat: ChatPrompt, media_as_text: bool) -> str:
        tools = None if chat.tools is None else prepare_tools(chat.tools)
        variables = {"tools": tools, "documents": None} | template_variables(chat)
        if self._pieces is not None:
            text = self._pieces.text_of_plain(chat.messages, variables, self._wraps_parts)
            if text is not None:
                return text
        messages = prepare_messages(
            chat.messages,
            wraps_parts=self._wraps_parts,
            knows_developer=self._knows_developer,
            media_as_text=media_as_text,
        )
        return self._rendered(messages, variables)

    def _rendered(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Return the text that transformers' `apply_chat_template` makes of prepared messages."""
        text = None if self._pieces is None else self._pieces.text(messages, variables)
        return self._by_jinja(messages, variables) if text is None else text

    def _by_jinja(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        _check_arguments(messages, variables)
        messages = [_as_templates_see(message) for message in messages]
        continues = variables["continue_final_message"]
        content = _mark_end(messages, self._source) if continues else ""
        given = {
            **self._fixed,
            **{name: value for name, value in variables.items() if name in self._variables and name not in _ARGUMENTS},
            "messages": messages,
            "tools": variables["tools"],
            "documents": variables["documents"],
            "add_generation_prompt": variables["add_generation_prompt"],
        }
        compiled = self._compiled
        # The template's own `new_context` merges its globals again each time, which takes longer than a short chat.
        context = compiled.environment.context_class(compiled.environment, given, compiled.name, compiled.blocks)
        text = "".join(compiled.root_render_func(context))
        return _until_mark(text, content) if continues else text


def template_variables(chat: ChatPrompt) -> dict[str, Any]:
    """Return the client's variables: `chat_template_kwargs` below the request's own fields, unless null or "auto"."""
    fields: dict[str, Any] = {
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
    }
    if chat.chat_template_kwargs is None and chat.documents is None and chat.reasoning_effort is None:
        return fields  # the common case
    variables = dict(chat.chat_template_kwargs or {})
    fields |= {"documents": chat.documents, "reasoning_effort": chat.reasoning_effort}
    if chat.reasoning_effort is not None and "enable_thinking" not in variables:
        fields["enable_thinking"] = chat.reasoning_effort != "none"
    variables |= {name: value for name, value in fields.items() if value is not None}
    return {name: value for name, value in variables.items() if value is not None and value != "auto"}


def _check_arguments(messages: list[dict[str, Any]], variables: dict[str, Any]) -> None:
    if not messages:
        raise ValueError("There are no messages.")
    if variables["continue_final_message"] and variables["add_generation_prompt"]:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other.")
    tools, documents = variables["tools"], variables["documents"]
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("Each tool must be a JSON schema.")
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(document, dict) for document in documents)
    ):
        raise ValueError("Each document must be an object with title and text.")


def _as_templates_see(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without null fields, and with its reasoning also under gpt-oss's name for it."""
    if len(message) == 2:  # the common case
        return message
    if "reasoning" in message:
        message = {"thinking": message["reasoning"], **message}
    return (
        {name: value for name, value in message.items() if value is not None} if None in message.values() else message
    )


def _mark_end(messages: list[dict[str, Any]], source: str) -> str:
    """Mark the end of the last message's content and return the content. Raises ValueError if it has none."""
    last = messages[-1] = dict(messages[-1])
    content = last.get("content")
    if content is None or "content" not in source:
        raise ValueError("continue_final_message is set, but the final message has no content to continue.")
    if isinstance(content, str):
        last["content"] = content + _END_MARK
        return content
    parts: list[dict[str, Any]] = [dict(part) for part in content]
    last["content"] = parts
    for part in parts[::-1]:
        if "text" in part:
            final: str = part["text"]
            part["text"] = final + _END_MARK
            return final
    raise ValueError("continue_final_message is set, but the final message has no text to continue.")


def _until_mark(text: str, content: str) -> str:
    """Return the text up to the mark, stripped if the template strips contents."""
    if content.strip() not in text or _END_MARK.strip() not in text:
        raise ValueError("continue_final_message is set, but the template does not show the final message as it is.")
    place = text.rindex(_END_MARK.strip())
    return text[:place] if text.startswith(_END_MARK, place) else text[:place].rstrip()


def _reason(error: BaseException) -> str:
    """Return the template's own message from an error that may be wrapped."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jinja2.TemplateError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error)


def _takes_system_first(source: str) -> bool:
    """Return whether the template refuses a later system message, by a plain rendering as in vLLM."""
    conversation = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        environment.from_string(source).render(messages=conversation, add_generation_prompt=False)
    except Exception:  # templates refuse by any kind of error
        return True
    return False
