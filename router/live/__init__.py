"""The fleet as it is now, for the live page and `kvrouter top`: collected once a second while somebody looks."""

from router.live.board import Board
from router.live.routes import live_routes

__all__ = ["Board", "live_routes"]
