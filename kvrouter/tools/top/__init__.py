"""`kvrouter top`: the fleet on one screen of a terminal, updating."""

from kvrouter.tools.top.run import run_top

__all__ = ["run_top"]
