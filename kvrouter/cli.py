"""The `kvrouter` command: its subcommands, in the order in which they are listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from kvrouter.commands import services
from kvrouter.commands.questions import doctor, explain, match, top
from kvrouter.commands.recordings import record, replay, replay_trace, size
from kvrouter.commands.services import hash_key, indexer, keygen, picker, serve
from kvrouter.commands.simulations import demo, simulate


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from indexer.api.metrics import build_info

    built = build_info()
    typer.echo(f"kvrouter {built['version']} ({built['build']}; index core: {built['core']}; Python {built['python']})")
    raise typer.Exit


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_commands = typer.Typer(help="Check, show or create a settings file.", no_args_is_help=True)

_COMMANDS: tuple[Callable[..., None], ...] = (
    serve,
    picker,
    indexer,
    match,
    explain,
    top,
    hash_key,
    simulate,
    record,
    replay,
    replay_trace,
    size,
    doctor,
    keygen,
    demo,
)
for _command in _COMMANDS:
    app.command()(_command)
for _command in (services.check, services.show, services.default):
    config_commands.command()(_command)
app.add_typer(config_commands, name="config")


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Route LLM requests to the worker whose KV cache already holds their prefix."""
