"""API keys of workers: where they are read from, and the header in which they are sent.

Errors never have the key.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_LONGEST: Final = 8192
# What a header can have: the key alone, or a scheme before it.
_KEY: Final = re.compile(r"(?:[A-Za-z]+ )?[!-~]+")


def checked_key(key: str, name: str) -> str:
    """A key that can be sent. Raises ValueError, which begins with this name."""
    if len(key) > _LONGEST or not _KEY.fullmatch(key):
        raise ValueError(f"{name}: no API key: expected {_LONGEST} characters at most, visible ones of ASCII")
    return key


def key_in_file(path: Path) -> str:
    """The key that is all of a file. Raises ValueError, which begins with `api_key_file`."""
    try:
        with path.open("rb") as file:
            key = file.read(_LONGEST + 2).decode().strip()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"api_key_file: {path} cannot be read: {type(error).__name__}") from error
    return checked_key(key, f"api_key_file: {path}")


def key_in_environment(variable: str) -> str:
    """The key in an environment variable. Raises ValueError, which begins with `api_key_env`."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"api_key_env: the environment has no {variable}")
    return checked_key(key, f"api_key_env: {variable}")


def authorization_of(key: str) -> bytes | None:
    """The value of the header `Authorization` for a key; None for an empty one, which is not sent."""
    if not key:
        return None
    return (key if " " in key else f"Bearer {key}").encode()
