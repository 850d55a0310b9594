"""`kvrouter top`: the fleet on one screen of a terminal, updated continuously."""

from kvrouter.tools.top.screen import run_top

__all__ = ["run_top"]
