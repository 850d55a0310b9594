"""`kvrouter demo`: the same workload through the router and round robin, side by side, on simulated workers."""

from kvrouter.tools.demo.run import run_demo

__all__ = ["run_demo"]
