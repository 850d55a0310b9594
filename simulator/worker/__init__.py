"""A worker without a GPU: a real prefix cache, scheduler, event stream and OpenAI API, with made-up words."""

from simulator.worker.settings import SimulatedWorkerSettings

__all__ = ["SimulatedWorkerSettings"]
