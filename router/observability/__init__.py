"""Metrics, traces, the access log, and the data of the live page.

metrics, counters, prediction_metrics   figures for Prometheus
spans, otel, tracing                    OpenTelemetry spans of a request
access_log                              one log line per request
fleet_snapshot, series, hot_prefixes,
seen_requests, about                    what the live page and `kvrouter top` show
request_recorder, other_processes       requests as a trace, for recordings
findings                                problems of the fleet, for operators
"""
