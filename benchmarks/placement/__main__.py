"""The command `python -m benchmarks.placement`. It measures the interpreted router, and the compiled one if built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from benchmarks.placement.measure import Measured
from benchmarks.policy.report import markdown

_ROOT = Path(__file__).parents[2]
_COMPILED = _ROOT / ".compiled"


def main() -> None:
    """Print a table for each build."""
    builds = {"interpreted": (sys.executable, _ROOT)}
    if (_COMPILED / "tests").exists():
        builds["compiled"] = (str(_COMPILED / "bin" / "python"), _COMPILED)
    for build, (python, folder) in builds.items():
        command = [python, "-m", "benchmarks.placement.measure"]
        measured = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True).stdout
        print(f"\n{_table(build, msgspec.json.decode(measured, type=list[Measured]))}", flush=True)


def _table(build: str, fleets: list[Measured]) -> str:
    columns = "by columns", "by candidates", "nothing shared", "the index alone", "the choice for an SLO met nowhere"
    rows = [[f"a placement, µs, {build}", "hold its start", *columns]]
    for fleet in fleets:
        figures = fleet.columns, fleet.candidates, fleet.nothing_shared, fleet.index_alone, fleet.kept_nowhere
        rows.append([f"{fleet.targets} targets", str(fleet.holders), *(f"{each:.1f}" for each in figures)])
    return markdown(rows)


if __name__ == "__main__":
    main()
