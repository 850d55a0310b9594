"""Commands that prepare a settings file: `config check`, `config show`, `config default`, `hash-key` and `keygen`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvrouter.commands.options import fail, settings_from

_PACKAGE = Path(__file__).parents[1]


def _default_config() -> str:
    """Return config.yaml, which a wheel has in this package and a checkout beside it. Raises OSError."""
    packaged = _PACKAGE / "config.yaml"
    return (packaged if packaged.exists() else _PACKAGE.parent / "config.yaml").read_text()


File = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="Settings file, such as config.yaml.", show_default="environment alone"),
]


def check(file: File = None) -> None:
    """Check the settings, and print all mistakes at once.

    The environment counts as it does for `kvrouter serve`. The exit status is 0 if the settings are valid, else 1.
    """
    settings = settings_from(file, {})
    workers = len(settings.workers)
    where = f"{workers} worker{'s' * (workers != 1)}"
    if settings.kubernetes.used:
        where += " and the workers of the cluster"
    for setting in settings.without_effect:
        typer.echo(f"{file or 'environment'}: warning: {setting} has no effect and can be removed")
    if settings.tenants.named and settings.server.admin_port is None:
        typer.echo(
            f"{file or 'environment'}: warning: /metrics shows the tenants' names to all clients; "
            "set server.admin_port to serve it at that port only"
        )
    typer.echo(f"{file or 'environment'}: no mistakes; {where}, policy {settings.policy.name}")


def show(file: File = None) -> None:
    """Print every setting with its value from defaults, file and environment. Secrets are masked."""
    import yaml

    from router.settings import shown

    typer.echo(yaml.safe_dump(shown(settings_from(file, {})), sort_keys=False, allow_unicode=True), nl=False)


def default() -> None:
    """Print a settings file with every setting, its default and its description."""
    try:
        typer.echo(_default_config(), nl=False)
    except OSError as error:
        fail(str(error))


def hash_key(
    key: Annotated[str, typer.Argument(help="The API key; - reads standard input.")] = "",
) -> None:
    """Print the hash of an API key, for tenants in the settings file. Without a key, create one."""
    from secrets import token_urlsafe

    from router.auth import hashed_key

    if not key:
        key = f"kv-{token_urlsafe(32)}"
        typer.echo(f"key   {key}", err=True)
    typer.echo(hashed_key(sys.stdin.read().strip() if key == "-" else key))


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the keys.")],
    name: Annotated[str, typer.Option(help="Name of the files.")] = "kvrouter",
) -> None:
    """Write a CURVE key pair: NAME.key to distribute, NAME.key_secret to keep."""
    from kvevents.curve import create_key_pair

    try:
        public, secret = create_key_pair(folder, name)
    except OSError as error:
        fail(str(error))
    typer.echo(f"public key: {public}\nsecret key: {secret}")
