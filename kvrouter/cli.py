"""The `kvrouter` command and its subcommands."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Routes LLM requests to the worker whose KV cache already holds their prefix.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="Settings file, such as config.yaml.")]


class Level(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[Level, typer.Option(help="How much is logged.")]


def main() -> None:
    """The entry point of the `kvrouter` command."""
    app()


@app.command()
def serve(
    config: ConfigFile = None,
    worker: Annotated[list[str] | None, typer.Option("--worker", "-w", help="URL of a worker; repeatable.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="8080")] = None,
    policy: Annotated[str | None, typer.Option(help="Names are in config.yaml.", show_default="kv_aware")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes that share the port.", show_default="1")] = None,
    peer: Annotated[str | None, typer.Option(help="URL of another router, to begin with its index.")] = None,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run the router, with the index inside."""
    from router.fleet.config_reload import SettingsFile
    from router.server.serving import serve_router
    from router.server.supervisor import ProcessFailedError, Supervisor

    overrides: dict[str, Any] = _given(
        server=_given(host=host, port=port, processes=processes), policy=_given(name=policy), index=_given(peer=peer)
    )
    if worker:
        overrides["workers"] = [{"url": url} for url in worker]
    settings = _settings(config, overrides)
    if not settings.workers and config is None and not settings.kubernetes.used:
        _fail("no workers: name them under workers: in the settings file, or with --worker URL")
    file = SettingsFile(config, overrides) if config else None
    if settings.server.processes == 1:
        _run(serve_router(settings, file), log_level)
        return
    from router.server.logs import log_to_stderr

    log_to_stderr(log_level)
    try:
        Supervisor(settings, file, settings.server.processes, log_level).run()
    except (OSError, ProcessFailedError) as error:
        _fail(str(error))


@app.command()
def picker(
    config: ConfigFile = None,
    worker: Annotated[list[str] | None, typer.Option("--worker", "-w", help="URL of a worker; repeatable.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of HTTP: health, metrics, workers.", show_default="8080")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port for Envoy.", show_default="9002")] = None,
    policy: Annotated[str | None, typer.Option(help="Names are in config.yaml.", show_default="kv_aware")] = None,
    peer: Annotated[str | None, typer.Option(help="URL of another router, to begin with its index.")] = None,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run the router as an endpoint picker: Envoy asks it where to send requests, and carries them itself."""
    from importlib.util import find_spec

    from router.fleet.config_reload import SettingsFile
    from router.server.serving import serve_picker

    if not all(find_spec(name) for name in ("grpc", "grpc_health", "hpack")):
        _fail("the picker wants more packages: pip install 'kvrouter[envoy]'")
    overrides: dict[str, Any] = _given(
        server=_given(host=host, port=port),
        picker=_given(port=grpc_port),
        policy=_given(name=policy),
        index=_given(peer=peer),
    )
    if worker:
        overrides["workers"] = [{"url": url} for url in worker]
    settings = _settings(config, overrides)
    if not settings.workers and config is None and not settings.kubernetes.used:
        _fail("no workers: name them under workers: in the settings file, or with --worker URL")
    if settings.server.processes != 1:
        _fail(
            "server.processes: a picker is one process. Run several pickers, which share their load over replicas.redis"
        )
    _run(serve_picker(settings, SettingsFile(config, overrides) if config else None), log_level)


@app.command()
def indexer(
    config: ConfigFile = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8090,
    log_level: LogLevel = Level.INFO,
) -> None:
    """Run the index alone: workers are registered over HTTP."""
    from router.server.serving import serve_indexer

    _run(serve_indexer(_settings(config, {"server": {"host": host, "port": port}})), log_level)


@app.command()
def match(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Annotated[str, typer.Option(help="The model's name.")],
    url: Annotated[str, typer.Option(help="The router or indexer to ask.")] = "http://127.0.0.1:8080",
    chat: Annotated[bool, typer.Option(help="The prompt is a user's message, rendered with the chat template.")] = True,
) -> None:
    """Ask who holds how much of a prompt."""
    from kvrouter.match import print_matches

    try:
        print_matches(url, _prompted(prompt, model, chat))
    except ConnectionError as error:
        _fail(str(error))


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Annotated[str, typer.Option(help="The model's name.")],
    url: Annotated[str, typer.Option(help="The router to ask.")] = "http://127.0.0.1:8080",
    chat: Annotated[bool, typer.Option(help="The prompt is a user's message, rendered with the chat template.")] = True,
) -> None:
    """Ask where a prompt would go now, and why."""
    from kvrouter.explain import print_explanation

    path = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        print_explanation(url, {"path": path, "request": _prompted(prompt, model, chat)})
    except ConnectionError as error:
        _fail(str(error))


@app.command()
def top(
    url: Annotated[str, typer.Option(help="The router to watch.")] = "http://127.0.0.1:8080",
    token: Annotated[str, typer.Option(envvar="KVROUTER_SERVER__TOKEN", help="The router's server.token.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
) -> None:
    """Show the fleet in the terminal, updating: its ranks' state, cache, load and hits, and the latest requests."""
    from kvrouter.tools.top import run_top
    from kvrouter.tools.top.feed import FeedError

    try:
        asyncio.run(run_top(url, token, once))
    except FeedError as error:
        _fail(str(error))


@app.command("hash-key")
def hash_key(
    key: Annotated[str, typer.Argument(help="The API key; - reads it from standard input.")] = "",
) -> None:
    """Print the hash of an API key, for tenants in the settings file. Without a key, make one."""
    from secrets import token_urlsafe

    from router.access import hashed_key

    if not key:
        key = f"kv-{token_urlsafe(32)}"
        typer.echo(f"key   {key}", err=True)
    typer.echo(hashed_key(sys.stdin.read().strip() if key == "-" else key))


@app.command()
def simulate(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "simulated",
    adapter: Annotated[list[str] | None, typer.Option(help="Name of a LoRA adapter; repeatable.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks in the cache of each DP rank.")] = 4096,
    dp_size: Annotated[int, typer.Option(help="Number of DP ranks.")] = 1,
    prefix_caching: Annotated[bool, typer.Option(help="Keep what was computed, and find it again.")] = True,
    max_model_len: Annotated[int, typer.Option(help="Tokens of the longest prompt with its answer.")] = 32768,
    prefill_ms: Annotated[float, typer.Option(help="Milliseconds to compute one uncached prompt token.")] = 0.15,
    step_ms: Annotated[float, typer.Option(help="Milliseconds a step takes at least: the time of a token.")] = 5.0,
    kv_events: Annotated[str | None, typer.Option(help="Publisher configuration in JSON, as SGLang takes it.")] = None,
    disaggregation: Annotated[str | None, typer.Option(help="sglang or nixl: how it hands KV pages over.")] = None,
    role: Annotated[str | None, typer.Option(help="prefill or decode; wants --disaggregation.")] = None,
    bootstrap_port: Annotated[int, typer.Option(help="Of a prefill worker's bootstrap service; 0: a free one.")] = 0,
) -> None:
    """Run a simulated worker: real cache, scheduler, events and API, made-up words."""
    from worker.publisher import PublisherConfig
    from worker.simulated import SimulatedWorkerSettings, run

    try:
        given = _given(
            kv_events=kv_events and PublisherConfig.from_json(kv_events), disaggregation=disaggregation, role=role
        )
        settings = SimulatedWorkerSettings(
            host=host,
            port=port,
            model=model,
            adapters=tuple(adapter or ()),
            block_size=block_size,
            num_blocks=blocks,
            dp_size=dp_size,
            prefix_caching=prefix_caching,
            max_model_len=max_model_len,
            prefill_s_per_token=prefill_ms / 1000,
            base_step_s=step_ms / 1000,
            bootstrap_port=bootstrap_port,
            **given,
        )
        run(settings)
    except (ValueError, OSError) as error:
        _fail(str(error))


@app.command()
def record(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The recording to write, such as fleet.kvrec.")
    ] = None,
    stream: Annotated[
        list[str] | None,
        typer.Option(metavar="ENDPOINT[,REPLAY[,TOPIC]]", help="An event stream; repeatable."),
    ] = None,
    worker: Annotated[
        list[str] | None, typer.Option("--worker", "-w", help="URL of a worker, which is asked for its streams.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="End after so long; otherwise with Ctrl-C.")] = None,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record a router's requests instead: the trace to write.")
    ] = None,
    url: Annotated[str, typer.Option(help="The router to record, with --requests.")] = "http://127.0.0.1:8080",
    token: Annotated[str, typer.Option(envvar="KVROUTER_SERVER__TOKEN", help="The router's server.token.")] = "",
    block_tokens: Annotated[
        int, typer.Option(min=16, max=65_536, help="Tokens of a block of the trace; other tools want 512.")
    ] = 512,
) -> None:
    """Write live event streams to a file, or with --requests the requests that pass a router, until Ctrl-C.

    A trace of requests is in Mooncake's format. It holds lengths and numbers of equal prefixes, no text and no token.
    """
    if requests is not None:
        if output or stream or worker:
            _fail("--requests FILE is all that is recorded then: leave out --output, --stream and --worker")
        _record_requests(url, token, requests, seconds, block_tokens)
        return
    if output is None:
        _fail("give --output FILE for event streams, or --requests FILE for a router's requests")
    assert output is not None
    from kvrouter.tools.record import parse_stream, record_streams, summary_lines, worker_sources
    from router.fleet.discovery import DiscoveryError

    if bool(stream) == bool(worker):
        _fail("give either --stream or --worker")
    try:
        sources = [parse_stream(text, number) for number, text in enumerate(stream or ())]
        sources = sources or asyncio.run(worker_sources(worker or ()))
        typer.echo(f"recording {len(sources)} streams to {output}", err=True)
        streams = asyncio.run(record_streams(sources, output, seconds))
    except (ValueError, OSError, DiscoveryError) as error:
        _fail(str(error))
    for line in summary_lines(streams, output):
        typer.echo(line)


def _record_requests(url: str, token: str, output: Path, seconds: float | None, block_tokens: int) -> None:
    from kvrouter.signals import stop_signal
    from kvrouter.tools.traces.recording import RecordedRequests, RecordingError, record_requests

    async def record_until_stopped() -> RecordedRequests:
        with stop_signal() as stopped:

            def begun() -> None:
                typer.echo(f"recording the requests of {url} to {output}", err=True)
                if seconds is not None:
                    asyncio.get_running_loop().call_later(seconds, stopped.set)

            return await record_requests(url, token, output, block_tokens, stopped, begun)

    try:
        recorded = asyncio.run(record_until_stopped())
    except (RecordingError, OSError) as error:
        _fail(str(error))
    for line in recorded.summary(output):
        typer.echo(line)
    if recorded.broken_off:
        raise typer.Exit(1)


@app.command()
def replay(
    recordings: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The recording; --check takes several.")],
    speed: Annotated[float | None, typer.Option(min=1e-3, help="So many times faster than recorded.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="As fast as can be; always so with --check.")] = False,
    bind_host: Annotated[str, typer.Option(help="Address to publish on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the first source; 0 takes free ones.")] = 0,
    indexer: Annotated[str | None, typer.Option(help="URL of an indexer to register the streams with.")] = None,
    token: Annotated[str, typer.Option(envvar="KVROUTER_SERVER__TOKEN", help="The indexer's server.token.")] = "",
    model: Annotated[
        str | None, typer.Option(help="Name to register them under.", show_default="the requests'")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare an indexer with what the engine said.")] = False,
    requests: Annotated[
        Path | None, typer.Option(help="What the engine said.", show_default="FILE's .requests.jsonl(.gz)")
    ] = None,
    expect: Annotated[
        int | None, typer.Option(min=0, help="Right answers that are enough.", show_default="all")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what differs.")] = False,
) -> None:
    """Publish a recording as live event streams, or check an indexer with it.

    --check without --indexer checks this one's own. The exit status is 0 when enough answers are right and none is a
    ghost: a match of what the engine never stored since it started.
    """
    from kvrouter.processes import KvrouterProcess, ProcessError
    from kvrouter.tools.replay.index_client import IndexerError
    from kvrouter.tools.replay.run import IndexerAddress, Place, check_recordings, publish_recording

    if not check and (len(recordings) > 1 or requests or expect is not None or verbose):
        _fail("several files, --requests, --expect and --verbose are for --check")
    if len(recordings) > 1 and requests:
        _fail("--requests is for a single file")
    if fast and speed is not None:
        _fail("give either --speed or --fast")
    if (check or indexer) and bind_host in ("*", "0.0.0.0", "::"):
        _fail("--bind-host: name the address at which the indexer can reach the streams")
    place = Place(bind_host, port)
    try:
        with ExitStack() as stack:
            if not check:
                to = IndexerAddress(indexer, token) if indexer else None
                asyncio.run(publish_recording(recordings[0], place, None if fast else speed or 1.0, to, model))
                return
            if indexer is None:
                own = stack.enter_context(KvrouterProcess(["indexer", "--port", "0", "--log-level", "warning"]))
                indexer = own.wait_until_listening()
            address = IndexerAddress(indexer, token)
            scores = asyncio.run(check_recordings(recordings, requests, place, speed, address, model, verbose))
    except (ValueError, OSError, IndexerError, ProcessError) as error:
        _fail(str(error))
    right, asked = sum(score.right for score in scores), sum(score.requests for score in scores)
    if right < (asked if expect is None else expect) or any(score.ghosts for score in scores):
        raise typer.Exit(1)


@app.command("replay-trace")
def replay_trace(
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's format, .gz or not.")],
    simulate: Annotated[bool, typer.Option("--simulate", help="In a simulated fleet; so without --url.")] = False,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]URL", help="A router to send it to; repeatable, one after the other."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Simulation: a policy; repeatable.  [default: kv_aware and its peers]")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Simulation: engines.")] = 8,
    engine: Annotated[str, typer.Option(help="Simulation: 70b (on 8 H100) or 8b (on one).")] = "70b",
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Simulation: tokens of each engine's cache.  [default: the engine's]")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-3, help="So many times faster than recorded.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests.")] = None,
    model: Annotated[str | None, typer.Option(help="Live: the model.  [default: the only one there is]")] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Live: the routers' API key.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Live: answers are at most so long.")] = 2048,
    seed: Annotated[
        str | None, typer.Option(help="Live: the same prompts as another replay.  [default: new ones]")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The report to write.")] = Path("report.html"),
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Replay a trace of requests under several policies in simulation, or against routers, and write a report."""
    from kvrouter.tools.traces.live import ReplayError
    from kvrouter.tools.traces.run import live_targets, open_trace, replay_simulated, replay_to, write_report
    from kvrouter.tools.traces.simulated import DEFAULT_POLICIES, ENGINES, SimulatedFleet, side_named

    if simulate and url:
        _fail("give either --simulate or --url")
    if url and policy:
        _fail("--policy is for the simulation: a router's policy is its own")
    if engine not in ENGINES:
        _fail(f"--engine {engine}: there are {', '.join(ENGINES)}")
    try:
        sides = [side_named(name) for name in dict.fromkeys(policy or DEFAULT_POLICIES)]
        targets = live_targets(url or (), model, api_key, speed, max_tokens, seed)
        opened = open_trace(trace, limit)
        for file in (output, as_json):
            if file is not None and not (file.parent.is_dir() and not file.is_dir()):
                _fail(f"{file} cannot be written: there is no such folder, or it is one")  # now, not after the replay
    except (ValueError, OSError) as error:
        _fail(str(error))
    try:
        if targets:
            report = replay_to(trace, opened, targets, speed)
        else:
            profile = ENGINES[engine]
            fleet = SimulatedFleet(profile, workers, kv_tokens or profile.kv_tokens)
            report = replay_simulated(trace, opened, sides, fleet, speed)
        write_report(report, output, as_json)
    except (ReplayError, OSError) as error:
        _fail(str(error))


@app.command()
def doctor(
    config: ConfigFile = None,
    worker: Annotated[list[str] | None, typer.Option("--worker", "-w", help="URL of a worker; repeatable.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The workers' API key.")] = None,
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds that events may take to come.")] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find out why hits are zero or low, by connecting to the workers as the router would.

    Sends a few short requests to each worker. The exit status is 0 when nothing is wrong, 1 when something is, and 2
    when nothing could be examined.
    """
    from kvrouter.tools.doctor import run_doctor
    from router.server.logs import log_to_stderr

    settings = _settings(config, {"workers": [{"url": url} for url in worker]} if worker else {})
    if not settings.workers:
        _fail("no workers: name them under workers: in the settings file, or with --worker URL", status=2)
    log_to_stderr(Level.ERROR)
    if not asyncio.run(run_doctor(settings, api_key, patience, as_json)):
        raise typer.Exit(1)


@app.command()
def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the keys.")],
    name: Annotated[str, typer.Option(help="What the files are called.")] = "kvrouter",
) -> None:
    """Write a CURVE key pair: NAME.key to give away, NAME.key_secret to keep."""
    from kvevents.curve import create_key_pair

    try:
        public, secret = create_key_pair(folder, name)
    except OSError as error:
        _fail(str(error))
    typer.echo(f"public key: {public}\nsecret key: {secret}")


@app.command()
def demo(
    workers: Annotated[int, typer.Option(min=1, help="Simulated workers.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations to play, each of several requests.")] = 48,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the router up at the end.")] = False,
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Instead: prefill and decode workers, one of which is killed.")
    ] = False,
) -> None:
    """Compare kv-aware routing with round robin on simulated workers.

    --disaggregated plays the conversations on 2 prefill and 2 decode workers, SGLang's way and vLLM's with NIXL, and
    kills a prefill worker. The exit status is 0 when no request is lost.
    """
    from kvrouter.tools.demo import run_demo
    from kvrouter.tools.demo.run import DemoError

    try:
        if disaggregated:
            from kvrouter.tools.demo.disaggregated import run_disaggregated_demo

            if not run_disaggregated_demo(conversations):
                raise typer.Exit(1)
            return
        run_demo(workers, conversations, keep)
    except DemoError as error:
        _fail(str(error))


def _prompted(prompt: str, model: str, chat: bool) -> dict[str, Any]:
    """The body of a request with this prompt; - is standard input."""
    text = sys.stdin.read() if prompt == "-" else prompt
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return {"model": model, **asked}


def _settings(config: Path | None, overrides: dict[str, Any]) -> Any:
    from router.settings import ConfigError, load_settings

    try:
        return load_settings(config, overrides)
    except ConfigError as error:
        _fail(str(error))


def _run(service: Any, log_level: str) -> None:
    import uvloop

    from router.errors import KubernetesError, TokenizerUnavailableError
    from router.server.logs import log_to_stderr
    from router.server.serving import raise_file_limit

    log_to_stderr(log_level)
    raise_file_limit()
    try:
        uvloop.run(service)
    except (OSError, TokenizerUnavailableError, KubernetesError) as error:
        _fail(str(error))


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given: not None, and not an empty section."""
    return {name: value for name, value in options.items() if value is not None and value != {}}


def _fail(message: str, status: int = 1) -> Any:
    typer.echo(f"kvrouter: {message}", err=True)
    raise typer.Exit(status)
