"""The rules of InferenceModelRewrites: which counts, and how targets share requests."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import pytest

from router.picker.model_rewrites import ModelRewrites


def rewrite(name: str, created: str, *rules: dict[str, Any], pool: str = "ours") -> dict[str, Any]:
    metadata = {"name": name, "creationTimestamp": created, "resourceVersion": "1"}
    return {"metadata": metadata, "spec": {"poolRef": {"name": pool}, "rules": list(rules)}, "status": {}}


def rule(target: str, *models: str) -> dict[str, Any]:
    matches = [{"model": {"type": "Exact", "value": model}} for model in models]
    return {"matches": matches, "targets": [{"modelRewrite": target, "weight": 1}]}


async def rules_of(*objects: dict[str, Any], **options: Any) -> ModelRewrites:
    rewrites = ModelRewrites(**options)
    await rewrites.follow(objects)
    return rewrites


async def test_exact_rules_count_before_generic_ones_and_older_objects_before_newer_ones() -> None:
    old, new = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
    rewrites = await rules_of(
        rewrite("a", new, rule("new", "m", "only-new"), rule("second", "m")),
        rewrite("b", old, rule("generic"), rule("old", "m"), rule("later", "m")),
        rewrite("c", old, rule("by-name", "m")),
    )
    assert [rewrites.target(model, None) for model in ("m", "only-new", "other")] == ["old", "new", "generic"]


async def test_models_without_a_rule_are_kept() -> None:
    rewrites = await rules_of(rewrite("a", "", rule("x", "m")))
    assert rewrites.target("other", None) is None
    await rewrites.follow([])
    assert not rewrites
    assert rewrites.target("m", None) is None


async def test_rules_of_other_pools_are_ignored_if_the_pool_is_named() -> None:
    other = rewrite("a", "", rule("x", "m"), pool="other")
    assert not await rules_of(other, pool="ours")
    assert await rules_of(other)
    assert await rules_of(rewrite("a", "", rule("x", "m")), pool="ours")


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((9, 1), (90, 10)), ((None, None), (50, 50)), ((0, 0), (50, 50)), ((0, 5), (0, 100))],
)
async def test_targets_share_by_their_weights(weights: tuple[Any, Any], shares: tuple[int, int]) -> None:
    targets = [
        {"modelRewrite": name} | ({} if w is None else {"weight": w}) for name, w in zip("ab", weights, strict=True)
    ]
    numbers = count()
    rewrites = await rules_of(rewrite("a", "", {"targets": targets}), draw=lambda: next(numbers) / 100)
    drawn = Counter(rewrites.target("m", None) for _ in range(100))
    assert (drawn["a"], drawn["b"]) == shares


async def test_a_session_keeps_its_target() -> None:
    targets = [{"modelRewrite": name, "weight": 1} for name in "ab"]
    rewrites = await rules_of(rewrite("a", "", {"targets": targets}))
    drawn = {f"session {number}": {rewrites.target("m", f"session {number}") for _ in range(5)} for number in range(64)}
    assert all(len(found) == 1 for found in drawn.values())
    assert 16 < sum(found == {"a"} for found in drawn.values()) < 48


@pytest.mark.parametrize(
    "spec",
    [
        {"rules": [{"targets": []}]},
        {"rules": [{"matches": [{}], "targets": [{"modelRewrite": "x"}]}]},
        {"rules": [{"matches": [{"model": {"type": "Regex", "value": "m"}}], "targets": [{"modelRewrite": "x"}]}]},
        {"rules": [{"targets": [{"weight": 1}]}]},
        {"rules": [{"targets": [{"modelRewrite": "x", "weight": "1"}]}]},
        {"rules": None},
        {},
        None,
    ],
)
async def test_rules_that_say_nothing_and_invalid_objects_are_ignored(spec: Any) -> None:
    valid = rewrite("v", "", rule("y", "n"))
    rewrites = await rules_of({"metadata": {"name": "r"}, "spec": spec}, {}, valid)
    assert (rewrites.target("m", None), rewrites.target("n", None)) == (None, "y")
