"""Checks of the installation: missing extras, and packages of other projects with our names. It imports no extra."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

# Extras and their modules. An installation without extras is for engines.
MODULES = {
    "router": (
        "aiohttp",
        "fastapi",
        "fastokens",
        "httptools",
        "huggingface_hub",
        "jinja2",
        "jiter",
        "markupsafe",
        "mypy_extensions",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "rich",
        "sortedcontainers",
        "starlette",
        "structlog",
        "tokenizers",
        "typer",
        "uvicorn",
        "uvloop",
        "websockets",
        "xxhash",
        "yaml",
        "yarl",
    ),
    "demo": ("openai",),
    "disaggregation": ("numpy",),
    "envoy": ("google", "hpack"),
    "harmony": ("openai_harmony",),
    "kimi": ("tiktoken",),
    "mistral": ("mistral_common",),
    "mooncake": ("mooncake",),
    "nixl": ("nixl",),
    "otel": ("opentelemetry",),
    "jwt": ("jwt",),
    "redis": ("redis",),
    "transformers": ("transformers",),
}
# Commands that need more than the router.
_COMMANDS = {"demo": "demo", "picker": "router,envoy"}


def missing_extra(module: str | None, arguments: list[str]) -> str | None:
    """Return the message for a module that a command did not find; None if no extra installs it."""
    name = (module or "").partition(".")[0]
    extra = next((extra for extra, modules in MODULES.items() if name in modules), None)
    if extra is None:
        return None
    extra = _COMMANDS.get(arguments[0] if arguments else "", extra)
    return f"the package {name!r} is missing: pip install 'kvrouter[{extra}]'"


_PACKAGES = ("router", "indexer", "worker", "simulator", "kvevents", "http_api")


class ForeignPackageError(Exception):
    """A package of another project that Python finds before ours."""


def check_packages() -> None:
    """Find our packages without importing them. Raises ForeignPackageError, which names both paths."""
    root = Path(__file__).resolve().parent.parent
    for name in _PACKAGES:
        ours, found = root / name, _place(find_spec(name))
        if found is not None and found != ours:
            raise ForeignPackageError(
                f"another package is named {name!r} as ours is: Python finds {found} before {ours}. "
                "Uninstall or rename it, or remove its folder from PYTHONPATH."
            )


def _place(spec: ModuleSpec | None) -> Path | None:
    """Return the folder of a package or the file of a module; `None` if neither exists."""
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
