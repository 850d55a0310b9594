"""The content format that a chat template expects: one string, or a list of parts.

vLLM guesses the format from the template and prepares messages accordingly. The router must guess alike, so it follows
vLLM's rules, including their gaps.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def parsed(source: str) -> nodes.Template:
    """Parse a chat template. Raises TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    return environment.parse(source)


class Generation(Extension):
    """The `{% generation %}` block of transformers, which marks an answer and renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def loops_over_parts(root: nodes.Template) -> bool:
    """Return whether the template loops over the parts of a content (vLLM's "openai" format) or expects a string."""
    try:
        return any(_part_loops(root))
    except _UnfollowableError:
        return False


class _UnfollowableError(Exception):
    """A loop or an assignment whose target is not one plain name. vLLM then stops analyzing the template."""


def _part_loops(root: nodes.Template) -> Iterator[bool]:
    """Yield, for each loop of the template in order, whether it loops over the parts of a content."""
    lists = _aliases(root, "messages")
    loops = list(root.find_all(nodes.For))
    messages = [_target(loop) for loop in loops if any(is_read(loop.iter, name) for name in lists)]
    content_params = _macro_params_given_content(root, messages)
    for loop in loops:
        over_content = any(is_read(loop.iter, name, "content") for name in messages)
        if not over_content and isinstance(loop.iter, nodes.Name):
            over_content = loop.iter.name in content_params.get(id(loop), {"content"})
        if over_content:
            _target(loop)
        yield over_content


def _aliases(root: nodes.Template, name: str) -> list[str]:
    """Return the name and all names that are assigned from it: `{% set turns = messages[1:] %}`."""
    names = [name]
    for known in names:  # grows meanwhile
        for assignment in root.find_all(nodes.Assign):
            if is_read(assignment.node, known):
                alias = _target(assignment)
                if alias not in names:
                    names.append(alias)
    return names


def _macro_params_given_content(root: nodes.Template, messages: list[str]) -> dict[int, set[str]]:
    """Return, for each loop inside a macro (by its id), the parameters that some call passes a message's content to."""
    params: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = [arg.name for arg in macro.args]
        given: set[str] = set()
        for call in root.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                arguments = [*zip(names, call.args, strict=False), *((kwarg.key, kwarg.value) for kwarg in call.kwargs)]
                given |= {
                    name
                    for name, value in arguments
                    if name in names and any(is_read(value, message, "content") for message in messages)
                }
        for loop in macro.find_all(nodes.For):
            params[id(loop)] = given
    return params


def is_read(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Return whether an expression is this variable (or this key of it), possibly filtered, tested or sliced."""
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return is_read(node.node, name, key)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return is_read(node.node, name, key)
        return key is not None and isinstance(node.arg, nodes.Const) and node.arg.value == key and _is(node.node, name)
    if isinstance(node, nodes.Getattr):
        return key is not None and node.attr == key and _is(node.node, name)
    return key is None and _is(node, name)


def _is(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _target(node: nodes.For | nodes.Assign) -> str:
    if not isinstance(node.target, nodes.Name):
        raise _UnfollowableError
    return node.target.name
