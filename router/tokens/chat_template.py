"""Render a conversation with a model's chat template: the same text, to the character, as vLLM tokenizes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import jinja2
import msgspec
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from indexer.errors import RequestError
from router.apis.message_normalization import prepare_messages, prepare_tools
from router.apis.requests import ChatPrompt, Conversation, Rendering
from router.tokens.content_format import loops_over_parts, parsed
from router.tokens.incremental_render import MessageLoop, pieces_of
from router.tokens.opaque_texts import OpaqueRendering
from router.tokens.skeletons import Skeletons

# What the renderer itself fills in.
_NOT_THE_CLIENTS = frozenset({"messages", "conversation", "chat_template", "tokenize"})
# What transformers takes as arguments.
_ARGUMENTS = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})
_EFFORTS = ("low", "medium", "high", "xhigh", "max")

_encode = msgspec.json.Encoder().encode


class ChatTemplate:
    """One chat template of a tokenizer (of transformers): read once, rendered for every request.

    `takes_system_first`: whether a system message must be the first one. `effort_without_thinking`: the effort by which
    it is told not to think, "none", or "low" where it does not know that.
    """

    def __init__(self, source: str, tokenizer: Any) -> None:
        self._source = source
        self._tokenizer = tokenizer
        root = parsed(source)
        self._wraps_parts = loops_over_parts(root)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._variables = meta.find_undeclared_variables(root) - _NOT_THE_CLIENTS
        self._compiled: jinja2.Template | None = None
        self._fixed: dict[str, Any] = {}
        self._message_loop: MessageLoop | None = None
        self._skeletons: Skeletons | None = None
        with contextlib.suppress(jinja2.TemplateError):  # which every rendering tells
            self._compile()
        self.takes_system_first = _takes_system_first(source)
        self.effort_without_thinking = self._effort_without_thinking()

    def _compile(self) -> None:
        """Read the template as transformers does."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        compiled: jinja2.Template = _compile_jinja_template(self._source)
        # What is the same for every request: the environment's globals, and the special tokens by their names.
        self._fixed = {**compiled.globals, **self._tokenizer.special_tokens_map}
        self._compiled = compiled
        self._message_loop = MessageLoop.of(self._source, compiled.environment)
        opaque = OpaqueRendering.of(self._source, compiled.environment)
        if opaque is not None:
            self._skeletons = Skeletons(opaque, compiled, self._of_plain_chats, self._prepared)

    def _effort_without_thinking(self) -> str:
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
        try:
            if not media_as_text and self._skeletons is not None and _sets_nothing(chat):
                text = self._skeletons.text(chat.messages, chat.add_generation_prompt)
                if text is not None:
                    return text
            variables = {"tools": prepare_tools(chat.tools)} | template_variables(chat)
            if not media_as_text and chat.conversation is not None:
                text = self._by_message(chat, chat.conversation, variables)
                if text is not None:
                    return text
            return self._whole(self._prepared(chat.messages, media_as_text), variables)
        except Exception as error:
            # A template may fail in any way on messages it was not written for; vLLM answers 400 to all of them.
            raise RequestError(f"The chat template refuses this: {_reason(error)}", param="messages") from error

    def _prepared(self, messages: list[dict[str, Any]], media_as_text: bool = False) -> list[dict[str, Any]]:
        return prepare_messages(
            messages,
            wraps_parts=self._wraps_parts,
            knows_developer=self._knows_developer,
            media_as_text=media_as_text,
        )

    def _by_message(self, chat: ChatPrompt, conversation: Conversation, variables: dict[str, Any]) -> str | None:
        """The text of a conversation that goes on from an earlier one: what is new of it is rendered.

        None where that is not sure to be the same.
        """
        loop = self._message_loop
        if loop is None or not _bare(variables):
            return None
        try:
            key = _encode(variables)
        except (ValueError, OverflowError, RecursionError):  # as of half of a surrogate pair
            return None
        known = conversation.rendering
        if known is not None and known.by is self and known.variables == key:
            return known.text
        known, count = conversation.earlier, conversation.shared - loop.looks_ahead
        if known is None or count < 1 or known.by is not self or known.variables != key:
            known, count = None, 0
        new = chat.messages[count:]
        if not self._knows_developer and any(message["role"] == "developer" for message in new):
            return None
        prepared = self._prepared(new)
        if not _plain(prepared):
            return None
        if known is not None:
            prepared = known.prepared[:count] + prepared
        try:
            text, ends = loop.render(prepared, self._all_variables(variables), known, count)
        except Exception:
            return None  # a rendering of the whole says why, in the template's words
        if ends is not None:
            conversation.rendering, conversation.earlier = Rendering(self, key, prepared, text, ends), None
        return text

    def _whole(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        if self._compiled is not None and messages and _bare(variables) and _plain(messages):
            return "".join(pieces_of(self._compiled, {**self._all_variables(variables), "messages": messages}))
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=variables["tools"],
            documents=variables.get("documents"),
            chat_template=self._source,
            add_generation_prompt=variables["add_generation_prompt"],
            continue_final_message=variables["continue_final_message"],
            tokenize=False,
            **self._others(variables),
        )
        return text

    def _all_variables(self, variables: dict[str, Any]) -> dict[str, Any]:
        """What the template may read, but for the messages."""
        return {
            **self._fixed,
            **self._others(variables),
            "tools": variables["tools"],
            "documents": None,
            "add_generation_prompt": variables["add_generation_prompt"],
        }

    def _others(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in variables.items() if name in self._variables and name not in _ARGUMENTS}

    def _of_plain_chats(self, begins_answer: bool) -> dict[str, Any]:
        """What the template may read but the messages, for chats that set nothing else."""
        variables = {"add_generation_prompt": begins_answer, "continue_final_message": False}
        return self._all_variables({"tools": None} | variables)


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


# What transformers does beside rendering, such as copying all of it, makes no difference to JSON's types. The rest it
# does is left to it.


def _bare(variables: dict[str, Any]) -> bool:
    """Whether transformers does nothing with the variables but hand them to the template."""
    tools = variables["tools"]
    return (
        not variables["continue_final_message"]
        and "documents" not in variables
        and (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)))
    )


def _plain(messages: list[dict[str, Any]]) -> bool:
    """Likewise of messages. It leaves out what is null, and says a message's reasoning by other names, too."""
    return not any(len(message) > 2 and ("reasoning" in message or None in message.values()) for message in messages)


def _reason(error: BaseException) -> str:
    """The template's own words, of an error that may have been wrapped."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jinja2.TemplateError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error)


def _sets_nothing(chat: ChatPrompt) -> bool:
    """Whether a chat leaves all of the template's variables as they are, but for whether an answer is begun."""
    return (
        chat.tools is None
        and chat.documents is None
        and chat.reasoning_effort is None
        and chat.chat_template_kwargs is None
        and not chat.continue_final_message
    )


def _takes_system_first(source: str) -> bool:
    """Found out as vLLM does: by a bare rendering of another."""
    conversation = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        environment.from_string(source).render(messages=conversation, add_generation_prompt=False)
    except Exception:  # in whatever way it refuses
        return True
    return False
