"""The fleet as it is now, for the live page and `kvrouter top`: collected once a second while somebody looks.

And the requests that pass, for whoever records them.
"""

from router.live.board import Board
from router.live.request_stream import RequestStream
from router.live.routes import live_routes

__all__ = ["Board", "RequestStream", "live_routes"]
