"""The generator of the chart's Grafana dashboards: `python deploy/helm/dashboards.py`.

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
    """A panel. Each query has the legend of its series. Values from `bad_from` on are red. `width` is in 24ths."""

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

_RATE = "[$__rate_interval]"


def _engines(vllm: str, sglang: str, of: str = "{}") -> tuple[tuple[str, str], ...]:
    """Return the queries of a metric of vLLM and its name in SGLang, for each pod. `of`: what is summed of it."""
    return tuple((f"sum by (pod) ({of.format(f'{name}{_NAMED}')})", "{{pod}}") for name in (vllm, sglang))


_NAMED = '{model_name=~"$model"}'
_PER_SECOND = "rate({}" + _RATE + ")"
_TTFT = "time_to_first_token_seconds_bucket"

# The metric whose label has the names of models, by dashboard.
_MODELS = {
    "router": "kvrouter_decisions_total, model",
    "index": "kvrouter_index_blocks, model",
    "engines": '{__name__=~"vllm:num_requests_running|sglang:num_running_reqs"}, model_name',
}

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
                    "The share of workers that receive requests. The others are down, ejected or drained.",
                    Kind.NUMBER,
                    4,
                ),
                Panel(
                    "Requests",
                    "reqps",
                    ((f"sum(rate(kvrouter_requests_total{_FEW}[$__rate_interval]))", "answered"),),
                    "Requests that workers answer per second.",
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
                    "Shares of all requests: worker errors, and refusals by the router without capacity.",
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
                            "reported by engines",
                        ),
                    ),
                    "The main result of routing. Both shares should be equal; the alert KvrouterDrift compares them.",
                    Kind.NUMBER,
                    4,
                ),
                Panel(
                    "Time to first byte, p90",
                    "s",
                    (_quantiles("kvrouter_time_to_first_byte_seconds")[1],),
                    "90 % of requests have an earlier first byte.",
                    Kind.NUMBER,
                    4,
                ),
                Panel(
                    "Queued requests",
                    "short",
                    (("sum(kvrouter_admission_queue_length)", "waiting"),),
                    "Requests in the queue: all workers are at their limits, or the best one is busy.",
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
                    "Tokens per second. Generated tokens need answers with usage, which proxy.ask_usage requests.",
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
                    "Requests by time to the first byte. A second band is requests that missed the cache, or waited.",
                    Kind.HEATMAP,
                ),
                Panel(
                    "Load of each rank",
                    "short",
                    (("sum by (worker, dp_rank) (kvrouter_requests_in_flight)", "{{worker}} {{dp_rank}}"),),
                    "Current requests in flight. Different lengths are normal. A rank that is always "
                    "the longest is overloaded.",
                    Kind.BARS,
                ),
            ],
            "Clients": [
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
                    "Time from a complete request to the first byte of its answer, in router and worker.",
                ),
                Panel(
                    "Time per output token",
                    "s",
                    _quantiles("kvrouter_time_per_output_token_seconds"),
                    "Time per token from the first byte of a stream to its last, for streams that report usage.",
                ),
                Panel(
                    "Refused, interrupted, aborted, retried",
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
                    "Refused by the router, interrupted by a worker, aborted by the client, or retried.",
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
                    "Requests by tenant and status. Empty without configured tenants.",
                ),
            ],
            "Routing": [
                Panel(
                    "Prompt tokens from cache",
                    "percentunit",
                    (
                        (_share("kvrouter_overlap_tokens_total", "kvrouter_prompt_tokens_total"), "chosen worker"),
                        (_share("kvrouter_best_overlap_tokens_total", "kvrouter_prompt_tokens_total"), "best worker"),
                        (
                            _share("kvrouter_audit_cached_tokens_total", "kvrouter_audit_prompt_tokens_total"),
                            "reported by engines",
                        ),
                    ),
                    "First to second: the cost of balance. First to last: the error of predictions.",
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
                    "Cost in the legend's unit: prefill tokens, or seconds for different workers.",
                ),
                Panel(
                    "Time in the router",
                    "s",
                    _quantiles("kvrouter_queue_seconds"),
                    "Time from a complete request to its forwarding: tokenizing, deciding, queueing.",
                ),
                Panel(
                    "Prediction errors",
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
                    "Tokens per second.",
                ),
                Panel(
                    "Tokenizer of each model",
                    "short",
                    ((f"max by (model, source) (kvrouter_tokenizer{_FEW}) == 1", "{{model}}: {{source}}"),),
                    "1 for the source of a model's tokens: here (local), workers (engine), both (mixed), none (text).",
                ),
                Panel(
                    "Memory of the prompt cache",
                    "bytes",
                    ((f"sum by (model) (kvrouter_tokenizer_cache_bytes{_FEW})", "{{model}}"),),
                    "Memory of the cache of tokenized prompts, at most tokenizer.cache_bytes.",
                ),
            ],
            "Waiting": [
                Panel(
                    "Queued requests",
                    "short",
                    (("sum by (priority) (kvrouter_admission_queue_length)", "priority {{priority}}"),),
                    "Requests in the queue, by priority.",
                ),
                Panel(
                    "Queued bytes",
                    "bytes",
                    (("sum(kvrouter_admission_queue_bytes)", "bodies"),),
                    "Bytes of the bodies in the queue, at most admission.queue_bytes.",
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
                    "90 % of queued requests were forwarded earlier.",
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
                    "Requests refused with 429: the queue was full, or the wait too long.",
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
                    "Requests in flight on each rank, and requests of other clients, by its metrics.",
                ),
                Panel(
                    "Used workers",
                    "short",
                    (("max by (worker) (kvrouter_worker_up)", "{{worker}}"),),
                    "1 while it is used. A worker that changes often restarts, or its network is unstable.",
                    Kind.STATES,
                ),
                Panel(
                    "Uncached tokens waiting for prefill",
                    "short",
                    (("sum by (worker, dp_rank) (kvrouter_prefill_tokens_in_flight)", "{{worker}} {{dp_rank}}"),),
                    "Prompt tokens sent to each rank whose first byte is pending.",
                ),
                Panel(
                    "KV memory in use",
                    "percentunit",
                    (("max by (worker, dp_rank) (kvrouter_kv_usage_ratio)", "{{worker}} {{dp_rank}}"),),
                    "KV memory in use, as each engine reports it.",
                ),
                Panel(
                    "Requests in the engines' queues",
                    "short",
                    (("max by (worker, dp_rank) (kvrouter_engine_queue_size)", "{{worker}} {{dp_rank}}"),),
                    "Requests that wait in each engine, as it reports.",
                ),
                Panel(
                    "Routers that share their load",
                    "short",
                    (
                        ("max by (pod, instance) (kvrouter_sharing_routers)", "{{pod}} {{instance}} peers"),
                        ("min by (pod, instance) (kvrouter_sharing_up)", "{{pod}} {{instance}} shares"),
                    ),
                    "Number of other routers that each router receives load from, and 1 while it shares its own.",
                ),
                Panel(
                    "Requests in flight from other routers",
                    "short",
                    (("max by (worker, dp_rank) (kvrouter_requests_elsewhere)", "{{worker}} {{dp_rank}}"),),
                    "Requests of other routers, as this router knows them.",
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
                    "Workers by state; `used` counts those that receive requests.",
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
                    "Blocks in the index, by memory tier.",
                ),
                Panel(
                    "Blocks held, by worker",
                    "short",
                    ((f"sum by (worker, dp_rank) (kvrouter_index_blocks{_FEW})", "{{worker}} {{dp_rank}}"),),
                    "Blocks in the index, by rank. A rank with few blocks was restarted, or its events are missing.",
                ),
                Panel(
                    "Blocks without their parent",
                    "short",
                    ((f"sum by (worker, dp_rank) (kvrouter_index_orphan_blocks{_FEW})", "{{worker}} {{dp_rank}}"),),
                    "Blocks that wait for their parent. The number should fall to zero after a start.",
                ),
            ],
            "Streams": [
                Panel(
                    "States",
                    "short",
                    ((f"sum by (state) (kvrouter_stream_state{_FEW})", "{{state}}"),),
                    "Event streams by state. All should be live.",
                ),
                Panel(
                    "Delay of events",
                    "s",
                    ((f"max by (worker, dp_rank) (kvrouter_stream_lag_seconds{_FEW})", "{{worker}} {{dp_rank}}"),),
                    "Age of an event when it is applied to the index.",
                ),
                Panel(
                    "Time since the last confirmation",
                    "s",
                    (
                        (
                            f"max by (worker, dp_rank) (kvrouter_stream_seconds_since_confirmed{_FEW})",
                            "{{worker}} {{dp_rank}}",
                        ),
                    ),
                    "Seconds since the index was known to be complete. It grows while a stream is lost or replayed.",
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
                    "Applied batches per second.",
                ),
                Panel(
                    "Stream problems",
                    "short",
                    tuple(
                        (f"sum(increase(kvrouter_stream_{what}_total{_FEW}[$__rate_interval]))", what.replace("_", " "))
                        for what in ("gaps", "replays", "lost_batches", "restarts", "resyncs", "unreadable")
                    ),
                    "Gaps, replays, losses and unreadable messages of streams.",
                ),
                Panel(
                    "Basis of predictions",
                    "short",
                    ((f"sum by (basis) (kvrouter_audit_basis{_FEW})", "{{basis}}"),),
                    "Ranks by the basis of their cache prediction: events, events read again, or sent prompts.",
                ),
            ],
        },
    ),
    "engines": (
        "kvrouter: engines",
        {
            "Load": [
                Panel(
                    "Running requests",
                    "short",
                    _engines("vllm:num_requests_running", "sglang:num_running_reqs"),
                    "Requests that each engine computes now.",
                ),
                Panel(
                    "Waiting requests",
                    "short",
                    _engines("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
                    "Requests in the queue of each engine. A long queue beside idle engines has few cached prefixes.",
                ),
                Panel(
                    "KV memory in use",
                    "percentunit",
                    _engines("vllm:kv_cache_usage_perc", "sglang:token_usage"),
                    "Share of the KV cache that running requests hold. Near 100%, engines preempt requests.",
                ),
            ],
            "Work": [
                Panel(
                    "Prompt tokens",
                    "short",
                    _engines("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", _PER_SECOND),
                    "Prompt tokens per second of each engine, cached ones included.",
                ),
                Panel(
                    "Generated tokens",
                    "short",
                    _engines("vllm:generation_tokens_total", "sglang:generation_tokens_total", _PER_SECOND),
                    "Tokens of answers per second of each engine.",
                ),
                Panel(
                    "Prompt tokens from cache",
                    "percentunit",
                    (
                        (
                            f"sum by (pod) (rate(vllm:prefix_cache_hits_total{_NAMED}{_RATE}))"
                            f" / sum by (pod) (rate(vllm:prefix_cache_queries_total{_NAMED}{_RATE}))",
                            "{{pod}}",
                        ),
                        (f"avg by (pod) (sglang:cache_hit_rate{_NAMED})", "{{pod}}"),
                    ),
                    "Share of prompt tokens that each engine found in its own cache.",
                ),
            ],
            "Latency": [
                Panel(
                    "Time to first token, p90",
                    "s",
                    tuple(
                        (
                            f"histogram_quantile(0.9, sum by (pod, le) (rate({engine}:{_TTFT}{_NAMED}{_RATE})))",
                            "{{pod}}",
                        )
                        for engine in ("vllm", "sglang")
                    ),
                    "Time in the engine until the first token. The time in the router is not part of it.",
                    width=12,
                ),
                Panel(
                    "Preemptions",
                    "short",
                    ((f"sum by (pod) (rate(vllm:num_preemptions_total{_NAMED}{_RATE}))", "{{pod}}"),),
                    "Requests per second that vLLM interrupted for lack of KV memory, and computes again.",
                    width=12,
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
            "query": f"label_values({_MODELS[name]})",
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
