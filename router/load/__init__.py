"""Requests and tokens in flight on each target: this router's own, and those of other routers."""
