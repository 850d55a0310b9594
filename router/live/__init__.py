"""The fleet as it is now, for the live page and `kvrouter top`: collected once a second while somebody looks.

And the requests that pass, for those who record them.
"""

from router.live.fleet_snapshot import FleetSnapshot
from router.live.request_stream import RequestStream

__all__ = ["FleetSnapshot", "RequestStream"]
