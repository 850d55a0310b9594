"""The command `python -m benchmarks.selection`.

- `--dynamo`: the Python of an environment with ai-dynamo-runtime.
- `--rounds`: the runs of each side, of which the median is shown (3).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.policy.report import markdown

_ROOT = Path(__file__).parents[2]
TARGETS = (8, 64, 1024)
SIDES = {"library": "library", "class": "Dynamo's class over it", "dynamo": "Dynamo"}


def main() -> None:
    """Print a row for each side and number of targets: the median of several rounds, in which the sides alternate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dynamo", default=str(_ROOT / ".bench/dynamo/bin/python"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    dynamo = arguments.dynamo
    rows = [["targets", "side", "choices/s", "beside Dynamo", "CPU, µs", "alone: p50, µs", "p99, µs", "cached"]]
    for targets in TARGETS:
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(arguments.rounds):
            for side, found in runs.items():
                found.append(_measured(dynamo if side == "dynamo" else sys.executable, side, targets))
        peer = median(run["rate"] for run in runs["dynamo"])
        for side, name in SIDES.items():
            rate, cpu, cached = (median(run[figure] for run in runs[side]) for figure in ("rate", "cpu", "cached"))
            p50 = median(median(run["seconds"]) for run in runs[side])
            p99 = median(quantiles(run["seconds"], n=100)[98] for run in runs[side])
            times = [f"{1e6 * seconds:.0f}" for seconds in (cpu, p50, p99)]
            rows.append([f"{targets:,}", name, f"{rate:,.0f}", f"{rate / peer:.2f}", *times, f"{cached:.0%}"])
    print(markdown(rows))


def _measured(python: str, side: str, targets: int) -> dict[str, Any]:
    command = [python, str(_ROOT / "benchmarks/selection/drive.py"), side, str(targets)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "DYN_LOG": "error"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
