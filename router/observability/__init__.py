"""Metrics, traces, the access log, and the data of the live page.

- `metrics`, `counters`, `prediction_metrics`: metrics for Prometheus.
- `spans`, `otel`: OpenTelemetry spans of requests.
- `access_log`: one log line per request.
- `fleet_snapshot`, `seen_requests`: the data of the live page and `kvrouter top`.
- `fleet_report`: the router's identity and models, and the findings for operators.
- `request_recorder`: requests as a trace, for recordings.
"""
