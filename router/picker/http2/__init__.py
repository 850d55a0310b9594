"""The part of HTTP/2 that a gRPC server needs: callbacks on one event loop, without a task or a queue for a request.

- `frames`: the bytes of frames (RFC 9113, section 6).
- `headers`: header blocks (RFC 7541). Equal blocks are decoded once.
- `allowance`: token buckets for frames without progress, per connection and per peer address.
- `stream`: streams with their handlers and queues, and the sender of frames.
- `connection`: one connection with its frames, settings, windows and limits.
"""
