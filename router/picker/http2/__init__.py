"""The part of HTTP/2 that a gRPC server needs: callbacks on one event loop, without a task or a queue for a request."""
