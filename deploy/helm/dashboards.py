"""Writes the chart's Grafana dashboards: `python deploy/helm/dashboards.py`.

A panel has a title, a description, a unit of Grafana, and queries with their legends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "kvrouter" / "dashboards"

_FEW = '{model=~"$model"}'
_SOURCE = {"type": "prometheus", "uid": "${source}"}


class Kind(StrEnum):
    """The kind of a panel in Grafana."""

    OVER_TIME = "timeseries"
    NUMBER = "stat"
    BARS = "bargauge"
    HEATMAP = "heatmap"
    STATES = "state-timeline"


@dataclass(frozen=True)
class Panel:
    """A panel: each query has the legend of its series. Values from `bad_from` on are bad. `width` is a part of 24."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str
    kind: Kind = Kind.OVER_TIME
    width: int = 8
    bad_from: float | None = None


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


_ALL_REQUESTS = 'sum(rate({__name__=~"kvrouter_requests_total|kvrouter_requests_refused_total"}[$__rate_interval]))'

DASHBOARDS: dict[str, tuple[str, dict[str, list[Panel]]]] = {
    "router": (
        "kvrouter: requests",
        {
            "Overview": [
                Panel(
                    "Workers used",
                    "percentunit",
                    (
                        (
                            "sum(max by (worker) (kvrouter_worker_up)) / count(max by (worker) (kvrouter_worker_up))",
                            "used",
                        ),
                    ),
                    "The share of the workers that requests go to. Those that are not are down, left out or drained.",
                    Kind.NUMBER,
                    4,
                ),
                Panel(
                    "Requests",
                    "reqps",
                    ((f"sum(rate(kvrouter_requests_total{_FEW}[$__rate_interval]))", "answered"),),
                    "Requests that workers answer, each second.",
                    Kind.NUMBER,
                    4,
                ),
                Panel(
                    "Errors and refusals",
                    "percentunit",
                    (
                        (
                            '(sum(rate(kvrouter_requests_total{status=~"5.."}[$__rate_interval])) or vector(0))'
                            f" / {_ALL_REQUESTS}",
                            "5xx of workers",
                        ),
                        (
                            '(sum(rate(kvrouter_requests_refused_total{status=~"429|503"}[$__rate_interval]))'
                            f" or vector(0)) / {_ALL_REQUESTS}",
                            "429 and 503 of the router",
                        ),
                    ),
                    "Of all requests: answered with an error by a worker, and refused by the router for want of room.",
                    Kind.NUMBER,
                    4,
                    0.01,
                ),
                Panel(
                    "Prompt tokens from cache",
                    "percentunit",
                    (
                        (_share("kvrouter_overlap_tokens_total", "kvrouter_prompt_tokens_total"), "predicted"),
                        (
                            _share("kvrouter_audit_cached_tokens_total", "kvrouter_audit_prompt_tokens_total"),
                            "as engines told",
                        ),
                    ),
                    "What the router is for. The two should be the same; the alert KvrouterDrift watches them.",
                    Kind.NUMBER,
                    4,
                ),
                Panel(
                    "Time to first byte, p90",
                    "s",
                    (_quantiles("kvrouter_time_to_first_byte_seconds")[1],),
                    "Of ten requests nine have their first byte sooner.",
                    Kind.NUMBER,
                    4,
                ),
                Panel(
                    "Requests that wait",
                    "short",
                    (("sum(kvrouter_admission_queue_length)", "waiting"),),
                    "In the router: all workers are at their limits, or the best one is busy with long prompts.",
                    Kind.NUMBER,
                    4,
                ),
                Panel(
                    "Tokens",
                    "short",
                    (
                        (f"sum(rate(kvrouter_prompt_tokens_total{_FEW}[$__rate_interval]))", "of prompts"),
                        (f"sum(rate(kvrouter_completion_tokens_total{_FEW}[$__rate_interval]))", "generated"),
                    ),
                    "Each second. Generated ones where answers report their usage: with proxy.ask_usage all do.",
                ),
                Panel(
                    "Time to first byte",
                    "s",
                    (
                        (
                            "sum by (le) (increase("
                            f"kvrouter_time_to_first_byte_seconds_bucket{_FEW}[$__rate_interval]))",
                            "{{le}}",
                        ),
                    ),
                    "How many requests began after how long: a second band is what missed the cache, or waited.",
                    Kind.HEATMAP,
                ),
                Panel(
                    "Load of each rank",
                    "short",
                    (("sum by (worker, dp_rank) (kvrouter_requests_in_flight)", "{{worker}} {{dp_rank}}"),),
                    "Requests in flight now. Bars of unlike length are fine while caches differ; one that is always "
                    "the longest is not.",
                    Kind.BARS,
                ),
            ],
            "What clients see": [
                Panel(
                    "Requests",
                    "reqps",
                    ((f"sum by (status) (rate(kvrouter_requests_total{_FEW}[$__rate_interval]))", "{{status}}"),),
                    "Requests that workers answered, by status.",
                ),
                Panel(
                    "Time to first byte",
                    "s",
                    _quantiles("kvrouter_time_to_first_byte_seconds"),
                    "From a complete request to the first byte of its answer, router and worker together.",
                ),
                Panel(
                    "Time per output token",
                    "s",
                    _quantiles("kvrouter_time_per_output_token_seconds"),
                    "Time per token from the first byte of a stream to its last, for streams that report usage.",
                ),
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
                    "Refused by the router, broken off by a worker, left by the client, or tried elsewhere.",
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
                    "By tenant and status. Empty where no tenants are configured.",
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
                Panel(
                    "Time in the router",
                    "s",
                    _quantiles("kvrouter_queue_seconds"),
                    "From a complete request to its sending: tokenizing, deciding, waiting.",
                ),
                Panel(
                    "Predicted wrong",
                    "percentunit",
                    (
                        (f"max by (worker) (kvrouter_audit_error_ratio{_FEW})", "{{worker}}"),
                        (f"max by (worker) (kvrouter_audit_drift_ratio{_FEW})", "{{worker}} by events"),
                    ),
                    "The share of recent prompt tokens whose cached part was predicted too high or too low.",
                ),
                Panel(
                    "Tokens of answers that reported cached tokens",
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
                    "1 for each model's way: here (local), asked of workers (engine), both (mixed), none (text).",
                ),
                Panel(
                    "Memory of texts seen before",
                    "bytes",
                    ((f"sum by (model) (kvrouter_tokenizer_cache_bytes{_FEW})", "{{model}}"),),
                    "What the cache of tokenized prompts takes, tokenizer.cache_bytes at most.",
                ),
            ],
            "Waiting": [
                Panel(
                    "Requests that wait",
                    "short",
                    (("sum by (priority) (kvrouter_admission_queue_length)", "priority {{priority}}"),),
                    "Requests in the queue, by priority.",
                ),
                Panel(
                    "Bytes that wait",
                    "bytes",
                    (("sum(kvrouter_admission_queue_bytes)", "bodies"),),
                    "The bodies of the requests in the queue; admission.queue_bytes at most.",
                ),
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
                    "Of the requests that had to wait nine in ten were sent sooner.",
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
                    "Refused with 429 instead of sent: the queue was full, or the wait too long.",
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
                    "Requests in flight on each rank, and requests from elsewhere, from its metrics.",
                ),
                Panel(
                    "Which workers are used",
                    "short",
                    (("max by (worker) (kvrouter_worker_up)", "{{worker}}"),),
                    "1 while it is used. A worker that changes often restarts, or its network is unstable.",
                    Kind.STATES,
                ),
                Panel(
                    "Uncached tokens waiting for prefill",
                    "short",
                    (("sum by (worker, dp_rank) (kvrouter_prefill_tokens_in_flight)", "{{worker}} {{dp_rank}}"),),
                    "Prompt tokens sent to each rank whose first byte has not come.",
                ),
                Panel(
                    "KV memory in use",
                    "percentunit",
                    (("max by (worker, dp_rank) (kvrouter_kv_usage_ratio)", "{{worker}} {{dp_rank}}"),),
                    "As each engine reports it.",
                ),
                Panel(
                    "Routers that share their load",
                    "short",
                    (
                        ("max by (pod, instance) (kvrouter_sharing_routers)", "{{pod}} {{instance}} hears of"),
                        ("min by (pod, instance) (kvrouter_sharing_up)", "{{pod}} {{instance}} shares"),
                    ),
                    "How many others each router hears of, and 1 while it shares its own.",
                ),
                Panel(
                    "Requests in flight from other routers",
                    "short",
                    (("max by (worker, dp_rank) (kvrouter_requests_elsewhere)", "{{worker}} {{dp_rank}}"),),
                    "What this router knows of the others' requests.",
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
                    "Workers by state; `used` counts those that get requests.",
                ),
            ],
        },
    ),
    "index": (
        "kvrouter: index and event streams",
        {
            "Index": [
                Panel(
                    "Blocks held",
                    "short",
                    ((f"sum by (tier) (kvrouter_index_blocks{_FEW})", "{{tier}}"),),
                    "Blocks that the index knows of, by memory tier.",
                ),
                Panel(
                    "Blocks held, by worker",
                    "short",
                    ((f"sum by (worker, dp_rank) (kvrouter_index_blocks{_FEW})", "{{worker}} {{dp_rank}}"),),
                    "The same by rank: a rank that holds few was restarted, or its events do not come.",
                ),
                Panel(
                    "Blocks without their parent",
                    "short",
                    ((f"sum by (worker, dp_rank) (kvrouter_index_orphan_blocks{_FEW})", "{{worker}} {{dp_rank}}"),),
                    "Blocks that wait for the one before them. They should go to zero after a start.",
                ),
            ],
            "Streams": [
                Panel(
                    "States",
                    "short",
                    ((f"sum by (state) (kvrouter_stream_state{_FEW})", "{{state}}"),),
                    "Event streams by state: live is what they should be.",
                ),
                Panel(
                    "From an event to the index",
                    "s",
                    ((f"max by (worker, dp_rank) (kvrouter_stream_lag_seconds{_FEW})", "{{worker}} {{dp_rank}}"),),
                    "How old an event is when the index knows it.",
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
                    "How fresh the index is. It grows while a stream is lost or replayed.",
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
                    "Batches applied, each second.",
                ),
                Panel(
                    "What went wrong",
                    "short",
                    tuple(
                        (f"sum(increase(kvrouter_stream_{what}_total{_FEW}[$__rate_interval]))", what.replace("_", " "))
                        for what in ("gaps", "replays", "lost_batches", "restarts", "resyncs", "unreadable")
                    ),
                    "Gaps, replays and losses of streams, and what could not be read.",
                ),
                Panel(
                    "Predicted from",
                    "short",
                    ((f"sum by (basis) (kvrouter_audit_basis{_FEW})", "{{basis}}"),),
                    "Ranks by what their cache is predicted from: events, events read again, or what was sent there.",
                ),
            ],
        },
    ),
}


_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[Kind, dict[str, Any]] = {
    Kind.OVER_TIME: {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    Kind.NUMBER: {"reduceOptions": _LAST, "graphMode": "area", "colorMode": "value", "textMode": "auto"},
    Kind.BARS: {"reduceOptions": _LAST, "orientation": "horizontal", "displayMode": "basic"},
    Kind.HEATMAP: {"calculate": False, "yAxis": {"unit": "s"}, "cellGap": 1, "tooltip": {"mode": "single"}},
    Kind.STATES: {"mergeValues": True, "showValue": "never", "legend": {"displayMode": "list", "placement": "bottom"}},
}


def dashboard(name: str) -> str:
    """Return the text of a dashboard."""
    title, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in rows.items():
        panels.append(
            {"type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "id": len(panels) + 1}
        )
        y += 1
        x, height = 0, 0
        for panel in members:
            if x + panel.width > 24:
                x, y, height = 0, y + height, 0
            tall = 4 if panel.kind is Kind.NUMBER else 8
            panels.append(_panel(panel, len(panels) + 1, {"x": x, "y": y, "w": panel.width, "h": tall}))
            x, height = x + panel.width, max(height, tall)
        y += height
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
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.bad_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.bad_from}]
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    instant = panel.kind is Kind.BARS
    return {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            | ({"instant": True, "range": False} if instant else {})
            | ({"format": "heatmap"} if panel.kind is Kind.HEATMAP else {})
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
