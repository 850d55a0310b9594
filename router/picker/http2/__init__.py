"""HTTP/2 as a gRPC server needs it: callbacks on one event loop, no task and no queue for a request.

frames      what frames are made of (RFC 9113, section 6)
headers     header blocks (RFC 7541), decoded once where they repeat
allowance   how much a peer may ask without getting on with anything
sender      what is sent, as the peer's windows allow
stream      one stream: its handler, and what of it waits
connection  one connection: frames, settings, windows, limits, and its end
"""
