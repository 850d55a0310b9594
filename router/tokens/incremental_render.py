"""Chat templates that render message by message, so that of a conversation's next turn only what is new is rendered.

Proved of a template by its syntax: one loop over the messages, whose body leaves nothing behind for the next message,
and depends on nothing but the variables of the request, its message and its place, the messages before, and perhaps the
next one. Which messages it takes by their number is seen when it does. All that is not known to be so is taken not to
be: many templates look at all of the messages first, or keep notes from one to the next, and are rendered whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from router.apis.requests import Rendering

_MESSAGES = "messages"
# Names of ours in a template: the messages to go through, how many were before them, and what marks a message's start.
_NEW, _SKIPPED, _MARK = "kvrouter_new", "kvrouter_skipped", "kvrouter_mark"
# Without state, and without effect but on what they are part of.
PURE = (
    nodes.Output,
    nodes.TemplateData,
    nodes.If,
    nodes.For,
    nodes.Assign,
    nodes.Continue,
    nodes.Name,
    nodes.Const,
    nodes.Tuple,
    nodes.List,
    nodes.Dict,
    nodes.Pair,
    nodes.Keyword,
    nodes.CondExpr,
    nodes.Filter,
    nodes.Test,
    nodes.Call,
    nodes.Getitem,
    nodes.Getattr,
    nodes.Slice,
    nodes.Concat,
    nodes.Compare,
    nodes.Operand,
    nodes.BinExpr,
    nodes.UnaryExpr,
)
PURE_GLOBALS = {"dict", "range", "raise_exception"}
RANDOM_FILTERS = {"random"}


class MessageLoop:
    """A template that renders message by message. `looks_ahead`: with an eye on the next one."""

    def __init__(self, whole: jinja2.Template, rest: jinja2.Template, looks_ahead: bool) -> None:
        self._whole = whole
        self._rest = rest
        self.looks_ahead = looks_ahead

    @classmethod
    def of(cls, source: str, environment: jinja2.Environment) -> MessageLoop | None:
        """A template's message loop, if it has one."""
        try:
            whole, _, looks_ahead = _parsed(source, environment)
            rest, at, _ = _parsed(source, environment)
        except _WholeError:
            return None
        rest.body = rest.body[at:]
        return cls(environment.from_string(whole), environment.from_string(rest), looks_ahead)

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        known: Rendering | None = None,
        count: int = 0,
    ) -> tuple[str, list[int] | None]:
        """The text of a conversation, and its `ends` (as of a Rendering) if others can go on from it.

        `known`: how its first `count` messages were rendered with the same variables. Raises what the template does.
        """
        watched = _Watched(messages, count)
        pieces: list[str] = []
        marks: list[int] = []
        given = {**variables, _MESSAGES: watched, _NEW: messages[count:], _SKIPPED: count, _MARK: _mark}
        for piece in pieces_of(self._whole if known is None else self._rest, given):
            if piece is _mark:  # comes before each message, and after the last
                marks.append(len(pieces))
                watched.seen += 1
            else:
                pieces.append(piece)
        before = "".join(pieces[: marks[0]]) if known is None else known.text[: known.ends[count]]
        parts = ["".join(pieces[start:end]) for start, end in pairwise(marks)]
        ends = [] if known is None else known.ends[:count]
        ends += accumulate(map(len, parts), initial=len(before))
        return "".join([before, *parts, *pieces[marks[-1] :]]), ends if watched.in_order else None


class _Mark(str):
    """A piece of text that can be told from all others: by its identity."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


_mark = _Mark()


class _Watched(list[dict[str, Any]]):
    """Messages that tell whether a template took any, by its number, that a shorter conversation might lack.

    `seen`: how many it has come to. Before the first it may look at that one, then always at the next one, and after
    the last at all: what comes after them is always rendered.
    """

    def __init__(self, messages: list[dict[str, Any]], seen: int) -> None:
        super().__init__(messages)
        self.seen = seen
        self.in_order = True

    def __getitem__(self, index: Any) -> Any:
        if self.seen <= len(self) and not (type(index) is int and 0 <= index <= self.seen):
            self.in_order = False
        return super().__getitem__(index)


def pieces_of(template: jinja2.Template, variables: dict[str, Any]) -> Iterator[str]:
    """What a template renders, piece by piece. `variables` are with the environment's globals."""
    # The template's own `new_context` puts its globals together anew each time, which takes longer than a short chat.
    context = template.environment.context_class(template.environment, variables, template.name, template.blocks)
    return template.root_render_func(context)


class _WholeError(Exception):
    """A template that is not known to render message by message."""


def _parsed(source: str, environment: jinja2.Environment) -> tuple[nodes.Template, int, bool]:
    """A template whose loop over the messages goes through the new ones alone; its place; and whether it looks ahead.

    Raises _WholeError.
    """
    root = environment.parse(source)
    if not all(isinstance(node, PURE) for node in root.find_all(nodes.Node)):
        raise _WholeError
    if any(node.name in RANDOM_FILTERS for node in root.find_all(nodes.Filter)):
        raise _WholeError
    names = list(root.find_all(nodes.Name))
    if {node.name for node in names} & ({*environment.globals, _NEW, _SKIPPED, _MARK} - PURE_GLOBALS):
        raise _WholeError
    if any(node.name == _MESSAGES and node.ctx != "load" for node in names):
        raise _WholeError
    at, loop = next(((at, node) for at, node in enumerate(root.body) if _is_over_messages(node)), (0, None))
    if not isinstance(loop, nodes.For) or loop.else_ or loop.test or loop.recursive:
        raise _WholeError
    before, after = root.body[:at], root.body[at + 1 :]
    made = {node.name for part in before for node in part.find_all(nodes.Name) if node.ctx == "store"}
    if made & {node.name for part in (loop, *after) for node in part.find_all(nodes.Name)}:
        raise _WholeError
    numbered = [*_numbered(before), *(number for part in loop.body for number in _numbered([part]))]
    offset = _Offset()
    loop.body = [offset.visit(node) for node in loop.body]
    loop.iter = nodes.Name(_NEW, "load", lineno=loop.lineno)
    loop.body.insert(0, _marking(loop))
    root.body.insert(at + 1, _marking(loop))
    root.set_environment(environment)
    ahead = offset.looks_ahead or any(not (isinstance(arg, nodes.Const) and arg.value == 0) for arg in numbered)
    return root, at, ahead


def _is_over_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.For) and isinstance(node.iter, nodes.Name) and node.iter.name == _MESSAGES


def _numbered(parts: Iterable[nodes.Node]) -> list[nodes.Node]:
    """The numbers by which some parts of a template take messages. Raises _WholeError if they use those otherwise."""
    numbers: list[nodes.Node] = []
    for part in parts:
        taken = [node for node in (part, *part.find_all(nodes.Getitem)) if isinstance(node, nodes.Getitem)]
        found = [node.arg for node in taken if isinstance(node.node, nodes.Name) and node.node.name == _MESSAGES]
        if any(isinstance(number, nodes.Slice) for number in found):
            raise _WholeError
        if sum(node.name == _MESSAGES for node in part.find_all(nodes.Name)) != len(found):
            raise _WholeError
        numbers += found
    return numbers


def _marking(loop: nodes.For) -> nodes.Output:
    return nodes.Output([nodes.Name(_MARK, "load", lineno=loop.lineno)], lineno=loop.lineno)


class _Offset(NodeTransformer):
    """Makes what a loop over the last messages says of their places what a loop over all of them would say."""

    def __init__(self) -> None:
        self.looks_ahead = False

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802 (as jinja2 calls it)
        if not (isinstance(node.node, nodes.Name) and node.node.name == "loop"):
            return self.generic_visit(node)
        skipped = nodes.Name(_SKIPPED, "load", lineno=node.lineno)
        match node.attr:
            case "index" | "index0":
                return nodes.Add(node, skipped, lineno=node.lineno)
            case "first":
                place = nodes.Add(nodes.Getattr(node.node, "index0", "load"), skipped)
                return nodes.Compare(place, [nodes.Operand("eq", nodes.Const(0))], lineno=node.lineno)
            case "last" | "nextitem":
                self.looks_ahead = True
                return node
        raise _WholeError

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        if node.name == "loop":
            raise _WholeError
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """An inner loop, in whose body `loop` is another."""
        body, node.body = node.body, []
        self.generic_visit(node)
        node.body = body
        return node
