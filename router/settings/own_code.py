"""Functions of one's own that settings name: `package.module:function`, or an entry point of an installed package."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

# The names of functions and of entry points.
NAME = r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_.]*)?$"
# The groups of entry points whose names are names of functions.
POLICIES = "kvrouter.policies"
HOOKS = "kvrouter.hooks"


def function_named(name: str, group: str = POLICIES) -> Callable[..., Any]:
    """Return a function of one's own. Raises ValueError, which says what to correct."""
    module, separator, path = name.partition(":")
    if separator:
        return _function_in(module, path)
    found = entry_points(group=group, name=name)
    if not found:
        raise ValueError(f"no installed package provides it as an entry point of {group}")
    value = next(iter(found)).value
    module, separator, path = value.partition(":")
    if not separator:
        raise ValueError(f"its entry point {value!r} names no function: write package.module:function in its package")
    return _function_in(module.strip(), path.strip())


def check_function(name: str, known: list[str], group: str = POLICIES) -> str:
    """Return the name of a function of one's own that can be imported. Raises ValueError.

    - `known`: the names that are valid beside those of functions.
    - `group`: the group of entry points.
    """
    near = get_close_matches(name.lower().replace("-", "_"), known, 1, 0.8)
    if near:
        raise ValueError(f"unknown name; did you mean {near[0]}?")
    try:
        if re.match(NAME, name) is None:
            raise ValueError("a name has letters, digits, _ and .")
        function_named(name, group)
    except ValueError as error:
        others = "".join(f"{each}, " for each in known)
        expected = f"expected {others}package.module:function or an entry point of {group}"
        raise ValueError(f"{error}; {expected}") from error
    return name


def text_of(error: BaseException) -> str:
    """Return the text of an error that foreign code raised, as valid UTF-8, even if its `__str__` raises."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "its text cannot be read"


def _function_in(module: str, path: str) -> Callable[..., Any]:
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        missing = f"there is no module {error.name}"
        raise ValueError(f"{missing}: install its package, or add its folder to PYTHONPATH") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module can raise anything on import
        raise ValueError(f"the import of {module} raised {type(error).__name__}: {text_of(error)}") from error
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ValueError(f"{module} has no function {path!r}")
    function: Callable[..., Any] = found
    return function
