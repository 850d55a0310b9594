"""Whether Python would import our packages, or others that have the same names and come first."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("router", "indexer", "worker", "simulator", "kvevents", "http_api")


class ForeignPackageError(Exception):
    """Another package is found in the place of one of ours."""


def check_packages() -> None:
    """Find our packages without importing them. Raises ForeignPackageError, which names both paths."""
    root = Path(__file__).resolve().parent.parent
    for name in _PACKAGES:
        ours, found = root / name, _place(find_spec(name))
        if found is not None and found != ours:
            raise ForeignPackageError(
                f"another package named {name!r} is in the place of ours: Python finds {found} before {ours}. "
                "Uninstall or rename it, or take its folder off PYTHONPATH."
            )


def _place(spec: ModuleSpec | None) -> Path | None:
    """The folder of a package, or the file of a module; None where there is neither."""
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
