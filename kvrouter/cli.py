"""The `kvrouter` command: its subcommands, in the order in which they are listed."""

from __future__ import annotations

from collections.abc import Callable

import typer

from kvrouter.commands.keys import hash_key, keygen
from kvrouter.commands.questions import doctor, explain, match, top
from kvrouter.commands.recordings import record, replay, replay_trace
from kvrouter.commands.services import indexer, picker, serve
from kvrouter.commands.simulations import demo, simulate

app = typer.Typer(
    help="Routes LLM requests to the worker whose KV cache already holds their prefix.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

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
    doctor,
    keygen,
    demo,
)
for _command in _COMMANDS:
    app.command()(_command)

