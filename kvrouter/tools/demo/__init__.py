"""`kvrouter demo`: one workload, routed by KV cache and by round robin on simulated workers."""

from kvrouter.tools.demo.run import run_demo

__all__ = ["run_demo"]
