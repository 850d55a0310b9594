"""Commands that make keys: of tenants, and of encrypted event streams."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvrouter.commands.options import fail


def hash_key(
    key: Annotated[str, typer.Argument(help="The API key; - reads it from standard input.")] = "",
) -> None:
    """Print the hash of an API key, for tenants in the settings file. Without a key, make one."""
    from secrets import token_urlsafe

    from router.auth import hashed_key

    if not key:
        key = f"kv-{token_urlsafe(32)}"
        typer.echo(f"key   {key}", err=True)
    typer.echo(hashed_key(sys.stdin.read().strip() if key == "-" else key))


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the keys.")],
    name: Annotated[str, typer.Option(help="What the files are called.")] = "kvrouter",
) -> None:
    """Write a CURVE key pair: NAME.key to give away, NAME.key_secret to keep."""
    from kvevents.curve import create_key_pair

    try:
        public, secret = create_key_pair(folder, name)
    except OSError as error:
        fail(str(error))
    typer.echo(f"public key: {public}\nsecret key: {secret}")
