"""A worker without a GPU: a real prefix cache, scheduler, event stream and OpenAI API, but random words."""

from simulator.worker.settings import SimulatedWorkerSettings

__all__ = ["SimulatedWorkerSettings"]
