"""Chat templates as pieces: the texts that a template writes around the contents of messages.

For each sequence of roles, the template is rendered once with placeholders instead of contents
(`router/tokens/template_placeholders.py`). A placeholder can only be written, joined and stripped, so the texts around
it are the same for all contents. If a template asks about a content, such as whether it contains "</think>", its pieces
apply only to contents of which the answer is no. Jinja renders all other conversations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final

from router.apis.messages import is_rewritten
from router.tokens.template_environment import time_as
from router.tokens.template_placeholders import PlaceholderTemplate, Rendering

# Limits of what is kept: the messages of a conversation, the characters of its key, and the bytes of all pieces.
_MOST_MESSAGES: Final = 512
_LONGEST_KEY: Final = 16 * 1024
_MOST_BYTES: Final = 8 * 2**20
# Estimated bytes of a piece, a content or a role beside its characters.
_OF_EACH: Final = 100
# The number of variables of a conversation without the client's own: the arguments of all templates.
_ARGUMENTS: Final = 4


class _Pieces:
    """The pieces of one sequence of roles.

    - `parts`: the texts, with empty ones in the places of contents.
    - `slots`: the contents: the place, the number of the message, and the method that strips it.
    - `conditions`: the questions whose answers must be no: the number of the message, the method that strips its
      content, the question and its text.
    - `times`: the forms of the times in the texts, and the times.
    """

    __slots__ = ("conditions", "parts", "slots", "times")

    def __init__(self, rendering: Rendering) -> None:
        self.parts: list[str] = []
        self.slots: list[tuple[int, int, str]] = []
        for place, part in enumerate(rendering.parts):
            if isinstance(part, str):
                self.parts.append(part)
            else:
                self.parts.append("")
                self.slots.append((place, part.message, part.strip))
        self.conditions: list[tuple[int, str, str, str]] = [
            (each.content.message, each.content.strip, each.question, each.text) for each in rendering.conditions
        ]
        self.times: list[tuple[str, str]] = list(rendering.times.items())

    @property
    def size(self) -> int:
        """The estimated bytes of the pieces."""
        return sum(map(len, self.parts)) + _OF_EACH * (len(self.parts) + len(self.slots) + len(self.conditions))

    @property
    def expired(self) -> bool:
        """True if a time in the texts has passed."""
        return any(time_as(form) != time for form, time in self.times)

    def text(self, contents: list[str]) -> str | None:
        """Return the text of a conversation; None if the pieces do not apply to its contents."""
        for number, strip, question, text in self.conditions:
            if _answer(_stripped(contents[number], strip), question, text):
                return None
        parts = self.parts.copy()
        for place, number, strip in self.slots:
            parts[place] = _stripped(contents[number], strip) if strip else contents[number]
        return "".join(parts)


def _answer(content: str, question: str, text: str) -> bool:
    if question == "contains":
        return text in content
    if question == "starts with":
        return content.startswith(text)
    if question == "ends with":
        return content.endswith(text)
    return content == text


def _stripped(content: str, strip: str) -> str:
    if strip == "strip":
        return content.strip()
    if strip == "lstrip":
        return content.lstrip()
    return content.rstrip() if strip else content


class TemplatePieces:
    """The pieces of a chat template, by roles and variables. It can be used by several threads.

    `cached_bytes`: the estimated bytes of all pieces.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], names: Collection[str]) -> None:
        """Compile a template. `names`: the variables in it that clients can set, beside the arguments of all."""
        self._template = PlaceholderTemplate(source, special_tokens)
        self._names = sorted(names)
        self._known: dict[tuple[object, ...], _Pieces | None] = {}  # None: Jinja renders these roles
        self.cached_bytes = 0

    def text(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
        """Return a conversation's text; None if Jinja has to render it.

        Messages and variables are as the template receives them. The first field of a message is its role.
        """
        roles: list[object] = []
        contents: list[str] = []
        for message in messages:
            role: object = message["role"]
            content = message.get("content")
            if type(content) is list:
                role, content = (role,), _only_text(content)
            if type(content) is not str or len(message) != 2:
                return None
            roles.append(role)
            contents.append(content)
        return self._text(roles, contents, variables)

    def text_of_plain(self, messages: list[dict[str, Any]], variables: dict[str, Any], wraps_parts: bool) -> str | None:
        """Return the text of messages as the client sent them; None if one is more than a role and a text.

        `wraps_parts`: the template receives each content as a list, as `prepare_messages` makes it.
        """
        roles: list[object] = []
        contents: list[str] = []
        for message in messages:
            role: object = message["role"]
            content = message.get("content")
            if type(content) is not str or len(message) != 2 or is_rewritten(role, content):
                return None
            roles.append((role,) if wraps_parts and role != "tool" else role)
            contents.append(content)
        return self._text(roles, contents, variables)

    def _text(self, roles: list[object], contents: list[str], variables: dict[str, Any]) -> str | None:
        """Return the text of contents. `roles`: that of each, in a tuple if the template receives a list of parts."""
        if (
            variables["tools"] is not None
            or variables["documents"] is not None
            or variables["continue_final_message"]
            or not 0 < len(roles) <= _MOST_MESSAGES
        ):
            return None
        key: list[object] = [variables["add_generation_prompt"], *roles]
        if len(variables) > _ARGUMENTS and not self._add_variables(key, variables):
            return None
        pieces = self._pieces(tuple(key), variables)
        return None if pieces is None else pieces.text(contents)

    def _add_variables(self, key: list[object], variables: dict[str, Any]) -> bool:
        """Add the client's variables to a key. Return false for a value that may equal one of another type."""
        for name in self._names:
            if name in variables:
                value = variables[name]
                if type(value) is not str and type(value) is not bool:
                    return False
                key.append((name, value))
        return True

    def _pieces(self, key: tuple[object, ...], variables: dict[str, Any]) -> _Pieces | None:
        """Return the pieces of a key, which are made if they are not known; None if Jinja renders its roles."""
        pieces = self._known.get(key)
        if pieces is None:
            if key in self._known:
                return None
        elif not pieces.times or not pieces.expired:
            return pieces
        size = len(repr(key))
        if size > _LONGEST_KEY:
            return None
        pieces = None
        with suppress(Exception):  # templates fail in any way
            pieces = _Pieces(self._template.render(_kinds(key), self._given(variables)))
            size += pieces.size
        if self.cached_bytes > _MOST_BYTES:
            self._known.clear()
            self.cached_bytes = 0
        self._known[key] = pieces
        self.cached_bytes += size + _OF_EACH * len(key)
        return pieces

    def _given(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the variables that the template receives."""
        given = {name: variables[name] for name in self._names if name in variables}
        return given | {"tools": None, "documents": None, "add_generation_prompt": variables["add_generation_prompt"]}


def _only_text(parts: list[Any]) -> object:
    """Return the text of a content of one text part; None for other contents."""
    part = parts[0] if len(parts) == 1 else None
    return part.get("text") if type(part) is dict and len(part) == 2 and part.get("type") == "text" else None


def _kinds(key: tuple[object, ...]) -> list[tuple[str, bool]]:
    """Return the roles of a key, each with whether its content is a list."""
    kinds: list[tuple[str, bool]] = []
    for each in key[1:]:
        if isinstance(each, str):
            kinds.append((each, False))
        elif isinstance(each, tuple) and len(each) == 1:
            kinds.append((each[0], True))
    return kinds
