"""What a service prints for the one who started it: at once what it waits for, and what it found once it serves."""

from __future__ import annotations

import sys

from indexer.build_info import build_info
from router.observability.about import About
from router.settings import Settings


def announce_start(settings: Settings, name: str) -> None:
    """Say that it starts, and what it waits for first."""
    built = build_info()
    say(f"{name} {built['version']} starts, with the {built['core']} index; it {_waits_for(settings)}")


def announce_models(about: About) -> None:
    """Say what is served, and how its prompts become tokens."""
    for model, served in about.models().items():
        count = served["workers"]
        say(f"  model   {model} on {count} worker{'s' * (count != 1)}; tokens: {served['tokens']}")
    if not about.models():
        say("  model   none yet: no worker answers. /health says why")


def announce_page(policy: str, url: str) -> None:
    """Say how workers are chosen, and where to look on."""
    say(f"  policy  {policy}")
    say(f"  page    {url}/ui")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, file=sys.stderr, flush=True)


def _waits_for(settings: Settings) -> str:
    asked = []
    if count := len(settings.workers):
        asked.append(f"asks {count} worker{'s' * (count != 1)} for models, files and event streams")
    if settings.kubernetes.used:
        asked.append("asks the cluster for workers")
    if not asked:
        return "has no workers yet: add them with POST /workers, or in the settings file"
    return f"{' and '.join(asked)}, and waits up to {settings.events.catch_up_timeout:g} s for what they cache"
