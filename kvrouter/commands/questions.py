"""Commands that query a running fleet: matches of a prompt, its routing, the current state, and problems."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from kvrouter.commands.options import (
    NO_WORKERS,
    ROUTER_URL,
    AsJson,
    ConfigFile,
    Level,
    RouterToken,
    RouterUrl,
    WorkerUrls,
    fail,
    of_workers,
    settings_from,
)


def match(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    url: RouterUrl = ROUTER_URL,
    token: RouterToken = "",
    chat: Annotated[bool, typer.Option(help="Render the prompt as a user message with the chat template.")] = True,
    as_json: AsJson = False,
) -> None:
    """Show how much of a prompt each worker's cache holds. The router may be an indexer."""
    from kvrouter.tools.lookups import print_matches

    try:
        print_matches(url, token, _request_of(prompt, model, chat), as_json)
    except ConnectionError as error:
        fail(str(error))


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    url: RouterUrl = ROUTER_URL,
    token: RouterToken = "",
    chat: Annotated[bool, typer.Option(help="Render the prompt as a user message with the chat template.")] = True,
    ttft: Annotated[float | None, typer.Option(min=0.001, help="SLO: seconds until the first token.")] = None,
    tpot: Annotated[float | None, typer.Option(min=0.0001, help="SLO: seconds for each later token.")] = None,
    service_level: Annotated[str | None, typer.Option(help="SLO of this service level in the settings.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the worker that a prompt would be routed to now, the reason, and whether an SLO would be met."""
    from kvrouter.tools.lookups import print_explanation

    path = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        body = {"path": path, "request": _request_of(prompt, model, chat)}
        print_explanation(url, token, body, _slo_headers(ttft, tpot, service_level), as_json)
    except ConnectionError as error:
        fail(str(error))


def top(
    url: RouterUrl = ROUTER_URL,
    token: RouterToken = "",
    once: Annotated[bool, typer.Option("--once", help="Print the fleet once, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the fleet once as JSON, and exit.")] = False,
) -> None:
    """Show the fleet in the terminal: state, cache, load and hits of its ranks, and the latest requests."""
    from kvrouter.tools.top import FeedError, run_top

    try:
        asyncio.run(run_top(url, token, once, as_json))
    except FeedError as error:
        fail(str(error))


def doctor(
    context: typer.Context,
    config: ConfigFile = None,
    worker: WorkerUrls = None,
    url: RouterUrl = ROUTER_URL,
    token: RouterToken = "",
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of workers without one in the settings.")
    ] = None,
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for events.")] = 4.0,
    as_json: AsJson = False,
) -> None:
    """Find out why hits are zero or low, in a running router or by connecting to workers as the router does.

    By default, the router at --url is examined, without requests to workers: its findings, event streams, policy and
    tokenizers. With --worker or --config, a few short prompts are sent to each worker of --worker, of the settings, or
    of the cluster in the settings. The exit status is 0 without findings, 1 with findings, and 2 if the examination was
    impossible.
    """
    from kvrouter.tools.doctor import NoWorkersError, RouterError, run_doctor, run_doctor_on_router
    from router.fleet.kubernetes import KubernetesError
    from router.server.logs import log_to_stderr

    log_to_stderr(Level.ERROR)
    if not config and not worker:
        examination = run_doctor_on_router(url, token, as_json)
    else:
        source = context.get_parameter_source("url")
        if source is not None and source.name == "COMMANDLINE":
            fail("--url examines a router's own workers: omit --config and --worker", status=2)
        settings = settings_from(config, of_workers(worker), status=2)
        if not settings.workers and not settings.kubernetes.used:
            fail(f"{NO_WORKERS}; or examine a router with --url", status=2)
        examination = run_doctor(settings, api_key, patience, as_json)
    try:
        sound = asyncio.run(examination)
    except KubernetesError as error:
        fail(f"{error}; run the command in the router's pod, or use --url", status=2)
    except (NoWorkersError, RouterError) as error:
        fail(str(error), status=2)
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
