"""Settings from EndpointPickerConfigs, with files in the form of llm-d's guides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from router.settings import Settings
from router.settings.endpoint_picker import PickerConfig, read_picker_config

PRECISE: dict[str, Any] = {
    "apiVersion": "llm-d.ai/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [
        {"type": "single-profile-handler"},
        {"type": "precise-prefix-cache-scorer", "parameters": {"tokenProcessorConfig": {"blockSize": 64}}},
        {"type": "queue-scorer", "name": "queues"},
        {"type": "max-score-picker"},
    ],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "precise-prefix-cache-scorer", "weight": 3.0},
                {"pluginRef": "queues", "weight": 2},
                {"pluginRef": "max-score-picker"},
            ],
        }
    ],
}


def read(folder: Path, **fields: Any) -> PickerConfig:
    file = folder / "epp.yaml"
    file.write_text(yaml.safe_dump(PRECISE | fields))
    found = read_picker_config(file)
    if not found.refused:
        Settings(**found.sections)  # type: ignore[arg-type]
    return found


def plugins(*types: str) -> dict[str, Any]:
    return {"plugins": [{"type": each} for each in types], "schedulingProfiles": []}


def test_prefix_and_load_scorers_are_the_default_policy_and_weights_are_listed(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert (found.sections, found.refused) == ({"policy": {"name": "kv_aware"}}, [])
    assert found.ignored == [
        "parameter tokenProcessorConfig of precise-prefix-cache-scorer: the router learns or has its own",
        "weight 3 of precise-prefix-cache-scorer: the policy has one cost",
        "weight 2 of queues: the policy has one cost",
    ]


@pytest.mark.parametrize(
    ("types", "policy"),
    [
        (["queue-scorer", "kv-cache-utilization-scorer"], "least_loaded"),
        (["session-affinity-scorer"], "session_affinity"),
        (["session-affinity-filter", "prefix-cache-scorer"], "session_affinity"),
        (["random-picker"], "random"),
        (["prefix-cache-scorer", "queue-scorer", "prefill-filter", "decode-filter", "pd-profile-handler"], "kv_aware"),
    ],
)
def test_scorers_name_the_policy(tmp_path: Path, types: list[str], policy: str) -> None:
    assert read(tmp_path, **plugins(*types)).sections["policy"] == {"name": policy}


GUIDES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("llm_d_guides.yaml").read_text())


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_of_llm_d_are_mapped_or_refused_by_name(tmp_path: Path, guide: str) -> None:
    given = GUIDES[guide]
    profiles = given["profiles"]
    found = read(
        tmp_path,
        apiVersion=given["apiVersion"],
        plugins=[each if isinstance(each, dict) else {"type": each} for each in given["plugins"]],
        schedulingProfiles=[
            {"name": name, "plugins": [{"pluginRef": each} for each in profiles[name]]} for name in profiles
        ],
        **given.get("fields", {}),
    )
    refused = given.get("refused", [])
    assert len(found.refused) == len(refused), found.refused
    assert all(map(str.startswith, found.refused, refused)), found.refused
    if not refused:
        assert found.sections == given["sections"]


def test_flow_control_becomes_admission_if_its_gate_is_on(tmp_path: Path) -> None:
    flow = {"maxBytes": "1Gi", "maxRequests": "1k", "defaultRequestTTL": "1m30s", "noEndpointRequestTTL": "5m"}
    on = read(tmp_path, featureGates=["flowControl", "other=true"], flowControl=flow)
    admission = {"queue": 1000, "queue_bytes": 2**30, "timeout": 90.0, "cold_start_timeout": 300.0}
    assert on.sections["admission"] == admission
    assert "featureGates: other" in on.ignored
    for gates in ([], ["flowControl=false"]):
        off = read(tmp_path, featureGates=gates, flowControl=flow)
        assert "admission" not in off.sections
        assert "flowControl.maxBytes: the gate flowControl is off" in off.ignored


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        (plugins("prefix-cache-scorer", "label-selector-filter"), "plugins: label-selector-filter: "),
        ({"schedulingProfiles": [{"name": "a", "plugins": [{"pluginRef": "gone"}]}]}, "schedulingProfiles: gone: "),
        ({"schedulingProfiles": [{"name": each, "plugins": []} for each in "ab"]}, "schedulingProfiles: a, b: "),
        ({"featureGates": ["flowControl"], "flowControl": {"enableEviction": True}}, "flowControl.enableEviction: "),
        (
            {"featureGates": ["flowControl"], "flowControl": {"defaultRequestTTL": "0s"}},
            "flowControl.defaultRequestTTL: ",
        ),
        ({"dataLayer": {"discovery": {"pluginRef": "file-discovery"}}}, "dataLayer.discovery: "),
        ({"surprise": 1}, "surprise: "),
    ],
)
def test_other_meanings_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], refused: str) -> None:
    [found] = read(tmp_path, **fields).refused
    assert found.startswith(refused)


def test_parameters_with_a_counterpart_become_settings(tmp_path: Path) -> None:
    producer = {"type": "session-id-producer", "parameters": {"headerName": "x-chat"}}
    decider = {"type": "always-disagg-pd-decider"}
    found = read(tmp_path, plugins=[producer, decider, {"type": "prefix-cache-scorer"}], schedulingProfiles=[])
    assert found.sections["proxy"] == {"session_headers": ["x-chat"]}
    assert found.sections["disaggregation"] == {"decode_computes": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "Pod"},
        {"apiVersion": "v1"},
        {"plugins": ["queue-scorer"]},
        {"plugins": [{"name": "a"}]},
        {"schedulingProfiles": [{"name": "a"}]},
        {"featureGates": ["flowControl"], "flowControl": {"maxBytes": "much"}},
        {"featureGates": ["flowControl"], "flowControl": {"defaultRequestTTL": "60"}},
    ],
)
def test_other_forms_are_errors(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"epp\.yaml|quantity|duration"):
        read(tmp_path, **fields)
