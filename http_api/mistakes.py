"""Invalid values in words: what was expected in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

_CHOICES: Final = frozenset({"enum", "literal_error"})
MAPPINGS: Final = frozenset({"dict_type", "model_type", "model_attributes_type", "dataclass_type"})
# What was expected, by the type of a mistake. Types that begin with a key and `_` have its words too.
_EXPECTED: Final = {
    "missing": "is missing",
    "bool": "expected true or false",
    "int": "expected a whole number",
    "float": "expected a number",
    "finite_number": "expected a number",
    "string_type": "expected text",
    "string_unicode": "expected text",
    "string_too_short": "expected {min_length} characters or more",
    "string_too_long": "expected {max_length} characters at most",
    "path": "expected a path",
    "list": "expected a list",
    "tuple": "expected a list",
    "too_short": "expected {min_length} or more in the list",
    "too_long": "expected {max_length} at most in the list",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected {ge} or more",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected {le} or less",
    "url": "expected a URL such as http://10.0.0.1:8000",
}


def expected(mistake: Any, forms: Mapping[str, str] = {}) -> str:
    """Return what was expected in place of an invalid value.

    - `mistake`: an entry of pydantic's `ValidationError.errors()`.
    - `forms`: patterns in words.
    """
    kind, context = mistake["type"], mistake.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])
    if kind in _CHOICES:
        return _choice(context, mistake["input"])
    if kind in MAPPINGS:
        return "expected a mapping"
    if kind == "string_pattern_mismatch":
        return f"expected {forms.get(context['pattern'], 'another form')}"
    known: str | None = _EXPECTED.get(kind) or _EXPECTED.get(kind.partition("_")[0])
    if known is None:
        return "the value is not accepted"
    return known.format(
        **{name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    )


def _choice(context: Mapping[str, Any], given: Any) -> str:
    choices = [each.strip("'") for each in re.split(r", | or ", context["expected"])]
    near = get_close_matches(str(given).lower().replace("-", "_"), choices, 1)
    return f"expected one of {', '.join(choices)}{f'; did you mean {near[0]}?' if near else ''}"
