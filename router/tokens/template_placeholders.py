"""The rendering of a chat template with placeholders in place of the contents of messages.

A placeholder can be any text. It supports only operations whose result is known without the text: to be written,
to be joined with other texts, and to be stripped. It answers questions about the text, such as whether it is empty or
contains "</think>", like an ordinary word, and records them. Any other operation raises, so that a rendering that ends
proves which text the template writes for all contents with the same answers.

Jinja's compiler converts all output to strings. The compiler here keeps placeholders instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

from router.tokens.template_environment import Sandbox, environment, time_as


class DependsError(Exception):
    """The text of a conversation depends on a content in a way that pieces cannot express."""


class Content(NamedTuple):
    """The content of a message, by the message's number. `strip`: "", or the method of `str` that strips it."""

    message: int
    strip: str


class Condition(NamedTuple):
    """A question about a content and the question's text. Pieces apply to contents whose answer is no."""

    content: Content
    question: str
    text: str


def _refuse(*_: object, **__: object) -> NoReturn:
    raise DependsError


class Written:
    """A text with placeholders: its `parts`, and the conditions that were recorded in `asked`.

    No part is an empty string, and no two strings follow each other.
    """

    __slots__ = ("asked", "parts")

    def __init__(self, parts: Iterable[str | Content], asked: set[Condition]) -> None:
        merged: list[str | Content] = []
        for part in parts:
            if isinstance(part, str) and merged and isinstance(merged[-1], str):
                merged[-1] += part
            elif part != "":
                merged.append(part)
        self.parts = merged
        self.asked = asked

    def __add__(self, other: object) -> Written:
        return Written([*self.parts, *_parts_of(other)], self.asked)

    def __radd__(self, other: object) -> Written:
        return Written([*_parts_of(other), *self.parts], self.asked)

    def strip(self, characters: str | None = None) -> Written:
        return self._stripped("strip", characters)

    def lstrip(self, characters: str | None = None) -> Written:
        return self._stripped("lstrip", characters)

    def rstrip(self, characters: str | None = None) -> Written:
        return self._stripped("rstrip", characters)

    def _stripped(self, how: str, characters: str | None) -> Written:
        if characters is not None:
            raise DependsError
        parts = list(self.parts)
        if how != "rstrip":
            parts[0] = self._strip_end(parts[0], "lstrip")
        if how != "lstrip":
            parts[-1] = self._strip_end(parts[-1], "rstrip")
        return Written(parts, self.asked)

    def _strip_end(self, part: str | Content, how: str) -> str | Content:
        """Return the first or last part, stripped. Beside others, it may not become empty."""
        if isinstance(part, str):
            stripped: str = getattr(part, how)()
            if not stripped:
                raise DependsError
            return stripped
        if len(self.parts) > 1:
            self.asked.add(Condition(Content(part.message, "strip"), "equals", ""))
        return Content(part.message, how if part.strip in ("", how) else "strip")

    def startswith(self, text: str) -> bool:
        return self._answer("starts with", text)

    def endswith(self, text: str) -> bool:
        return self._answer("ends with", text)

    def __contains__(self, text: str) -> bool:
        return self._answer("contains", text)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Written):
            if self.parts == other.parts:
                return True
            raise DependsError
        return isinstance(other, str) and self._answer("equals", other)

    def __bool__(self) -> bool:
        return any(isinstance(part, str) for part in self.parts) or not self._answer("equals", "")

    def _answer(self, question: str, text: str) -> bool:
        """Record a question, and return its answer for ordinary words."""
        content = self._content()
        if type(text) is not str or (not text and question != "equals"):
            raise DependsError
        self.asked.add(Condition(content, question, text))
        return False

    def _content(self) -> Content:
        """Return the only part, which is a content. Raises DependsError for other texts."""
        part = self.parts[0]
        if len(self.parts) > 1 or isinstance(part, str):
            raise DependsError
        return part

    # Operations that `object` has, or whose absence a filter of Jinja would catch.
    __str__ = __repr__ = __format__ = __hash__ = __getattr__ = _refuse
    __iter__ = __len__ = __getitem__ = __int__ = __float__ = __index__ = _refuse


def _parts_of(text: object) -> Iterable[str | Content]:
    if isinstance(text, Written):
        return text.parts
    if type(text) is not str:
        raise DependsError
    return [text]


def _joined(values: Iterable[object]) -> object:
    """Return the concatenation of values: a string unless one has placeholders."""
    asked: set[Condition] | None = None
    parts: list[str | Content] = []
    for value in values:
        if isinstance(value, Written):
            asked = value.asked
            parts += value.parts
        else:
            parts.append(str(value))
    return Written(parts, asked) if asked is not None else "".join(parts)  # type: ignore[arg-type]


class _Compiler(CodeGenerator):
    """A compiler whose templates keep placeholders in their output."""

    def _output_child_pre(self, *_: object) -> None:
        self.write("environment.as_output(")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        self.write("environment.concat((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class _Environment(Sandbox):
    """An environment whose templates keep placeholders in their output."""

    code_generator_class = _Compiler
    concat = staticmethod(_joined)  # type: ignore[assignment]

    @staticmethod
    def as_output(value: object) -> object:
        return value if isinstance(value, Written) else str(value)


class PlaceholderTemplate:
    """A chat template that is rendered with placeholders."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template with the special tokens by their names in it."""
        self._compiled = _environment().from_string(source)
        self._fixed = {**self._compiled.globals, **special_tokens}

    def render(self, kinds: Iterable[tuple[str, bool]], variables: Mapping[str, Any]) -> Rendering:
        """Render messages of these roles. Beside True, the content is a list of one text part.

        Raises any exception if the text depends on the contents, or if the template refuses the roles.
        """
        asked = set[Condition]()
        times: dict[str, str] = {}

        def strftime_now(form: str) -> str:
            return times.setdefault(form, time_as(form))

        messages = []
        for number, (role, in_list) in enumerate(kinds):
            text = Written([Content(number, "")], asked)
            messages.append({"role": role, "content": [{"type": "text", "text": text}] if in_list else text})
        given = {**self._fixed, "strftime_now": strftime_now, **variables, "messages": messages}
        compiled = self._compiled
        context = compiled.environment.context_class(compiled.environment, given, compiled.name, compiled.blocks)
        parts = _parts_of(_joined(compiled.root_render_func(context)))
        return Rendering(parts, asked, times)


class Rendering(NamedTuple):
    """The text of a conversation with contents, their conditions, and the times in it by their form."""

    parts: Iterable[str | Content]
    conditions: set[Condition]
    times: dict[str, str]


def _environment() -> _Environment:
    made = environment(_Environment)
    _support(made.filters, "trim", Written.strip)
    _support(made.filters, "string", lambda text: text)
    for test in ("string", "iterable", "sequence"):
        _support(made.tests, test, lambda _: True)
    _support(made.tests, "sameas", _refuse)
    made.filters["random"] = made.globals["lipsum"] = _refuse
    return made


def _support(functions: Any, name: str, ours: Callable[..., object]) -> None:
    """Replace a filter or test of Jinja where its first argument has placeholders."""
    jinjas: Final = functions[name]

    def either(value: object, *given: object, **named: object) -> object:
        return (ours if isinstance(value, Written) else jinjas)(value, *given, **named)

    functions[name] = either
