"""Run one simulated worker with settings from a JSON object: python -m simulator.worker '{"port": 8000}'."""

import sys
from dataclasses import fields

import msgspec

from simulator.worker import SimulatedWorkerSettings

if __name__ == "__main__":
    try:
        given = msgspec.json.decode(sys.argv[1] if len(sys.argv) > 1 else "{}", type=dict)
        unknown = given.keys() - {field.name for field in fields(SimulatedWorkerSettings)}
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        settings = msgspec.convert(given, SimulatedWorkerSettings)
    except ValueError as error:
        sys.exit(f"settings: {error}")
    try:
        from simulator.worker.serve import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("worker"):
            raise
        sys.exit(f"simulated worker: the package {error.name!r} is missing: pip install 'kvrouter[router]'")
    run(settings)
