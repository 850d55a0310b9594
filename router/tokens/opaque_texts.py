"""Texts that nobody can look at, to find out what a chat template prints around the contents of messages.

Rendered with them in the place of contents, a template can print them, add them to other texts and strip them, and ask
whether they are text, or empty; all else raises. So what it did with them it does with any texts that are not empty:
it goes the same way, and prints them at the same places. That holds as long as all it does is seen, which is known of
the filters, tests and functions named here; a template with others, or that keeps what it prints (as macros do), is
not rendered so.

An opaque text is no `str`, which C code could read, and only says to be one: whatever wants its characters fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes

from router.tokens.incremental_render import PURE, PURE_GLOBALS, RANDOM_FILTERS, pieces_of

# Those that hand on what they get, or count it, or look at its type alone.
_FILTERS = {"count", "d", "default", "first", "last", "length", "list", "map", "rejectattr", "reverse", "selectattr"}
_TESTS = {"boolean", "defined", "false", "float", "integer", "mapping", "none", "number", "string", "true", "undefined"}
_TESTS_OF_EVERY_TEXT = {"iterable", "sequence"}
# Contents to try out what was found.
PROBES = ("0", " 0 <&>'\" {{ }} </think>\n", "\n\u00e9\u6f22 0\ud800\n")
_GLOBALS = PURE_GLOBALS | {"namespace"}


class LookedAtError(BaseException):
    """A template did more with a text than to print it. No `Exception`: filters take those for an answer."""


class Place(NamedTuple):
    """Where a content is printed: which one, and whether without the spaces around it."""

    content: int
    stripped: bool


class OpaqueText:
    """A text of parts, some of which are not known: these are not empty, but where they are stripped may come to it."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: str | Place) -> None:
        self._parts = parts

    @property
    def __class__(self) -> Any:  # what `isinstance` believes
        return str

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise LookedAtError

    def __add__(self, other: Any) -> OpaqueText:
        return OpaqueText(*self._parts, *_parts_of(other))

    def __radd__(self, other: Any) -> OpaqueText:
        return OpaqueText(*_parts_of(other), *self._parts)

    def __bool__(self) -> bool:
        if any(part if isinstance(part, str) else not part.stripped for part in self._parts):
            return True
        raise LookedAtError

    def strip(self, characters: None = None) -> OpaqueText:
        """As of a `str`, of a content as it is."""
        match self._parts:
            case (Place(content, _),) if characters is None:
                return OpaqueText(Place(content, True))
        raise LookedAtError

    def _looked_at(self, *_: Any) -> NoReturn:
        raise LookedAtError

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _looked_at
    __hash__ = __str__ = __repr__ = __format__ = __len__ = __iter__ = _looked_at
    __contains__ = __getitem__ = __getattr__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _looked_at
    __int__ = __float__ = __index__ = __call__ = __reversed__ = _looked_at


def _parts_of(value: Any) -> tuple[str | Place, ...]:
    if type(value) is str:
        return (value,)
    if type(value) is OpaqueText:
        return value._parts
    raise LookedAtError


class _Printed(str):
    """An opaque text that was printed."""

    __slots__ = ("parts",)
    parts: tuple[str | Place, ...]

    def __str__(self) -> str:
        return self


class OpaqueRendering:
    """A chat template that renders opaque texts."""

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    @classmethod
    def of(cls, source: str, environment: jinja2.Environment) -> OpaqueRendering | None:
        """The template, unless it has something in it of which nobody knows what it does with texts."""
        root = environment.parse(source)
        names = {node.name for node in root.find_all(nodes.Name)}
        filters = {node.name for node in root.find_all(nodes.Filter)}
        if (
            not all(isinstance(node, (*PURE, nodes.Break, nodes.NSRef)) for node in root.find_all(nodes.Node))
            or names & (environment.globals.keys() - _GLOBALS)
            or filters & RANDOM_FILTERS
        ):
            return None
        opaque = environment.overlay(finalize=_printed)
        known_filters: dict[str, Any] = dict(environment.filters)
        known_tests: dict[str, Any] = dict(environment.tests)
        opaque.filters = {name: _careful(name, act, _FILTERS) for name, act in known_filters.items()}
        opaque.filters["trim"] = _trim_of(known_filters["trim"])
        opaque.tests = {name: _careful(name, act, _TESTS) for name, act in known_tests.items()}
        for name in _TESTS_OF_EVERY_TEXT:
            opaque.tests[name] = _true_of_texts(known_tests[name])
        return cls(opaque.from_string(source))

    def parts(self, variables: dict[str, Any]) -> list[str | Place] | None:
        """What is printed, part by part; None when the template looks at an opaque text. Raises what it raises."""
        found: list[str | Place] = []
        try:
            for piece in pieces_of(self._template, variables):
                found += piece.parts if isinstance(piece, _Printed) else (piece,)
        except LookedAtError:
            return None
        return found


def _printed(value: Any) -> Any:
    if type(value) is not OpaqueText:
        return value
    printed = _Printed()
    printed.parts = value._parts
    return printed


def _careful(name: str, act: Callable[..., Any], known: set[str]) -> Callable[..., Any]:
    """A filter or a test that is given opaque texts only when it is known not to look at them."""
    if name in known:
        return act

    def careful(*given: Any, **named: Any) -> Any:
        if not all(map(_is_clear, (*given, *named.values()))):
            raise LookedAtError
        return act(*given, **named)

    return _taking_as(act, careful)


def _trim_of(act: Callable[..., Any]) -> Callable[..., Any]:
    careful = _careful("trim", act, set())

    def trim(value: Any, *given: Any, **named: Any) -> Any:
        return value.strip(*given, **named) if type(value) is OpaqueText else careful(value, *given, **named)

    return trim


def _true_of_texts(act: Callable[..., Any]) -> Callable[..., Any]:
    def test(value: Any) -> Any:
        return True if type(value) is OpaqueText else act(value)

    return test


def _taking_as(act: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """With what jinja2 hands to a function before its arguments, such as the environment."""
    first = getattr(act, "jinja_pass_arg", None)
    if first is not None:
        wrapped.jinja_pass_arg = first  # type: ignore[attr-defined]
    return wrapped


def _is_clear(value: Any) -> bool:
    """Whether there is no opaque text in a value, for sure."""
    if isinstance(value, dict):
        return all(map(_is_clear, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_clear, value))
    return type(value) in _CLEAR or isinstance(value, _JINJA)


_CLEAR = (str, int, float, bool, type(None), range)
_JINJA = (jinja2.Undefined, jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)
