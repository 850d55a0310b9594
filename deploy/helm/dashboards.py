"""Writes the chart's Grafana dashboards: `python deploy/helm/dashboards.py`.

A panel is a title, a unit of Grafana, and its queries with their legends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "kvrouter" / "dashboards"

_FEW = '{model=~"$model"}'
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Panel:
    """A graph over time: each query with the legend of its series."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"histogram_quantile({quantile}, sum by (le) (rate({metric}_bucket{_FEW}[$__rate_interval])))",
            f"p{round(quantile * 100)}",
        )
        for quantile in (0.5, 0.9, 0.99)
    )


def _share(part: str, whole: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({part}{_FEW}[$__rate_interval])) / sum{grouped} (rate({whole}{_FEW}[$__rate_interval]))"


DASHBOARDS: dict[str, tuple[str, dict[str, list[Panel]]]] = {
    "router": (
        "kvrouter: requests",
        {
            "What clients see": [
                Panel(
                    "Requests",
                    "reqps",
                    ((f"sum by (status) (rate(kvrouter_requests_total{_FEW}[$__rate_interval]))", "{{status}}"),),
                ),
                Panel("Time to first byte", "s", _quantiles("kvrouter_time_to_first_byte_seconds")),
                Panel("Time per output token", "s", _quantiles("kvrouter_time_per_output_token_seconds")),
                Panel(
                    "Refused, broken, abandoned, retried",
                    "reqps",
                    (
                        (
                            "sum by (status) (rate(kvrouter_requests_refused_total[$__rate_interval]))",
                            "refused {{status}}",
                        ),
                        ("sum(rate(kvrouter_answers_broken_total[$__rate_interval]))", "broken"),
                        ("sum(rate(kvrouter_requests_abandoned_total[$__rate_interval]))", "abandoned"),
                        ("sum(rate(kvrouter_requests_retried_total[$__rate_interval]))", "retried"),
                    ),
                ),
                Panel(
                    "Requests of tenants",
                    "reqps",
                    (
                        (
                            "sum by (tenant, status) (rate(kvrouter_tenant_requests_total[$__rate_interval]))",
                            "{{tenant}} {{status}}",
                        ),
                    ),
                ),
            ],
            "What routing does": [
                Panel(
                    "Prompt tokens from cache",
                    "percentunit",
                    (
                        (_share("kvrouter_overlap_tokens_total", "kvrouter_prompt_tokens_total"), "chosen worker"),
                        (_share("kvrouter_best_overlap_tokens_total", "kvrouter_prompt_tokens_total"), "best worker"),
                        (
                            _share("kvrouter_audit_cached_tokens_total", "kvrouter_audit_prompt_tokens_total"),
                            "as engines told",
                        ),
                    ),
                    "Between the first two: what balance costs. Between the first and the last: what is mistaken.",
                ),
                Panel(
                    "Cost of a decision, by term",
                    "short",
                    (
                        (
                            f"sum by (term, unit) (rate(kvrouter_decision_cost_total{_FEW}[$__rate_interval]))"
                            " / on () group_left "
                            f"sum(rate(kvrouter_decisions_total{_FEW}[$__rate_interval]))",
                            "{{term}}, {{unit}}",
                        ),
                    ),
                    "In the unit that the legend names: prefill tokens, or seconds where workers are unlike.",
                ),
                Panel("Time in the router", "s", _quantiles("kvrouter_queue_seconds")),
                Panel(
                    "Predicted wrong",
                    "percentunit",
                    (
                        (f"max by (worker) (kvrouter_audit_error_ratio{_FEW})", "{{worker}}"),
                        (f"max by (worker) (kvrouter_audit_drift_ratio{_FEW})", "{{worker}} by events"),
                    ),
                ),
                Panel(
                    "Tokens of answers that told their cached ones",
                    "short",
                    tuple(
                        (f"sum(rate(kvrouter_audit_{what}_tokens_total{_FEW}[$__rate_interval]))", what)
                        for what in ("prompt", "predicted", "cached", "wrong")
                    ),
                    "For each second.",
                ),
                Panel(
                    "How prompts become tokens",
                    "short",
                    ((f"max by (model, way) (kvrouter_tokenizer{_FEW}) == 1", "{{model}}: {{way}}"),),
                ),
                Panel(
                    "Memory of texts seen before",
                    "bytes",
                    ((f"sum by (model) (kvrouter_tokenizer_cache_bytes{_FEW})", "{{model}}"),),
                ),
            ],
            "Waiting": [
                Panel(
                    "Requests that wait",
                    "short",
                    (("sum by (priority) (kvrouter_admission_queue_length)", "priority {{priority}}"),),
                ),
                Panel("Bytes that wait", "bytes", (("sum(kvrouter_admission_queue_bytes)", "bodies"),)),
                Panel(
                    "How long",
                    "s",
                    (
                        (
                            "histogram_quantile(0.9, sum by (le) "
                            "(rate(kvrouter_admission_wait_seconds_bucket[$__rate_interval])))",
                            "p90",
                        ),
                    ),
                ),
                Panel(
                    "Refused",
                    "reqps",
                    (
                        (
                            "sum by (reason) (rate(kvrouter_admission_refused_total[$__rate_interval]))",
                            "{{reason}}",
                        ),
                    ),
                ),
            ],
            "Workers": [
                Panel(
                    "Requests in flight",
                    "short",
                    (
                        ("sum by (worker, dp_rank) (kvrouter_requests_in_flight)", "{{worker}} {{dp_rank}}"),
                        (
                            "max by (worker, dp_rank) (kvrouter_requests_of_others) > 0",
                            "{{worker}} {{dp_rank}} of others",
                        ),
                    ),
                ),
                Panel(
                    "Uncached tokens waiting for prefill",
                    "short",
                    (("sum by (worker, dp_rank) (kvrouter_prefill_tokens_in_flight)", "{{worker}} {{dp_rank}}"),),
                ),
                Panel(
                    "KV memory in use",
                    "percentunit",
                    (("max by (worker, dp_rank) (kvrouter_kv_usage_ratio)", "{{worker}} {{dp_rank}}"),),
                ),
                Panel(
                    "Routers that share their load",
                    "short",
                    (
                        ("max by (pod, instance) (kvrouter_sharing_routers)", "{{pod}} {{instance}} hears of"),
                        ("min by (pod, instance) (kvrouter_sharing_up)", "{{pod}} {{instance}} shares"),
                    ),
                ),
                Panel(
                    "Requests in flight from other routers",
                    "short",
                    (("max by (worker, dp_rank) (kvrouter_requests_elsewhere)", "{{worker}} {{dp_rank}}"),),
                ),
                Panel(
                    "States",
                    "short",
                    (
                        (
                            "count by (state) (max by (worker, state) (kvrouter_worker_state) == 1)",
                            "{{state}}",
                        ),
                        ("sum(max by (worker) (kvrouter_worker_up))", "used"),
                    ),
                ),
            ],
        },
    ),
    "index": (
        "kvrouter: index and event streams",
        {
            "Index": [
                Panel("Blocks held", "short", ((f"sum by (tier) (kvrouter_index_blocks{_FEW})", "{{tier}}"),)),
                Panel(
                    "Blocks held, by worker",
                    "short",
                    ((f"sum by (worker, dp_rank) (kvrouter_index_blocks{_FEW})", "{{worker}} {{dp_rank}}"),),
                ),
                Panel(
                    "Blocks without their parent",
                    "short",
                    ((f"sum by (worker, dp_rank) (kvrouter_index_orphan_blocks{_FEW})", "{{worker}} {{dp_rank}}"),),
                ),
            ],
            "Streams": [
                Panel(
                    "States",
                    "short",
                    ((f"sum by (state) (kvrouter_stream_state{_FEW})", "{{state}}"),),
                ),
                Panel(
                    "From an event to the index",
                    "s",
                    ((f"max by (worker, dp_rank) (kvrouter_stream_lag_seconds{_FEW})", "{{worker}} {{dp_rank}}"),),
                ),
                Panel(
                    "Since nothing was known to be missing",
                    "s",
                    (
                        (
                            f"max by (worker, dp_rank) (kvrouter_stream_seconds_since_confirmed{_FEW})",
                            "{{worker}} {{dp_rank}}",
                        ),
                    ),
                ),
                Panel(
                    "Event batches",
                    "ops",
                    (
                        (
                            f"sum by (worker, dp_rank) (rate(kvrouter_stream_batches_total{_FEW}[$__rate_interval]))",
                            "{{worker}} {{dp_rank}}",
                        ),
                    ),
                ),
                Panel(
                    "What went wrong",
                    "short",
                    tuple(
                        (f"sum(increase(kvrouter_stream_{what}_total{_FEW}[$__rate_interval]))", what.replace("_", " "))
                        for what in ("gaps", "replays", "lost_batches", "restarts", "resyncs", "unreadable")
                    ),
                ),
                Panel(
                    "Predicted from",
                    "short",
                    ((f"sum by (basis) (kvrouter_audit_basis{_FEW})", "{{basis}}"),),
                ),
            ],
        },
    ),
}


def dashboard(name: str) -> str:
    """The text of a dashboard."""
    title, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in rows.items():
        panels.append(
            {"type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "id": len(panels) + 1}
        )
        y += 1
        for place, panel in enumerate(members):
            position = {"x": place % 3 * 8, "y": y + place // 3 * 8, "w": 8, "h": 8}
            panels.append(_panel(panel, len(panels) + 1, position))
        y += -(-len(members) // 3) * 8
    variables = [
        {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": _SOURCE,
            "query": "label_values(kvrouter_decisions_total, model)"
            if name == "router"
            else "label_values(kvrouter_index_blocks, model)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    document = {
        "uid": f"kvrouter-{name}",
        "title": title,
        "tags": ["kvrouter"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(document, indent=2) + "\n"


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    """Write every dashboard."""
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(dashboard(name))


if __name__ == "__main__":
    main()
