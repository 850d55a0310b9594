"""The command `python -m benchmarks.service_levels`:

SLOs that a real router meets, at shares of the fleet's capacity.

The router runs with and without knowing the SLOs.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated
from urllib.request import urlopen

import typer
import yaml

from benchmarks.service_levels.load import CLASSES, Answer, Telling, arrivals, capacity, refusing
from kvrouter.processes import KvrouterProcess

# Slow enough for two cores to run the engines, the router and the clients.
_WORKER = ["simulate", "--port", "0", "--step-ms", "40", "--prefill-ms", "0.3"]
_CLIENTS_A_WORKER = 24


def main(
    workers: Annotated[int, typer.Option(min=2, help="Number of simulated workers.")] = 4,
    seconds: Annotated[float, typer.Option(min=5, help="Seconds of a run.")] = 60.0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs at each load.")] = 1,
) -> None:
    """Measure the share of met SLOs by class, at 0.8 and 1.1 of capacity."""
    with ExitStack() as stack:
        fleet = [stack.enter_context(KvrouterProcess(_WORKER)) for _ in range(workers)]
        urls = [worker.wait_until_listening() for worker in fleet]
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.yaml"
        config.write_text(yaml.safe_dump({"workers": [{"url": url} for url in urls], "service_levels": _levels()}))
        router = stack.enter_context(KvrouterProcess(["serve", "--config", str(config), "--port", "0"]))
        url = router.wait_until_listening()
        most = asyncio.run(capacity(url, _CLIENTS_A_WORKER * workers, seconds / 2))
        typer.echo(f"{workers} workers answer {most:.1f} requests a second.\n")
        typer.echo("| share met | all | " + " | ".join(each.name for each in CLASSES) + " | refused |")
        typer.echo("|---|---:|" + "---:|" * len(CLASSES) + "---:|")
        for load in (0.8, 1.1):
            for telling in Telling:
                answers: list[Answer] = []
                for seed in range(seeds):
                    answers += asyncio.run(arrivals(url, load * most, seconds, telling, seed))
                cells = [_share([answer.in_time for answer in answers])]
                cells += [_share([answer.in_time for answer in answers if answer.asked is each]) for each in CLASSES]
                cells += [_share([answer.refused for answer in answers])]
                typer.echo(f"| {load:g} of capacity, {telling} | {' | '.join(cells)} |")
        typer.echo("\n" + _metrics(url))


def _levels() -> dict[str, dict[str, float | str]]:
    """Return the service levels of the settings: each class, and each class with refusal of late requests."""
    levels: dict[str, dict[str, float | str]] = {}
    for each in CLASSES:
        slo: dict[str, float | str] = {"ttft": each.ttft, "tpot": each.tpot}
        levels |= {each.name: slo, refusing(each.name): slo | {"when_late": "refuse"}}
    return levels


def _share(flags: list[bool]) -> str:
    return f"{sum(flags) / max(len(flags), 1):.3f}"


def _metrics(url: str) -> str:
    """Return the router's own metrics of its SLOs."""
    with urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return "\n".join(
        line for line in lines if line.startswith(("kvrouter_slo_answers_total", "kvrouter_ttft_calibration"))
    )


typer.run(main)
