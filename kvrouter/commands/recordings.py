"""Commands that record event streams and requests, and replay them."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from kvrouter.commands.options import POLICIES, ROUTER_URL, AsJson, RouterToken, RouterUrl, fail


def record(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The recording to write, for example fleet.kvrec.")
    ] = None,
    stream: Annotated[
        list[str] | None,
        typer.Option(metavar="ENDPOINT[,REPLAY[,TOPIC]]", help="An event stream; repeatable."),
    ] = None,
    worker: Annotated[
        list[str] | None, typer.Option("--worker", "-w", help="URL of a worker that reports its streams; repeatable.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Seconds to record; by default until Ctrl-C.")] = None,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record a router's requests to this trace instead.")
    ] = None,
    url: RouterUrl = ROUTER_URL,
    token: RouterToken = "",
    block_tokens: Annotated[
        int, typer.Option(min=16, max=65_536, help="Tokens of a block in the trace; other tools expect 512.")
    ] = 512,
    as_json: AsJson = False,
) -> None:
    """Record live event streams, or with --requests the requests of a router, until Ctrl-C.

    A trace of requests has Mooncake's format. It contains lengths and numbers of equal prefixes, but no text and no
    tokens.
    """
    if requests is not None:
        if output or stream or worker:
            fail("--requests records requests only: omit --output, --stream and --worker")
        _record_requests(url, token, requests, seconds, block_tokens, as_json)
        return
    if output is None:
        fail("set --output FILE for event streams, or --requests FILE for a router's requests")
    from kvrouter.tools.record import parse_stream, record_streams, summary_lines, worker_sources
    from router.fleet.discovery import DiscoveryError

    if bool(stream) == bool(worker):
        fail("set either --stream or --worker")
    try:
        sources = [parse_stream(text, number) for number, text in enumerate(stream or ())]
        sources = sources or asyncio.run(worker_sources(worker or ()))
        typer.echo(f"recording {len(sources)} streams to {output}", err=True)
        streams = asyncio.run(record_streams(sources, output, seconds))
    except (ValueError, OSError, DiscoveryError) as error:
        fail(error)
    lines = [json.dumps([stream.as_json() for stream in streams])] if as_json else summary_lines(streams, output)
    for line in lines:
        typer.echo(line)


def _record_requests(
    url: str, token: str, output: Path, seconds: float | None, block_tokens: int, as_json: bool
) -> None:
    from kvrouter.processes import stop_signal
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
        fail(error)
    lines = [json.dumps(recorded.as_json(output))] if as_json else recorded.summary(output)
    for line in lines:
        typer.echo(line)
    if recorded.broken_off:
        raise typer.Exit(1)


def replay(
    recordings: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The recording; several with --check.")],
    speed: Annotated[float | None, typer.Option(min=1e-3, help="Factor of the recorded speed.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Publish without delays; the default of --check.")] = False,
    bind_host: Annotated[str, typer.Option(help="Address to publish on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first source; 0 binds free ones.")] = 0,
    indexer: Annotated[str | None, typer.Option(help="URL of an indexer to register the streams with.")] = None,
    token: RouterToken = "",
    model: Annotated[
        str | None, typer.Option(help="Model name for the registration.", show_default="the requests'")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare an indexer's matches with the engine's.")] = False,
    requests: Annotated[
        Path | None,
        typer.Option(help="The requests that the engine answered.", show_default="FILE's .requests.jsonl(.gz)"),
    ] = None,
    expect: Annotated[
        int | None, typer.Option(min=0, help="Number of right answers that suffices.", show_default="all")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show differing answers.")] = False,
) -> None:
    """Publish a recording as live event streams, or check an indexer with it.

    --check without --indexer checks a new indexer of this installation. The exit status is 0 if enough answers are
    right and none is a ghost. A ghost is a match that the engine has not stored since its start.
    """
    from kvrouter.processes import KvrouterProcess, ProcessError
    from kvrouter.tools.replay.check import IndexerError
    from kvrouter.tools.replay.run import IndexerAddress, Place, check_recordings, publish_recording

    if not check and (len(recordings) > 1 or requests or expect is not None or verbose):
        fail("several files, --requests, --expect and --verbose need --check")
    if len(recordings) > 1 and requests:
        fail("--requests needs a single file")
    if fast and speed is not None:
        fail("set either --speed or --fast")
    if (check or indexer) and bind_host in ("*", "0.0.0.0", "::"):
        fail("--bind-host: set an address at which the indexer reaches the streams")
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
        fail(error)
    right, asked = sum(score.right for score in scores), sum(score.requests for score in scores)
    if right < (asked if expect is None else expect) or any(score.ghosts for score in scores):
        raise typer.Exit(1)


def replay_trace(
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's format, plain or .gz.")],
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Use a simulated fleet; the default without --url.")
    ] = False,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="[LABEL=]URL", help="A router that receives the trace; repeatable, one after another."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Simulation: a policy, or one's own; repeatable: {POLICIES}.  [default: kv_aware and its peers]"
        ),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Simulation: kv_aware with a scorer; repeatable."),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE,…", help="Simulation: labels of the engines in turn; repeatable."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Simulation: number of engines.")] = 8,
    engine: Annotated[str, typer.Option(help="Simulation: 70b (on 8 H100) or 8b (on one H100).")] = "70b",
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="Simulation: tokens of each engine's cache.  [default: the engine's]")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-3, help="Factor of the recorded speed.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of requests to replay.  [default: all]")] = None,
    model: Annotated[str | None, typer.Option(help="Live: name of the model.  [default: the only one served]")] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Live: the routers' API key.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Live: longest answer in tokens.")] = 2048,
    seed: Annotated[
        str | None, typer.Option(help="Live: seed of an earlier replay, for equal prompts.  [default: new]")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The report to write.")] = Path("report.html"),
    as_json: Annotated[Path | None, typer.Option("--json", help="File for the results as JSON.")] = None,
) -> None:
    """Replay a trace of requests in simulation or against routers, and write a report."""
    from kvrouter.tools.traces.live import ReplayError
    from kvrouter.tools.traces.run import (
        DEFAULT_POLICIES,
        ENGINES,
        labels_from,
        live_targets,
        open_trace,
        replay_simulated,
        replay_to,
        sides_named,
        write_report,
    )
    from simulator.fleet.fleet import FleetSpec

    if simulate and url:
        fail("set either --simulate or --url")
    if url and (policy or extra):
        fail("--policy and --extra need --simulate: a router uses its own policy")
    if engine not in ENGINES:
        fail(f"--engine {engine}: known engines are {', '.join(ENGINES)}")
    try:
        sides = sides_named(policy or DEFAULT_POLICIES, extra or ())
        engine_labels = labels_from(labels or ())
        targets = live_targets(url or (), model, api_key, speed, max_tokens, seed)
        opened = open_trace(trace, limit)
        for file in (output, as_json):
            if file is not None and not (file.parent.is_dir() and not file.is_dir()):
                # checked before the long replay
                fail(f"{file} cannot be written: its folder is missing, or it is a folder")
    except (ValueError, OSError) as error:
        fail(error)
    try:
        if targets:
            report = replay_to(trace, opened, targets, speed)
        else:
            profile = ENGINES[engine]
            cache = kv_tokens or profile.kv_tokens
            fleet = FleetSpec(profile, workers, cache, opened.block_tokens, labels=engine_labels)
            report = replay_simulated(trace, opened, sides, fleet, speed)
        write_report(report, output, as_json)
    except (ReplayError, OSError) as error:
        fail(error)


def size(
    trace: Annotated[Path, typer.Option(help="A trace in Mooncake's format, plain or .gz.")],
    ttft: Annotated[float, typer.Option(min=1e-3, help="Goal: seconds to the first token.")] = 2.0,
    tpot: Annotated[float, typer.Option(min=1e-4, help="Goal: seconds for each token after it.")] = 0.05,
    share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the answers within both goals.")] = 0.9,
    most: Annotated[int, typer.Option(min=1, max=1024, help="Largest number of workers to try.")] = 64,
    engine: Annotated[str, typer.Option(help="70b (on 8 H100) or 8b (on one H100).")] = "70b",
    speed: Annotated[float, typer.Option(min=1e-3, help="Factor of the recorded speed.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of requests to use.  [default: all]")] = None,
) -> None:
    """Show how many workers of each role a trace needs, by simulation.

    Every tried fleet is a line. The exit status is 1 if no fleet of at most --most workers is enough.
    """
    from kvrouter.tools.traces.run import ENGINES, open_trace
    from kvrouter.tools.traces.size import Goals, Sized, Sizing
    from simulator.fleet.trace import requests_of

    if engine not in ENGINES:
        fail(f"--engine {engine}: known engines are {', '.join(ENGINES)}")
    try:
        opened = open_trace(trace, limit)
    except (ValueError, OSError) as error:
        fail(error)

    def show(tried: Sized) -> None:
        times = f"TTFT p90 {tried.ttft:.2f} s, TPOT p90 {1000 * tried.tpot:.0f} ms"
        typer.echo(f"{tried.in_words}: {tried.met:.1%} within both goals, {times}")

    requests = requests_of(opened.lines, speed, opened.block_tokens)
    found = Sizing(requests, ENGINES[engine], Goals(ttft, tpot, share), opened.block_tokens, show).smallest(most)
    if found is None:
        fail(f"No fleet of at most {most} workers serves {share:.0%} of the answers within both goals.")
    typer.echo(f"Smallest fleet: {found.in_words}.")
