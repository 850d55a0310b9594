"""Settings from an EndpointPickerConfig, with which llm-d's scheduler is configured (`llm-d.ai/v1alpha1`).

A part with a counterpart becomes settings, or belongs to the default policy. A part that would have another meaning is
refused by its name. All others are ignored, and listed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

_GROUPS: Final = ("llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
# Parts that weigh cached prefixes and predicted latency. The default policy has one cost for all, without weights.
_PREFIX: Final = frozenset(
    (
        *("prefix-cache-scorer", "precise-prefix-cache-scorer", "prefix-cache-affinity-filter"),
        *("latency-scorer", "slo-headroom-tier-filter"),
    )
)
_LOAD: Final = frozenset(
    f"{name}-scorer"
    for name in (
        *("queue", "kv-cache-utilization", "running-requests-size", "active-request"),
        *("load-aware", "token-load", "no-hit-lru"),
    )
)
_SESSION: Final = frozenset(("session-affinity-scorer", "session-affinity-filter"))
_RANDOM: Final = "random-picker"
_WEIGHTED: Final = "weighted-random-picker"
_PAIRS: Final = frozenset(
    (
        *("disagg-profile-handler", "pd-profile-handler", "disagg-headers-handler", "prefill-header-handler"),
        *("prefill-filter", "decode-filter", "encode-filter", "prefix-based-pd-decider", "always-disagg-pd-decider"),
        *("always-disagg-multimodal-decider", "data-parallel-profile-handler"),
        *("disaggregatedset-rollout-screener", "disaggregatedset-rollout-pod-extractor"),
    )
)
# Parts that the router has by itself.
_BUILT_IN: Final = frozenset(
    (
        *("single-profile-handler", "max-score-picker", "tokenizer", "token-producer", "session-id-producer"),
        *("openai-parser", "anthropic-parser", "sglanghttp-parser"),
        *("precise-prefix-cache-producer", "approx-prefix-cache-producer"),
        *("inflight-load-producer", "predicted-latency-producer", "agent-identity"),
        *("metrics-data-source", "core-metrics-extractor", "models-data-source", "models-data-extractor"),
        *("endpoint-notification-source", "k8s-notification-source"),
        *("utilization-detector", "concurrency-detector", "round-robin-fairness-policy", "fcfs-ordering-policy"),
    )
)
_KNOWN: Final = _PREFIX | _LOAD | _SESSION | _PAIRS | _BUILT_IN | {_RANDOM, _WEIGHTED}
# What to do instead of a part without a counterpart.
_INSTEAD: Final = {
    "latency-slo-admitter": "set when_late: refuse of a service level",
    "lora-affinity-scorer": "the adapters that an engine has loaded are not read",
    "p2p-source-producer": "set pulls.protocol",
    "program-aware-fairness": "the queue is fair in tokens",
}
_OWN_POLICY: Final = "a policy of your own can replace a filter or a scorer"
_PAIR_PROFILES: Final = frozenset(("prefill", "decode", "encode"))
_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# Fields of `flowControl` and the settings of `admission` that they become.
_NUMBERS: Final = {"maxRequests": "queue", "maxBytes": "queue_bytes"}
_TIMES: Final = {"defaultRequestTTL": "timeout", "noEndpointRequestTTL": "cold_start_timeout"}
_FLOW_REFUSED: Final = {
    "enableEviction": "running requests are never ended for others",
    "priorityBands": "all priorities share one queue",
    "defaultPriorityBand": "all priorities share one queue",
    "defaultNegativePriorityBand": "all priorities share one queue; those below 0 never wait",
    "usageLimitPolicyPluginRef": "set admission.requests instead",
}


@dataclass
class PickerConfig:
    """The result of reading a file.

    - `sections`: sections of the settings.
    - `ignored`, `refused`: what has no effect, and what would have another meaning; each in words.
    """

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def set(self, section: str, name: str, value: Any) -> None:
        """Set a setting."""
        self.sections.setdefault(section, {})[name] = value


def read_picker_config(file: Path) -> PickerConfig:
    """Read an EndpointPickerConfig. Raises OSError, and ValueError for other files."""
    try:
        given = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not YAML: {error}") from error
    if not isinstance(given, dict) or given.get("kind") != "EndpointPickerConfig":
        raise ValueError(f"{file}: kind is not EndpointPickerConfig")
    if given.get("apiVersion") not in _GROUPS:
        raise ValueError(f"{file}: apiVersion is {given.get('apiVersion')!r}. Known are {' and '.join(_GROUPS)}")
    found = PickerConfig()
    try:
        _read_plugins(given, found)
        _read_flow_control(given, found)
        _read_others(given, found)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not the form of an EndpointPickerConfig: {error!r}") from error
    return found


def _read_plugins(given: dict[str, Any], found: PickerConfig) -> None:
    types: dict[str, str] = {}
    for plugin in given.get("plugins") or []:
        kind = plugin["type"]
        types[plugin.get("name") or kind] = kind
        if kind not in _KNOWN:
            found.refused.append(f"plugins: {kind}: it has no counterpart: {_INSTEAD.get(kind, _OWN_POLICY)}")
        if kind == _WEIGHTED:
            found.ignored.append(f"{kind}: the lowest cost is chosen, and ties at random")
        _read_parameters(kind, plugin.get("parameters") or {}, found)
    profiles = given.get("schedulingProfiles") or [
        {"name": "default", "plugins": [{"pluginRef": each} for each in types]}
    ]
    names = {profile["name"] for profile in profiles}
    if len(names) > 1 and not names <= _PAIR_PROFILES:
        found.refused.append(
            f"schedulingProfiles: {', '.join(sorted(names))}: a router has one profile, or those of pairs"
        )
    used: set[str] = set()
    for profile in profiles:
        for plugin in profile["plugins"]:
            reference = plugin["pluginRef"]
            if reference not in types:
                found.refused.append(f"schedulingProfiles: {reference}: no plugin has this name")
                continue
            used.add(types[reference])
            if plugin.get("weight") is not None:
                found.ignored.append(f"weight {plugin['weight']:g} of {reference}: the policy has one cost")
    found.set("policy", "name", _policy(used))


def _policy(used: set[str]) -> str:
    if _RANDOM in used:  # It picks without regard to scores.
        return "random"
    if "session-affinity-filter" in used:
        return "session_affinity"
    if used & _PREFIX:
        return "kv_aware"
    if used & _LOAD:
        return "least_loaded"
    if used & _SESSION:
        return "session_affinity"
    return "kv_aware"


def _read_parameters(kind: str, parameters: dict[str, Any], found: PickerConfig) -> None:
    if kind == "always-disagg-pd-decider":
        found.set("disaggregation", "decode_computes", False)
    header = parameters.get("headerName") if kind == "session-id-producer" else None
    if header is not None:
        found.set("proxy", "session_headers", [header])
    for name in parameters:
        if name != "headerName" or header is None:
            found.ignored.append(f"parameter {name} of {kind}: the router learns or has its own")


def _read_flow_control(given: dict[str, Any], found: PickerConfig) -> None:
    gates = {
        name: value != "false" for name, _, value in (gate.partition("=") for gate in given.get("featureGates") or [])
    }
    on = gates.pop("flowControl", False)
    found.ignored += [f"featureGates: {name}" for name in gates]
    flow = given.get("flowControl") or {}
    if not on:
        found.ignored += [f"flowControl.{name}: the gate flowControl is off" for name in flow]
        return
    for name, value in flow.items():
        if name in _FLOW_REFUSED and value:
            found.refused.append(f"flowControl.{name}: {_FLOW_REFUSED[name]}")
        elif name in _NUMBERS:
            number = _quantity(str(value))
            if number:  # 0: no limit of its own
                found.set("admission", _NUMBERS[name], number)
        elif name in _TIMES:
            seconds = _duration(str(value))
            if not seconds:
                found.refused.append(f"flowControl.{name}: 0 waits for ever, and every wait of the router has a limit")
            else:
                found.set("admission", _TIMES[name], seconds)
        else:
            found.ignored.append(
                f"flowControl.{name}: set admission.requests to the engine's number of running requests"
            )


def _read_others(given: dict[str, Any], found: PickerConfig) -> None:
    layer = given.get("dataLayer") or {}
    if layer.get("discovery"):
        found.refused.append("dataLayer.discovery: list the workers in the settings, or set kubernetes.selector")
    for name in layer:
        if name != "discovery":
            found.ignored.append(f"dataLayer.{name}: the router reads engines itself; replicas.redis shares load")
    known = {
        "apiVersion",
        "kind",
        "metadata",
        "plugins",
        "schedulingProfiles",
        "featureGates",
        "flowControl",
        "dataLayer",
    }
    for name in given.keys() - known:
        if name in ("requestHandler", "parser", "saturationDetector"):
            found.ignored.append(f"{name}: the router has its own")
        else:
            found.refused.append(f"{name}: the field is unknown")


def _quantity(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)(k|[MGT]|[KMGT]i)?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity such as 100, 1k or 1Gi")
    return int(match[1]) * _UNITS[match[2] or ""]


def _duration(text: str) -> float:
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        raise ValueError(f"{text!r} is not a duration such as 60s or 1m30s")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
