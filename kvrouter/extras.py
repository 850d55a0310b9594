"""Which extra of kvrouter brings a package that is missing. Nothing here needs any of them."""

from __future__ import annotations

# What `pip install kvrouter` alone brings is for engines; each of these comes with an extra.
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
        "xxhash",
        "yaml",
        "yarl",
    ),
    "demo": ("openai",),
    "disaggregation": ("numpy",),
    "envoy": ("google", "grpc", "grpc_health", "hpack"),
    "harmony": ("openai_harmony",),
    "kimi": ("tiktoken",),
    "mistral": ("mistral_common",),
    "mooncake": ("mooncake",),
    "nixl": ("nixl",),
    "otel": ("opentelemetry",),
    "redis": ("redis",),
    "transformers": ("transformers",),
}
# Commands that want more than the router.
_COMMANDS = {"demo": "demo", "picker": "router,envoy"}


def missing_extra(module: str | None, arguments: list[str]) -> str | None:
    """What to tell of a module that a command did not find; None for one that no extra brings.

    `arguments`: the command's, of which the first names it.
    """
    name = (module or "").partition(".")[0]
    extra = next((extra for extra, modules in MODULES.items() if name in modules), None)
    if extra is None:
        return None
    extra = _COMMANDS.get(arguments[0] if arguments else "", extra)
    return f"the package {name!r} is missing: pip install 'kvrouter[{extra}]'"
