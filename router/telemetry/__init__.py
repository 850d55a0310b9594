"""Metrics, traces, logs and request ids."""
