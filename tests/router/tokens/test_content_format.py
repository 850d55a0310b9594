"""Which templates take a message's content as a list of parts. The answers are vLLM's."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from router.tokens.content_format import loops_over_parts

END = "{% endfor %}{% endfor %}"
PARTS = [
    "{% for m in messages %}{% for p in m.content %}" + END,
    "{% for m in messages %}{% for p in m['content'] %}" + END,
    "{% for m in messages %}{% if m.content is mapping %}{% endif %}{% for p in m.content | list %}" + END,
    "{% for m in messages[1:] %}{% for p in m.content[:2] %}" + END,
    "{% set turns = messages[1:] %}{% set late = turns %}{% for m in late %}{% for p in m.content %}" + END,
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}" + END,
    "{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% macro show(y, x) %}{% for p in x %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(1, x=m.content) }}{% endfor %}",
]
STRING = [
    "",
    "{{ messages }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}" + END,
    "{% for t in tools %}{% for p in t.content %}" + END,
    "{% for m in messages %}{% for p in m.content.parts %}" + END,
    "{% for m in messages %}{% for p in m[0] %}" + END,
    "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ show(tools) }}",
    # What vLLM cannot follow: targets that are not one plain name.
    "{% for m in messages %}{% for a, b in m.content %}" + END,
    "{% set ns = namespace() %}{% set ns.m = messages %}{% for m in messages %}{% for p in m.content %}" + END,
]


@pytest.mark.parametrize("source", PARTS)
def test_templates_with_a_loop_over_parts_receive_parts(source: str) -> None:
    assert loops_over_parts(Environment().parse(source))


@pytest.mark.parametrize("source", STRING)
def test_templates_without_parts_receive_a_string(source: str) -> None:
    assert not loops_over_parts(Environment().parse(source))
