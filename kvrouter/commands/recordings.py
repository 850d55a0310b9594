"""Commands that record event streams and requests, and replay them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from kvrouter.commands.options import AdminToken, fail


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
    token: AdminToken = "",
    block_tokens: Annotated[
        int, typer.Option(min=16, max=65_536, help="Tokens of a block of the trace; other tools want 512.")
    ] = 512,
) -> None:
    """Write live event streams to a file, or with --requests the requests that pass a router, until Ctrl-C.

    A trace of requests is in Mooncake's format. It holds lengths and numbers of equal prefixes, no text and no token.
    """
    if requests is not None:
        if output or stream or worker:
            fail("--requests FILE is all that is recorded then: leave out --output, --stream and --worker")
        _record_requests(url, token, requests, seconds, block_tokens)
        return
    if output is None:
        fail("give --output FILE for event streams, or --requests FILE for a router's requests")
    from kvrouter.tools.record import parse_stream, record_streams, summary_lines, worker_sources
    from router.fleet.discovery import DiscoveryError

    if bool(stream) == bool(worker):
        fail("give either --stream or --worker")
    try:
        sources = [parse_stream(text, number) for number, text in enumerate(stream or ())]
        sources = sources or asyncio.run(worker_sources(worker or ()))
        typer.echo(f"recording {len(sources)} streams to {output}", err=True)
        streams = asyncio.run(record_streams(sources, output, seconds))
    except (ValueError, OSError, DiscoveryError) as error:
        fail(str(error))
    for line in summary_lines(streams, output):
        typer.echo(line)


def _record_requests(url: str, token: str, output: Path, seconds: float | None, block_tokens: int) -> None:
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
        fail(str(error))
    for line in recorded.summary(output):
        typer.echo(line)
    if recorded.broken_off:
        raise typer.Exit(1)


def replay(
    recordings: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The recording; --check takes several.")],
    speed: Annotated[float | None, typer.Option(min=1e-3, help="How many times faster than recorded.")] = None,
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
        fail("several files, --requests, --expect and --verbose are for --check")
    if len(recordings) > 1 and requests:
        fail("--requests is for a single file")
    if fast and speed is not None:
        fail("give either --speed or --fast")
    if (check or indexer) and bind_host in ("*", "0.0.0.0", "::"):
        fail("--bind-host: name the address at which the indexer can reach the streams")
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
        fail(str(error))
    right, asked = sum(score.right for score in scores), sum(score.requests for score in scores)
    if right < (asked if expect is None else expect) or any(score.ghosts for score in scores):
        raise typer.Exit(1)


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
    speed: Annotated[float, typer.Option(min=1e-3, help="How many times faster than recorded.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests, this many.")] = None,
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
    from kvrouter.tools.traces.run import (
        DEFAULT_POLICIES,
        ENGINES,
        SimulatedFleet,
        live_targets,
        open_trace,
        replay_simulated,
        replay_to,
        side_named,
        write_report,
    )

    if simulate and url:
        fail("give either --simulate or --url")
    if url and policy:
        fail("--policy is for the simulation: a router's policy is its own")
    if engine not in ENGINES:
        fail(f"--engine {engine}: there are {', '.join(ENGINES)}")
    try:
        sides = [side_named(name) for name in dict.fromkeys(policy or DEFAULT_POLICIES)]
        targets = live_targets(url or (), model, api_key, speed, max_tokens, seed)
        opened = open_trace(trace, limit)
        for file in (output, as_json):
            if file is not None and not (file.parent.is_dir() and not file.is_dir()):
                fail(f"{file} cannot be written: there is no such folder, or it is one")  # now, not after the replay
    except (ValueError, OSError) as error:
        fail(str(error))
    try:
        if targets:
            report = replay_to(trace, opened, targets, speed)
        else:
            profile = ENGINES[engine]
            fleet = SimulatedFleet(profile, workers, kv_tokens or profile.kv_tokens)
            report = replay_simulated(trace, opened, sides, fleet, speed)
        write_report(report, output, as_json)
    except (ReplayError, OSError) as error:
        fail(str(error))
