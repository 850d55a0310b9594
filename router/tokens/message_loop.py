"""Chat templates that render message by message, so that of a conversation's next turn only what is new is rendered.

Proved of a template by its syntax: one loop over the messages, which nothing else in it reads; whose body depends on
nothing but its message and the variables of the request, and leaves nothing behind for the next message. All that is
not known to be so is taken not to be: most templates look at the first message or the next one, and are rendered whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import jinja2
from jinja2 import nodes

from router.apis.requests import Rendering

_MESSAGES = "messages"
# Without state, and without effect but on what they are part of.
_PURE = (
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
_PURE_GLOBALS = {"dict", "range", "raise_exception"}
_RANDOM_FILTERS = {"random"}


class MessageLoop:
    """A template that renders message by message."""

    def __init__(self, whole: jinja2.Template, rest: jinja2.Template) -> None:
        self._whole = whole
        self._rest = rest

    @classmethod
    def of(cls, source: str, compiled: jinja2.Template) -> MessageLoop | None:
        """A template's message loop, if it has one; `compiled` is the template."""
        environment = compiled.environment
        root = environment.parse(source)
        at = _message_loop(root, environment)
        if at is None:
            return None
        rest = nodes.Template(root.body[at:], lineno=1)
        rest.set_environment(environment)
        return cls(compiled, environment.from_string(rest))

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        known: Rendering | None = None,
        count: int = 0,
    ) -> tuple[str, list[int]]:
        """The text of a conversation, and its `ends` (as of a Rendering).

        `known`: how its first `count` messages, or more, were rendered with the same variables. `messages` are those
        after them. Raises what the template does.
        """
        template = self._whole if known is None else self._rest
        pieces: list[str] = []
        marks: list[int] = []

        def marked() -> Iterator[dict[str, Any]]:
            for message in messages:
                marks.append(len(pieces))
                yield message
            marks.append(len(pieces))

        for piece in pieces_of(template, {**variables, _MESSAGES: marked()}):
            pieces.append(piece)  # so what came of a message is here before the next one is asked for
        before = "".join(pieces[: marks[0]]) if known is None else known.text[: known.ends[count]]
        parts = ["".join(pieces[start:end]) for start, end in pairwise(marks)]
        ends = [] if known is None else known.ends[:count]
        ends += accumulate(map(len, parts), initial=len(before))
        return "".join([before, *parts, *pieces[marks[-1] :]]), ends


def pieces_of(template: jinja2.Template, variables: dict[str, Any]) -> Iterator[str]:
    """What a template renders, piece by piece. `variables` are with the environment's globals."""
    # The template's own `new_context` puts its globals together anew each time, which takes longer than a short chat.
    context = template.environment.context_class(template.environment, variables, template.name, template.blocks)
    return template.root_render_func(context)


def _message_loop(root: nodes.Template, environment: jinja2.Environment) -> int | None:
    """The place of the loop over the messages in a template that renders message by message."""
    if not all(isinstance(node, _PURE) for node in root.find_all(nodes.Node)):
        return None
    if any(node.name in _RANDOM_FILTERS for node in root.find_all(nodes.Filter)):
        return None
    names = list(root.find_all(nodes.Name))
    if {node.name for node in names} & (environment.globals.keys() - _PURE_GLOBALS):
        return None
    if sum(node.name == _MESSAGES for node in names) != 1:
        return None
    for at, node in enumerate(root.body):
        if isinstance(node, nodes.For) and isinstance(node.iter, nodes.Name) and node.iter.name == _MESSAGES:
            return at if _by_itself(node, root.body[:at], root.body[at + 1 :]) else None
    return None


def _by_itself(loop: nodes.For, before: list[nodes.Node], after: list[nodes.Node]) -> bool:
    """Whether a loop, and what comes after it, use nothing that the template itself made before, or in the loop."""
    if loop.else_ or loop.recursive or "loop" in _used([loop.target, *filter(None, [loop.test]), *loop.body]):
        return False
    made = {node.name for part in before for node in part.find_all(nodes.Name) if node.ctx == "store"}
    return not made & _used([loop, *after])


def _used(parts: Iterable[nodes.Node]) -> set[str]:
    """The names in some parts of a template; `loop` only where it is that of the loop around them."""
    used: set[str] = set()
    for part in parts:
        if isinstance(part, nodes.Name):
            used.add(part.name)
        if isinstance(part, nodes.For):
            used |= _used(part.body) - {"loop"} | _used(part.iter_child_nodes(exclude=("body",)))
        else:
            used |= _used(part.iter_child_nodes())
    return used
