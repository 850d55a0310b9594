"""Metrics, traces, the access log, recordings of requests, and the data of the live page."""
