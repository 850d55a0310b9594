"""Commands that ask a running fleet: who holds a prompt, where it would go, what goes on, what is wrong."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from kvrouter.commands.options import (
    NO_WORKERS,
    AdminToken,
    ConfigFile,
    Level,
    WorkerUrls,
    fail,
    of_workers,
    settings_from,
)


def match(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Annotated[str, typer.Option(help="The model's name.")],
    url: Annotated[str, typer.Option(help="The router or indexer to ask.")] = "http://127.0.0.1:8080",
    chat: Annotated[bool, typer.Option(help="The prompt is a user's message, rendered with the chat template.")] = True,
) -> None:
    """Ask who holds how much of a prompt."""
    from kvrouter.tools.lookups import print_matches

    try:
        print_matches(url, _request_of(prompt, model, chat))
    except ConnectionError as error:
        fail(str(error))


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Annotated[str, typer.Option(help="The model's name.")],
    url: Annotated[str, typer.Option(help="The router to ask.")] = "http://127.0.0.1:8080",
    chat: Annotated[bool, typer.Option(help="The prompt is a user's message, rendered with the chat template.")] = True,
    ttft: Annotated[
        float | None, typer.Option(min=0.001, help="Promise the first token within so many seconds.")
    ] = None,
    tpot: Annotated[float | None, typer.Option(min=0.0001, help="Promise each token after it in so many.")] = None,
    service_level: Annotated[str | None, typer.Option(help="Promise what this class in the settings does.")] = None,
) -> None:
    """Ask where a prompt would go now, why, and whether a promise would be kept."""
    from kvrouter.tools.lookups import print_explanation

    path = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        body = {"path": path, "request": _request_of(prompt, model, chat)}
        print_explanation(url, body, _promise_headers(ttft, tpot, service_level))
    except ConnectionError as error:
        fail(str(error))


def top(
    url: Annotated[str, typer.Option(help="The router to watch.")] = "http://127.0.0.1:8080",
    token: AdminToken = "",
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
) -> None:
    """Show the fleet in the terminal, updating: its ranks' state, cache, load and hits, and the latest requests."""
    from kvrouter.tools.top import run_top
    from kvrouter.tools.top.feed import FeedError

    try:
        asyncio.run(run_top(url, token, once))
    except FeedError as error:
        fail(str(error))


def doctor(
    config: ConfigFile = None,
    worker: WorkerUrls = None,
    url: Annotated[str | None, typer.Option(help="Instead: a router that runs, asked about its fleet.")] = None,
    token: AdminToken = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of workers whose settings have none.")
    ] = None,
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds that events may take to come.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find out why hits are zero or low, by connecting to the workers as the router would.

    Sends a few short prompts to each worker: those of --worker, of the settings, or of the cluster that the settings
    name. With --url a router that runs is asked instead, and no worker: what it finds, its streams, its policy and how
    prompts become tokens. The exit status is 0 when nothing is wrong, 1 when something is, and 2 when nothing could be
    examined.
    """
    from kvrouter.tools.doctor import NoWorkersError, RouterError, run_doctor, run_doctor_on_router
    from router.fleet.kubernetes import KubernetesError
    from router.server.logs import log_to_stderr

    log_to_stderr(Level.ERROR)
    if url is not None:
        if config or worker:
            fail("--url asks a router about its own workers: leave out --config and --worker", status=2)
        examination = run_doctor_on_router(url, token, as_json)
    else:
        settings = settings_from(config, of_workers(worker), status=2)
        if not settings.workers and not settings.kubernetes.used:
            fail(f"{NO_WORKERS}; or ask a router with --url", status=2)
        examination = run_doctor(settings, api_key, patience, as_json)
    try:
        sound = asyncio.run(examination)
    except KubernetesError as error:
        fail(f"{error}; run it in the router's pod, or ask the router with --url", status=2)
    except (NoWorkersError, RouterError) as error:
        fail(str(error), status=2)
    if not sound:
        raise typer.Exit(1)


def _request_of(prompt: str, model: str, chat: bool) -> dict[str, Any]:
    """The body of a request with this prompt; - is standard input."""
    text = sys.stdin.read() if prompt == "-" else prompt
    fields = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return {"model": model, **fields}


def _promise_headers(ttft: float | None, tpot: float | None, service_level: str | None) -> dict[str, str]:
    """The headers that ask for a promise. Times in seconds."""
    headers = {"x-slo-ttft-ms": ttft and f"{1000 * ttft:g}", "x-slo-tpot-ms": tpot and f"{1000 * tpot:g}"}
    headers["x-kvrouter-service-level"] = service_level
    return {name: value for name, value in headers.items() if value}
