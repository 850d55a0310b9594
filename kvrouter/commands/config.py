"""Commands about the settings file: whether it can be used, what comes of it, and one with all defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrouter.commands.options import fail, settings_from

File = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="Settings file, such as config.yaml.", show_default="environment alone"),
]


def check(file: File = None) -> None:
    """Say whether the settings can be used, with all their mistakes at once.

    The environment counts as it would for `kvrouter serve`. The exit status is 0 when nothing is wrong, else 1.
    """
    settings = settings_from(file, {})
    workers = len(settings.workers)
    where = f"{workers} worker{'s' * (workers != 1)}"
    if settings.kubernetes.used:
        where += " and those of the cluster"
    for setting in settings.without_effect:
        typer.echo(f"{file or 'environment'}: warning: {setting} has no effect and can be removed")
    typer.echo(f"{file or 'environment'}: no mistakes; {where}, policy {settings.policy.name}")


def show(file: File = None) -> None:
    """Print every setting as it would be used: defaults, file and environment together. Secrets are masked."""
    import yaml

    from router.settings import shown

    typer.echo(yaml.safe_dump(shown(settings_from(file, {})), sort_keys=False, allow_unicode=True), nl=False)


def default() -> None:
    """Print a settings file that has every setting with its default and what it is for, to begin with."""
    from kvrouter.default_config import default_config

    try:
        typer.echo(default_config(), nl=False)
    except OSError as error:
        fail(str(error))
