"""Which build of ours is measured."""

from __future__ import annotations

import sys
from pathlib import Path

_COMPILED = Path(".compiled/bin/python").absolute()


def is_compiled() -> bool:
    """Whether `make compiled` has been there."""
    return _COMPILED.exists() and (_COMPILED.parent.parent / "installed").exists()


def python(*, interpreted: bool = False) -> list[str]:
    """The command that runs ours: compiled, where it is; `interpreted`: as Python runs it all the same."""
    if interpreted or not is_compiled():
        return [sys.executable]
    return [str(_COMPILED), "-P"]  # with -P the compiled one is imported, not what lies in this directory
