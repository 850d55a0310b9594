"""Commands that query a running fleet: matches of a prompt, its routing, the current state, and problems."""

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
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    url: Annotated[str, typer.Option(help="URL of the router or indexer.")] = "http://127.0.0.1:8080",
    chat: Annotated[bool, typer.Option(help="Render the prompt as a user message with the chat template.")] = True,
) -> None:
    """Show how much of a prompt each worker's cache holds."""
    from kvrouter.tools.lookups import print_matches

    try:
        print_matches(url, _request_of(prompt, model, chat))
    except ConnectionError as error:
        fail(error)


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    url: Annotated[str, typer.Option(help="URL of the router.")] = "http://127.0.0.1:8080",
    chat: Annotated[bool, typer.Option(help="Render the prompt as a user message with the chat template.")] = True,
    ttft: Annotated[float | None, typer.Option(min=0.001, help="SLO: seconds until the first token.")] = None,
    tpot: Annotated[float | None, typer.Option(min=0.0001, help="SLO: seconds for each later token.")] = None,
    service_level: Annotated[str | None, typer.Option(help="SLO of this service level in the settings.")] = None,
) -> None:
    """Show the worker that a prompt would be routed to now, the reason, and whether an SLO would be met."""
    from kvrouter.tools.lookups import print_explanation

    path = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        body = {"path": path, "request": _request_of(prompt, model, chat)}
        print_explanation(url, body, _slo_headers(ttft, tpot, service_level))
    except ConnectionError as error:
        fail(error)


def top(
    url: Annotated[str, typer.Option(help="URL of the router.")] = "http://127.0.0.1:8080",
    token: AdminToken = "",
    once: Annotated[bool, typer.Option("--once", help="Print the fleet once, and exit.")] = False,
) -> None:
    """Show the fleet in the terminal: state, cache, load and hits of its ranks, and the latest requests."""
    from kvrouter.tools.top import FeedError, run_top

    try:
        asyncio.run(run_top(url, token, once))
    except FeedError as error:
        fail(error)


def doctor(
    config: ConfigFile = None,
    worker: WorkerUrls = None,
    url: Annotated[str | None, typer.Option(help="Examine the fleet of this running router instead.")] = None,
    token: AdminToken = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of workers without one in the settings.")
    ] = None,
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for events.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find out why hits are zero or low, by connecting to the workers as the router does.

    Sends a few short prompts to each worker of --worker, of the settings, or of the cluster in the settings. With
    --url, a running router is examined instead, without requests to workers: its findings, event streams, policy and
    tokenizers. The exit status is 0 without findings, 1 with findings, and 2 if the examination was impossible.
    """
    from kvrouter.tools.doctor import NoWorkersError, RouterError, run_doctor, run_doctor_on_router
    from router.fleet.kubernetes import KubernetesError
    from router.server.logs import log_to_stderr

    log_to_stderr(Level.ERROR)
    if url is not None:
        if config or worker:
            fail("--url examines a router's own workers: omit --config and --worker", status=2)
        examination = run_doctor_on_router(url, token, as_json)
    else:
        settings = settings_from(config, of_workers(worker), status=2)
        if not settings.workers and not settings.kubernetes.used:
            fail(f"{NO_WORKERS}; or examine a router with --url", status=2)
        examination = run_doctor(settings, api_key, patience, as_json)
    try:
        sound = asyncio.run(examination)
    except KubernetesError as error:
        fail(f"{error}; run the command in the router's pod, or use --url", status=2)
    except (NoWorkersError, RouterError) as error:
        fail(error, status=2)
    if not sound:
        raise typer.Exit(1)


def _request_of(prompt: str, model: str, chat: bool) -> dict[str, Any]:
    """Return the body of a request with this prompt; - reads standard input."""
    text = sys.stdin.read() if prompt == "-" else prompt
    fields = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return {"model": model, **fields}


def _slo_headers(ttft: float | None, tpot: float | None, service_level: str | None) -> dict[str, str]:
    """Return the headers that request an SLO. Times are seconds."""
    headers = {"x-slo-ttft-ms": ttft and f"{1000 * ttft:g}", "x-slo-tpot-ms": tpot and f"{1000 * tpot:g}"}
    headers["x-kvrouter-service-level"] = service_level
    return {name: value for name, value in headers.items() if value}
