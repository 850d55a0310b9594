"""Proxied requests: each is sent to a worker and its response forwarded, whether a connection or Envoy received it."""
