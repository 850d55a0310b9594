"""The settings file that has every default: config.yaml of the project, which a wheel has beside this module."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def default_config() -> str:
    """Its text. Raises OSError."""
    packaged = _HERE / "config.yaml"
    return (packaged if packaged.exists() else _HERE.parent / "config.yaml").read_text()
