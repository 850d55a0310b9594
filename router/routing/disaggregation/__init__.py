"""Prefill and decode on different workers: the selection of both, and the requests that each engine requires."""
